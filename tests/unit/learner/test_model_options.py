"""`[learner.megatron]`: any field of three Megatron classes, typed; the rest refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from examples.policies.build.tiny import make_tiny
from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.bundle import ModelBundle
from megathunder.learner.options import megatron_options
from megathunder.learner.parallel import initialize


def test_strings_become_the_type_of_their_field() -> None:
    options = megatron_options(
        {
            "init_method_std": "0.5",
            "bias_dropout_fusion": "true",
            "recompute_num_layers": "none",
            "moe_layer_freq": "[0, 1]",
            "attention_backend": "unfused",
            "bucket_size": "1000",
            "optimizer": "sgd",
        }
    )
    assert options.transformer["init_method_std"] == 0.5
    assert options.transformer["bias_dropout_fusion"] is True
    assert options.transformer["recompute_num_layers"] is None
    assert options.transformer["moe_layer_freq"] == [0, 1]
    assert options.transformer["attention_backend"].name == "unfused"
    assert options.ddp == {"bucket_size": 1000}
    assert options.optimizer == {"optimizer": "sgd"}


def test_unknown_field_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean moe_router_topk_scaling_factor"):
        megatron_options({"moe_router_topk_scaling_facto": "1"})


def test_value_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket_size = 'many'"):
        megatron_options({"bucket_size": "many"})


@pytest.mark.parametrize(("field", "names"), [("fp8", ("e4m3", "hybrid")), ("fp8_recipe", ("delayed", "blockwise"))])
def test_a_name_that_megatron_does_not_know_is_refused_with_those_it_does(field: str, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refusal:
        megatron_options({field: "e9"})
    assert all(repr(name) in str(refusal.value) for name in names)
    assert megatron_options({field: names[0]}).transformer == {field: names[0]}


def test_fp8_products_get_whole_tiles_of_every_ranks_tokens() -> None:
    config = SimpleNamespace(
        context_parallel_size=2, tensor_model_parallel_size=4, sequence_parallel=True, fp8="hybrid", fp8_recipe="mxfp8"
    )
    bundle = ModelBundle(
        stages=[], transformer_config=config, family=None, hf={}, folder=Path(), layout=None, vocab_size=1,
        padded_vocab_size=1,
    )  # fmt: skip
    assert (bundle.token_share, bundle.pad_to) == (8, 8 * 32)


def test_field_that_a_setting_owns_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.tensor_parallel"):
        megatron_options({"tensor_model_parallel_size": "2"})


@pytest.mark.parametrize("name", ["overlap_grad_reduce", "moe_aux_loss_coeff", "delay_wgrad_compute"])
def test_field_under_which_an_update_would_be_wrong_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner\.megatron\.{name}(.|\n)*(backward pass|linear in)"):
        megatron_options({name: "1"})


def test_given_field_reaches_the_model(tmp_path: Path) -> None:
    config = LearnerConfig(device="cpu", megatron={"init_method_std": "0.5"})
    bundle = build_model(config, initialize(config), folder=make_tiny("qwen3", tmp_path), load=False)
    assert bundle.transformer_config.init_method_std == 0.5


def test_fp8_without_transformer_engine_is_refused(tmp_path: Path) -> None:
    config = LearnerConfig(device="cpu", megatron={"fp8": "hybrid"})
    with pytest.raises(ConfigError, match="Transformer Engine"):
        build_model(config, initialize(config), folder=make_tiny("qwen3", tmp_path))
