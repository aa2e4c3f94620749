"""Each family, from its folder alone: logits, gradients and weights are those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.parity.parity_checks import compare, forward_backward, sample_rows
from examples.policies.build.tiny import TINY, make_tiny
from megathunder.config.learner import LearnerConfig
from megathunder.config.model_shape import read_config_json
from megathunder.errors import ConfigError
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.families import FAMILIES
from megathunder.learner.model.families.rotary import inverse_frequencies
from megathunder.learner.model.weights import export_weights
from megathunder.learner.model.weights.hf_files import HfReader
from megathunder.learner.parallel import initialize

CPU = LearnerConfig(device="cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny(name, root / name) for name in TINY}


def build(folder: Path, config: LearnerConfig = CPU) -> ModelBundle:
    return build_model(config, initialize(config), folder=folder)


@pytest.mark.parametrize("name", TINY)
def test_logits_gradients_and_weights_equal_transformers(name: str, folders: dict[str, Path]) -> None:
    found = compare(build(folders[name]))
    assert found.logits < 1e-5
    assert found.gradients < 1e-5, found.worst_parameter
    assert found.round_trip


def test_parity_tells_a_wrong_weight(folders: dict[str, Path]) -> None:
    bundle = build(folders["qwen3"])
    with torch.no_grad():
        bundle.stages[0].decoder.layers[2].self_attention.linear_qkv.weight[40, 3] += 0.01
    found = compare(bundle)
    assert found.logits > 1e-5
    assert not found.round_trip


def test_tied_output_layer_is_the_embedding(folders: dict[str, Path]) -> None:
    tied, untied = build(folders["qwen3_tied"]), build(folders["qwen3"])
    assert untied.local_parameters - tied.local_parameters == 131 * 64


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ConfigError, match="MambaForCausalLM") as refused:
        build(tmp_path)
    assert all(family.architecture in str(refused.value) for family in FAMILIES)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        build(tmp_path / "nowhere")


def test_experts_over_tensor_parallel_need_sequence_parallel(folders: dict[str, Path]) -> None:
    layout = replace(initialize(CPU), tensor=2)
    with pytest.raises(ConfigError, match="sequence_parallel = true"):
        build_model(LearnerConfig(device="cpu", tensor_parallel=2), layout, folder=folders["qwen3_moe"])


def test_layers_that_do_not_divide_are_refused(folders: dict[str, Path]) -> None:
    config = replace(CPU, pipeline_parallel=3, virtual_pipeline=2)
    with pytest.raises(ConfigError, match=r"the policy has 4 layers"):
        build_model(config, initialize(CPU), folder=folders["qwen3"])


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "glm4_moe"])
def test_rotary_frequencies_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folders[name]))
    assert torch.equal(
        inverse_frequencies(read_config_json(folders[name], "learner.model")), model.model.rotary_emb.inv_freq
    )


def test_older_spelling_of_rotary_settings_means_the_same() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    old = shape | {"rope_theta": 5e5, "rope_scaling": None, "partial_rotary_factor": 0.5}
    new = shape | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}}
    assert torch.equal(inverse_frequencies(old), inverse_frequencies(new))


def test_other_rotary_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="yarn"):
        inverse_frequencies({"hidden_size": 64, "num_attention_heads": 4, "rope_scaling": {"rope_type": "yarn"}})


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_changes_no_gradient(recompute: str, folders: dict[str, Path]) -> None:
    found = compare(build(folders["glm4_moe"], replace(CPU, recompute=recompute)))
    assert found.gradients < 1e-5, found.worst_parameter


def test_bfloat16_is_close_to_float32_and_its_weights_keep_their_bits(folders: dict[str, Path]) -> None:
    narrow = build(folders["qwen3"], replace(CPU, dtype="bfloat16"))
    wanted, _ = forward_backward(build(folders["qwen3"]), sample_rows(131))
    got, _ = forward_backward(narrow, sample_rows(131))
    assert got.dtype == torch.bfloat16
    assert 1e-5 < float((got.float() - wanted).abs().max()) < 0.05 * float(wanted.abs().max())
    reader = HfReader(folders["qwen3"])
    assert all(torch.equal(t, reader.read(n).bfloat16()) for n, t in export_weights(narrow))
