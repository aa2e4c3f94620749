"""Every layout computes what transformers computes: logits, gradients, weights; one job a world size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from examples.policies.build.tiny import make_tiny
from tests.equality.jobs import run_job

TOOL = Path(__file__).resolve().parents[2] / "tools" / "parity.py"
JOBS = {  # processes -> (models, layouts, rank of adapters, which are compared with the merged model)
    2: [
        (["qwen3_tied", "qwen2"], ["tp2", "pp2", "pp2_vpp2", "cp2"], 0),
        (["glm4_moe"], ["tp2_sp", "pp2", "ep2", "tp2_sp_ep2_etp1"], 0),
        (["qwen3_tied", "glm4_moe"], ["tp2", "tp2_sp", "pp2", "ep2"], 4),
    ],
    3: [(["llama"], ["pp3"], 0)],  # 2 + 1 + 1 layers
    4: [(["qwen3_moe"], ["tp2_sp_pp2", "tp2_sp_ep2_etp2", "tp2_sp_cp2"], 0)],
}
# A dense model has no experts to spread, and a mixture under tensor parallelism needs its sequences split.
COMPARED = {2: [8, 4, 6], 3: [1], 4: [3]}


@pytest.mark.parametrize("processes", JOBS)
def test_layouts_equal_transformers(processes: int, tmp_path: Path) -> None:
    jobs = [
        {
            "models": {name: str(make_tiny(name, tmp_path / name)) for name in models},
            "layouts": layouts,
            "dtype": "float32",
            "lora_rank": rank,
        }
        for models, layouts, rank in JOBS[processes]
    ]
    run_job("tests.equality.parity", [tmp_path / "out.json", json.dumps(jobs)], processes)
    found = [
        [differences for by_layout in job.values() for differences in by_layout.values()]
        for job in json.loads((tmp_path / "out.json").read_text())
    ]
    assert [len(job) for job in found] == COMPARED[processes]
    for differences in (differences for job in found for differences in job):
        assert max(differences["logits"], differences["gradients"]) < 1e-5, differences
        assert differences["round_trip"]


def test_the_tool_compares_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    command = [sys.executable, str(TOOL), "--model", "llama", "--layouts", "tp1", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    differences = json.loads(out.read_text())["models"]["llama"]["tp1"]
    assert max(differences["logits"], differences["gradients"]) < 1e-5 and differences["round_trip"]


def test_unknown_layout_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    command = [sys.executable, str(TOOL), "--layouts", "tp3", "--json", str(tmp_path / "x.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "tp2_sp" in done.stderr and "Traceback" not in done.stderr
