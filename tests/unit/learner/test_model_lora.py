"""Low-rank adapters: trained alone, merged on export, PEFT's format in and out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.parity.parity_checks import compare, fill_adapters, forward_backward, sample_rows
from examples.policies.build.tiny import make_tiny
from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner.model.adapter_files import CONFIG, WEIGHTS, adapter_tensors, export_adapter, save_adapter
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.model.weights import export_weights
from megathunder.learner.parallel import initialize

LORA = LearnerConfig(device="cpu", lora_rank=4, lora_alpha=8.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_tiny(name, root / name) for name in ("qwen3_tied", "glm4_moe")}


def build(folder: Path, config: LearnerConfig = LORA) -> ModelBundle:
    return build_model(config, initialize(config), folder=folder)


@pytest.mark.parametrize("name", ["qwen3_tied", "glm4_moe"])
def test_adapted_model_and_its_gradients_equal_the_merged_one(name: str, folders: dict[str, Path]) -> None:
    found = compare(build(folders[name]))
    assert found.logits < 1e-5
    assert found.gradients < 1e-5, found.worst_parameter


def test_adapters_on_some_layers_alone(folders: dict[str, Path]) -> None:
    bundle = build(folders["qwen3_tied"], replace(LORA, lora_targets=("v_proj", "up_proj")))
    found = compare(bundle)
    assert found.logits < 1e-5 and found.gradients < 1e-5
    assert {n.hf[0].split(".")[-3] for n, _ in adapter_tensors(bundle)} == {"v_proj", "up_proj"}


def test_new_adapter_changes_nothing(folders: dict[str, Path]) -> None:
    plain = dict(export_weights(build(folders["glm4_moe"], LearnerConfig(device="cpu"))))
    adapted = dict(export_weights(build(folders["glm4_moe"])))
    assert plain.keys() == adapted.keys()
    assert all(torch.equal(plain[n], adapted[n]) for n in plain)


def test_adapters_alone_are_trained(folders: dict[str, Path]) -> None:
    bundle = build(folders["glm4_moe"])
    trained = {n for n, p in bundle.stages[0].named_parameters() if p.requires_grad}
    assert trained and all(".lora." in name for name in trained)
    # One dense layer (7 targets); three with 4 experts and a shared one (4 + 5 * 3 targets); two matrices each.
    assert len(trained) == 2 * (7 + 3 * (4 + 15))


def test_saved_adapter_comes_back_bit_for_bit(folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = build(folders["glm4_moe"])
    fill_adapters(bundle)
    save_adapter(bundle, LORA, tmp_path)
    again = build(folders["glm4_moe"], replace(LORA, lora_adapter=str(tmp_path)))
    wanted, got = dict(export_adapter(bundle)), dict(export_adapter(again))
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[n], got[n]) for n in wanted)
    assert json.loads((tmp_path / CONFIG).read_text())["r"] == 4


def test_adapter_has_the_names_and_shapes_of_peft(folders: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(build(folders["glm4_moe"]), LORA, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    shapes = {n.removeprefix("base_model.model.model.layers."): tuple(t.shape) for n, t in tensors.items()}
    assert shapes["0.self_attn.k_proj.lora_A.weight"] == (4, 64)
    assert shapes["0.self_attn.k_proj.lora_B.weight"] == (64, 4)
    assert shapes["2.mlp.experts.3.down_proj.lora_A.weight"] == (4, 48)
    assert shapes["2.mlp.shared_experts.gate_proj.lora_B.weight"] == (48, 4)


def logits_of(model: torch.nn.Module, rows: list[list[int]]) -> torch.Tensor:
    """[T, V] of each row alone."""
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([row])).logits[0] for row in rows])


def own_logits(bundle: ModelBundle, rows: list[list[int]]) -> torch.Tensor:
    logits, _ = forward_backward(bundle, rows)
    return logits[: sum(map(len, rows)), : bundle.vocab_size]


def test_peft_loads_our_adapter_and_computes_what_we_do(folders: dict[str, Path], tmp_path: Path) -> None:
    bundle = build(folders["qwen3_tied"])
    fill_adapters(bundle)
    save_adapter(bundle, LORA, tmp_path)
    rows = sample_rows(bundle.vocab_size)
    plain = AutoModelForCausalLM.from_pretrained(folders["qwen3_tied"])
    before = logits_of(plain, rows)
    loaded = logits_of(PeftModel.from_pretrained(plain, tmp_path).eval(), rows)
    assert float((loaded - before).abs().max()) > 1e-2
    assert float((loaded - own_logits(bundle, rows)).abs().max()) < 1e-5


def test_an_adapter_that_peft_made_computes_the_same_here(folders: dict[str, Path], tmp_path: Path) -> None:
    targets = ("q_proj", "v_proj", "down_proj")
    model = AutoModelForCausalLM.from_pretrained(folders["qwen3_tied"])
    theirs = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=list(targets), task_type="CAUSAL_LM"))
    for name, parameter in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path)
    config = replace(LORA, lora_rank=8, lora_alpha=32.0, lora_targets=targets, lora_adapter=str(tmp_path))
    bundle = build(folders["qwen3_tied"], config)
    rows = sample_rows(bundle.vocab_size)
    assert float((logits_of(theirs.eval(), rows) - own_logits(bundle, rows)).abs().max()) < 1e-5


@pytest.mark.parametrize(
    "changes", [{"use_rslora": True}, {"use_dora": True}, {"rank_pattern": {"q_proj": 2}}, {"modules_to_save": ["x"]}]
)
def test_an_adapter_of_another_kind_is_refused(folders: dict[str, Path], tmp_path: Path, changes: dict) -> None:
    save_adapter(build(folders["qwen3_tied"]), LORA, tmp_path)
    stored = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(stored | changes))
    with pytest.raises(ConfigError, match=next(iter(changes))):
        build(folders["qwen3_tied"], replace(LORA, lora_adapter=str(tmp_path)))


def test_an_adapter_of_more_layers_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(build(folders["qwen3_tied"]), LORA, tmp_path)
    with pytest.raises(ConfigError, match="set learner.lora_targets to the adapter's: down_proj, gate_proj"):
        build(folders["qwen3_tied"], replace(LORA, lora_targets=("q_proj",), lora_adapter=str(tmp_path)))


def test_adapter_of_another_rank_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(build(folders["qwen3_tied"]), LORA, tmp_path)
    with pytest.raises(ConfigError, match=r"set learner\.lora_rank=4"):
        build(folders["qwen3_tied"], replace(LORA, lora_rank=8, lora_adapter=str(tmp_path)))


def test_incomplete_adapter_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    save_adapter(build(folders["qwen3_tied"]), LORA, tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors["base_model.model.model.layers.3.self_attn.o_proj.lora_B.weight"]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match=r"layers\.3\.self_attn\.o_proj\.lora_B"):
        build(folders["qwen3_tied"], replace(LORA, lora_adapter=str(tmp_path)))


def test_target_that_the_model_has_not_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="names query_proj") as refused:
        build(folders["qwen3_tied"], replace(LORA, lora_targets=("q_proj", "query_proj")))
    assert "down_proj" in str(refused.value)


def test_recomputation_reaches_the_first_adapter(folders: dict[str, Path]) -> None:
    found = compare(build(folders["qwen3_tied"], replace(LORA, recompute="full")))
    assert found.gradients < 1e-5, found.worst_parameter
