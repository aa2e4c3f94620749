"""What servers merge from adapters that travel alone has the bits of the learner's own merge, in every layout."""

from safetensors.torch import load_file

from examples.policies.build.tiny import make_tiny
from tests.equality.jobs import run_job

TWO = ["tensor_parallel=2", "sequence_parallel=1", "expert_parallel=2", "expert_tensor_parallel=1"]


def exported(tmp_path, ranks, *fields):
    """The merged weights; the job itself holds them against base and adapters."""
    out = tmp_path / f"{ranks}.safetensors"
    run_job("tests.equality.adapter_publication", [make_tiny("qwen3_moe", tmp_path / "model"), out, *fields], ranks)
    return load_file(out)


def test_every_layout_exports_one_base_and_one_adapter(tmp_path):
    one, two = exported(tmp_path, 1), exported(tmp_path, 2, *TWO)
    assert one.keys() == two.keys() and all(two[name].equal(whole) for name, whole in one.items())
