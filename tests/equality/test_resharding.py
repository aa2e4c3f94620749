"""A checkpoint is of the run, not of the layout: another one goes on from it to the same weights."""

import pytest
from safetensors.torch import load_file

from megathunder.learner.families.tiny import make_tiny
from tests.equality.jobs import run_job

LAYOUTS = {  # name -> (ranks, settings)
    "one": (1, []),
    "data 2": (2, []),
    "tensor 2": (2, ["tensor_parallel=2"]),
    "pipeline 2": (2, ["pipeline_parallel=2"]),
}


def go_on(tmp_path, model, name, checkpoint, save="-", more=()):
    ranks, settings = LAYOUTS[name]
    out = tmp_path / f"{name} {save == '-'}.safetensors"
    run_job("tests.equality.resharding", [model, checkpoint, out, save, *settings, *more], ranks, timeout_s=200)
    return load_file(out)


def largest_difference(got, want):
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max()) for name in want)


@pytest.mark.parametrize(
    ("writer", "more"),
    [("one", []), ("tensor 2", ["distributed_optimizer=true"])],
    ids=["one rank, replicated optimizer", "tensor parallel, sharded optimizer"],
)
def test_any_layout_goes_on_from_a_checkpoint_of_any_other(tmp_path, writer, more):
    model = make_tiny("qwen3", tmp_path / "model")
    checkpoint = tmp_path / "checkpoint"
    first = go_on(tmp_path, model, writer, tmp_path / "absent", save=checkpoint, more=more)
    want = go_on(tmp_path, model, writer, checkpoint, more=more)
    assert largest_difference(first, want) > 1e-3
    for name in LAYOUTS:
        if name != writer:
            got = go_on(tmp_path, model, name, checkpoint, more=more)
            assert largest_difference(got, want) < 2e-5, name
