"""The learner on one GPU, in bfloat16: against the CPU in float32, accumulators in host memory, time and utilisation.

Under five minutes on one H200; skips itself where there is no GPU. `pytest tests/gpu -s` prints what was measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(400),
]
GPU = {"device": "cuda", "dtype": "bfloat16"}


def run(folder: Path, name: str, **job: object) -> dict:
    """The answer of a learner process of its own."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.rank", str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.with_suffix(".out.json").read_text())


def difference(folder: Path, one: str, other: str) -> float:
    """Norm of the difference of two gradients by the norm of the second."""
    a, b = (load_file(folder / f"{name}.safetensors") for name in (one, other))
    assert a.keys() == b.keys()
    apart = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return (apart / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5


def test_the_bfloat16_gradient_is_the_float32_gradient_of_the_cpu_to_bfloat16_precision(tmp_path: Path) -> None:
    job = {"kind": "gradient", "way": "barrier", "tokens": 192}
    run(tmp_path, "cpu", **job, learner={"device": "cpu", "dtype": "float32"})
    run(tmp_path, "gpu32", **job, learner={"device": "cuda", "dtype": "float32"})
    run(tmp_path, "gpu16", **job, learner=GPU)
    exact, rounded = difference(tmp_path, "gpu32", "cpu"), difference(tmp_path, "gpu16", "cpu")
    print(f"\ngradient, relative to CPU float32: GPU float32 {exact:.2e}, GPU bfloat16 {rounded:.2e}")
    assert exact < 2e-3  # TF32 is off by default; 1e-5 is usual
    assert rounded < 5e-2  # eight bits of mantissa through four layers


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="no Transformer Engine")
def test_transformer_engines_layers_compute_the_same_and_fp8_nearly(tmp_path: Path) -> None:
    job = {"kind": "gradient", "way": "barrier", "tokens": 192}
    run(tmp_path, "own", **job, learner=GPU | {"layers": "local"})
    run(tmp_path, "engine", **job, learner=GPU | {"layers": "transformer_engine"})
    eight = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    run(tmp_path, "fp8", **job, learner=GPU | {"layers": "transformer_engine", "megatron": eight})
    same, near = difference(tmp_path, "engine", "own"), difference(tmp_path, "fp8", "engine")
    print(f"\ngradient, relative: Transformer Engine to Megatron-Core's layers {same:.2e}, FP8 to bfloat16 {near:.2e}")
    assert same < 3e-2  # both round to bfloat16, in other places
    assert 1e-4 < near < 0.3  # three bits of mantissa; at all different, or FP8 was not on


def test_the_streamed_gradient_is_the_barrier_gradient_wherever_accumulators_lie(tmp_path: Path) -> None:
    job = {"kind": "gradient", "tokens": 192}
    run(tmp_path, "barrier", **job, way="barrier", learner=GPU)
    run(tmp_path, "device", **job, way="streamed", learner=GPU)
    host = run(tmp_path, "host", **job, way="streamed", learner=GPU | {"placement": "host"})
    assert difference(tmp_path, "device", "barrier") < 1e-5  # sums are float32, products are the same
    assert difference(tmp_path, "host", "device") < 1e-6
    assert host["exposed_copy_s"] is not None


@pytest.mark.parametrize("placement", ["device", "host"])
def test_a_streamed_update_takes_about_as_long_as_a_barrier_update(placement: str, tmp_path: Path) -> None:
    learner = GPU | {"placement": placement}
    found = run(tmp_path, placement, kind="timing", tokens=4096, repeats=5, learner=learner)
    by_way = {way: [u for u in found["updates"] if u["way"] == way] for way in ("streamed", "barrier")}
    worked = {way: median(u["worked_s"] for u in updates) for way, updates in by_way.items()}
    step = {way: median(u["step_s"] for u in updates) for way, updates in by_way.items()}
    mfu = median(u["mfu"] for u in by_way["barrier"])
    exposed = [u["exposed_copy_s"] for u in by_way["streamed"]]
    print(
        f"\n{found['device']}, {found['parameters'] / 1e9:.2f} B parameters, accumulators on {placement}: gradient "
        f"{worked['streamed']:.3f} s streamed, {worked['barrier']:.3f} s barrier; update {step['streamed']:.3f} s, "
        f"{step['barrier']:.3f} s; exposed copies {exposed}; MFU {mfu:.1%}; driver: {found['utilisation']} busy, "
        f"{found['memory_bytes']} bytes in use, {found['allocated_bytes']} allocated"
    )
    assert worked["streamed"] < (1.15 if placement == "device" else 2.0) * worked["barrier"]
    assert 0.05 < mfu < 1.0
    assert found["utilisation"] is None or found["utilisation"] > 0.2
    assert found["memory_bytes"] is None or found["memory_bytes"] >= found["allocated_bytes"] * 0.5
    if placement == "host":
        assert all(seconds is not None and seconds < worked["streamed"] for seconds in exposed)
