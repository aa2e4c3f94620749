"""Every layout computes what transformers computes: logits, gradients, weights; one job a world size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "parity.py"


@pytest.mark.parametrize(
    ("models", "layouts", "rank", "compared"),
    [
        ("qwen3_tied", "tp2,pp2,pp2_vpp2,cp2", 0, 4),
        ("glm4_moe", "tp2_sp,pp2,ep2,tp2_sp_ep2_etp1", 0, 4),
        ("llama", "pp3", 0, 1),  # 2 + 1 + 1 layers
        ("qwen3_moe", "tp2_sp_pp2,tp2_sp_ep2_etp2,tp2_sp_cp2", 0, 3),
        # low-rank adapters against the merged model
        ("qwen3_tied,glm4_moe", "tp2,tp2_sp,pp2,ep2", 4, 6),
    ],
)
def test_layouts_equal_transformers(models: str, layouts: str, rank: int, compared: int, tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    command = [sys.executable, str(TOOL), "--model", models, "--layouts", layouts, "--json", str(out)]
    command += ["--lora-rank", str(rank)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [d for by_layout in json.loads(out.read_text())["models"].values() for d in by_layout.values()]
    assert len(found) == compared
    assert max(max(d["logits"], d["gradients"]) for d in found) < 1e-5
    assert all(d["round_trip"] for d in found)


def test_unknown_layout_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--layouts", "tp3", "--json", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "tp2_sp" in done.stderr and "Traceback" not in done.stderr
