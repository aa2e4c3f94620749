"""Every layout takes the update of one rank, in every release mode: gradient, loss, counts."""

import pytest
from safetensors.torch import load_file

from examples.policies.build.tiny import make_tiny
from tests.equality import worlds
from tests.equality.jobs import run_job
from tests.equality.layouts import run_layout

CASES = {
    "dense": (
        "qwen3_tied",
        2,
        "trajectory,turn,turn_forward,grpo_forward,prompt,exact",
        ["tp2:tensor_parallel=2", "pp2:pipeline_parallel=2"],
    ),
    "mixture": (
        "qwen3_moe",
        2,
        "trajectory,turn,turn_forward,grpo_forward",
        ["tp2_sp:tensor_parallel=2,sequence_parallel=true", "pp2:pipeline_parallel=2"],
    ),
    "spread": ("qwen3_moe", 2, "trajectory", ["ep2:expert_parallel=2", "cp2:context_parallel=2"]),
    "shards": ("qwen3_tied", 2, "turn,turn_forward,grpo_forward,exact", ["dp2:accumulator_shards=2"]),
    "virtual": ("qwen3", 2, "trajectory,turn_forward", ["vpp2:pipeline_parallel=2,virtual_pipeline=2"]),
}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_takes_the_update_of_one_rank(case, tmp_path):
    model, ranks, modes, layouts = CASES[case]
    folder = make_tiny(model, tmp_path / "model")
    run_layout(folder, tmp_path, "tp1", {}, modes.split(","))
    run_job("tests.equality.layouts", [folder, tmp_path, modes, *layouts], ranks)
    for layout in layouts:
        name = layout.partition(":")[0]
        for mode in modes.split(","):
            want, got = (load_file(tmp_path / f"{n}.{mode}.safetensors") for n in ("tp1", name))
            assert got.keys() == want.keys()
            statistics = [k for k in want if k.startswith("stat.")]
            for key in statistics:
                assert float(got.pop(key)) == pytest.approx(float(want.pop(key)), rel=1e-4), (name, mode, key)
            assert worlds.largest_difference(got, want) < 1e-5, (name, mode)
