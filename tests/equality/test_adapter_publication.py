"""What servers merge from adapters that travel alone has the bits of the learner's own merge, in every layout."""

import pytest
from safetensors.torch import load_file

from megathunder.learner.families.tiny import make_tiny
from tests.equality.jobs import run_job

LAYOUTS = {"one": (1, []), "tensor 2": (2, ["tensor_parallel=2"]), "experts 2": (2, ["expert_parallel=2"])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout_exports_one_base_and_one_adapter(tmp_path, dtype):
    model = make_tiny("qwen3_moe", tmp_path / "model")
    found = []
    for name, (ranks, settings) in LAYOUTS.items():
        if dtype == "float32" or name != "experts 2":
            out = tmp_path / f"{name}.safetensors"
            run_job("tests.equality.adapter_publication", [model, out, f"dtype={dtype}", *settings], ranks)
            found.append(load_file(out))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(other[name].equal(whole) for name, whole in found[0].items())
