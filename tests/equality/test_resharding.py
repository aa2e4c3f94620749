"""A checkpoint is of the run, not of the layout: another one goes on from it to the same weights."""

import pytest
from safetensors.torch import load_file

from examples.policies.build.tiny import make_tiny
from tests.equality.jobs import run_job

LAYOUTS = {  # name -> (ranks, settings)
    "one": (1, []),
    "data 2": (2, []),
    "tensor 2": (2, ["tensor_parallel=2"]),
    "pipeline 2": (2, ["pipeline_parallel=2"]),
    "expert 2": (2, ["expert_parallel=2"]),
}
SHARDED = ["distributed_optimizer=true"]


def go_on(tmp_path, model, name, checkpoint, save="-", more=()):
    ranks, settings = LAYOUTS[name]
    out = tmp_path / f"{name} {save == '-'}.safetensors"
    run_job("tests.equality.resharding", [model, checkpoint, out, save, *settings, *more], ranks, timeout_s=200)
    return load_file(out)


def largest_difference(got, want):
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize(
    ("family", "writer", "readers", "more"),
    [
        ("qwen3", "one", ("data 2", "tensor 2", "pipeline 2"), []),
        ("qwen3", "tensor 2", ("data 2",), SHARDED),
        ("qwen3_moe", "data 2", ("one",), SHARDED),
    ],
    ids=["replicated optimizer", "sharded optimizer", "experts, sharded optimizer"],
)
def test_any_layout_goes_on_from_a_checkpoint_of_any_other(tmp_path, family, writer, readers, more):
    """The writer itself bit for bit as if it had never stopped."""
    model = make_tiny(family, tmp_path / "model")
    checkpoint = tmp_path / "checkpoint"
    straight = go_on(tmp_path, model, writer, tmp_path / "absent", save=checkpoint, more=more)
    assert largest_difference(go_on(tmp_path, model, writer, checkpoint, more=more), straight) == 0
    for name in readers:
        assert largest_difference(go_on(tmp_path, model, name, checkpoint, more=more), straight) < 2e-5, name


def test_a_mixtures_checkpoint_goes_on_under_expert_parallelism_or_without_it_as_it_was_saved(tmp_path):
    model = make_tiny("qwen3_moe", tmp_path / "model")
    checkpoint = tmp_path / "checkpoint"
    straight = go_on(tmp_path, model, "expert 2", tmp_path / "absent", save=checkpoint, more=SHARDED)
    assert largest_difference(go_on(tmp_path, model, "expert 2", checkpoint, more=SHARDED), straight) == 0
    with pytest.raises(AssertionError, match="was saved with learner.expert_parallel = more than 1"):
        go_on(tmp_path, model, "one", checkpoint, more=SHARDED)
