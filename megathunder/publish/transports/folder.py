"""Writing into the folder that learner and servers share: a fault of the folder is one that a person must mend."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from megathunder.errors import UserError


@contextlib.contextmanager
def writing(folder: Path, partial: Path) -> Iterator[None]:
    """Make `folder`; where it cannot be written to (no right, no space), remove `partial` and raise UserError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise UserError(
            f"weights could not be written to {folder}: {error}",
            expected="a folder with room for the weights twice, that this process may write to",
            remedy="free space there, set publish.folder to another one, or choose a transport that needs none",
        ) from error
