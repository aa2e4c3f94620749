"""TRL's own virtual environment, made once: TRL from the package index beside the torch that this project runs on."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from megathunder.errors import UserError

TRL = "trl==1.16.0"
VERSIONS = """
import json, torch, transformers, trl
print(json.dumps([trl.__version__, transformers.__version__, torch.__version__]))
"""


def trl_python(folder: Path) -> Path:
    """Python of the environment in `folder`, which is made where there is none. UserError where pip fails."""
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-input", TRL, f"torch=={version('torch')}"]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise UserError(
                f"pip could not install {TRL}: {made.stderr.strip().splitlines()[-1:]}",
                expected="a package index that has TRL and its dependencies",
                remedy=f"check pip's configuration, then run this again; {folder} is TRL's environment",
            )
        (folder / "complete").touch()
    return python


def versions_of(python: Path) -> dict[str, str]:
    """TRL, transformers and torch there."""
    found = subprocess.run([str(python), "-c", VERSIONS], capture_output=True, text=True, check=True)
    return dict(zip(("trl", "transformers", "torch"), json.loads(found.stdout.splitlines()[-1]), strict=True))
