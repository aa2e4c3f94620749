"""Megatron-Core's Transformer Engine layers, over a stand-in for that library: the same model under other names.

What is the stand-in's is the arithmetic of single layers; the spec, the names of parameters, their sharding and their
mapping to Hugging Face in both directions are Megatron-Core's and this package's own.
"""

import json
from pathlib import Path

from examples.policies.build.tiny import make_tiny
from tests.equality.jobs import FRESH, run_job

STAND_IN = Path(__file__).parent / "stand_in"
TP = {"tensor_parallel": 2, "sequence_parallel": True}
CASES = {  # case -> (family, settings of two ranks, names that its first layer must have)
    "dense": ("qwen3", TP, ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"]),
    "biases, shared expert": ("glm4_moe", TP | {"expert_parallel": 2, "expert_tensor_parallel": 1}, []),
    "grouped experts": (
        "qwen3_moe",
        {"expert_parallel": 2, "megatron": {"moe_grouped_gemm": "true"}},
        ["pre_mlp_layernorm.weight", "mlp.experts.linear_fc1.weight1", "mlp.experts.linear_fc2.weight0"],
    ),
    "adapters": ("qwen3", TP | {"lora_rank": 4}, ["input_layernorm.weight", "mlp.linear_fc1.lora.b_gate_proj"]),
}


def test_a_model_of_other_layers_has_the_same_logits_gradients_and_files(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    folders = {family: str(make_tiny(family, tmp_path / family)) for family, _, _ in CASES.values()}
    jobs = {name: (folders[family], settings) for name, (family, settings, _) in CASES.items()}
    monkeypatch.syspath_prepend(STAND_IN)  # a fresh rank starts with this path
    run_job("tests.equality.engine_layers", [out, json.dumps(jobs)], 2, context=FRESH)
    found = json.loads(out.read_text())
    assert found.pop("exchanged"), "a checkpoint is of the model, whichever layers hold it"
    assert found.keys() == CASES.keys()
    for name, (_, _, wanted) in CASES.items():
        own = {n.removeprefix("decoder.layers.0.") for n in found[name]["names"] if "layers.0." in n}
        assert set(wanted) <= own, (name, own)
        assert found[name]["logits"] < 1e-5 and found[name]["gradients"] < 1e-5, found[name]
        assert found[name]["round_trip"], name
