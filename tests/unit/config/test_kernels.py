"""Whose layers and optimizer a learner gets: what is asked for, or what is installed, or a refusal with the remedy."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megathunder.config import kernels
from megathunder.config.kernels import choose_layers, choose_optimizer
from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError

ENGINE, FP8 = kernels.ENGINE, {"megatron": {"fp8": "hybrid", "fp8_recipe": "tensorwise"}}


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Make only these packages findable; `apex` with NVIDIA's folders, `pypi_apex` with another project's."""

    def only(*packages: str) -> None:
        (tmp_path / "optimizers").mkdir(exist_ok=True)
        specs = {name: ModuleSpec(name, None) for name in packages}
        if "apex" in packages:
            specs["amp_C"] = ModuleSpec("amp_C", None)
            specs["apex"].submodule_search_locations = [str(tmp_path)]
        if "pypi_apex" in packages:
            specs["apex"] = ModuleSpec("apex", None)
            specs["apex"].submodule_search_locations = [str(tmp_path / "interfaces")]
        monkeypatch.setattr(kernels, "find_spec", specs.get)

    return only


@pytest.mark.parametrize(
    ("settings", "cuda", "installed", "layers"),
    [
        ({}, False, [], "local"),
        ({}, True, [], "local"),
        ({}, True, [ENGINE], ENGINE),
        ({}, False, [ENGINE], "local"),
        ({"layers": "local"}, True, [ENGINE], "local"),
        ({"layers": ENGINE}, True, [ENGINE], ENGINE),
        (FP8, True, [ENGINE], ENGINE),
    ],
)
def test_layers_are_those_asked_for_or_found(install, settings: dict, cuda: bool, installed: list, layers: str) -> None:
    install(*installed)
    assert choose_layers(LearnerConfig(**settings), cuda=cuda) == layers


@pytest.mark.parametrize(
    ("settings", "cuda", "installed", "complaint"),
    [
        ({"layers": ENGINE}, True, [], "Transformer Engine is not installed"),
        (FP8, True, [], "fp8 = 'hybrid' without Transformer Engine"),
        (FP8, False, [ENGINE], "fp8 = 'hybrid' on a CPU"),
        (FP8 | {"layers": "local"}, True, [ENGINE], "with learner.layers = 'local'"),
        ({"megatron": {"fp8": "e4m3", "fp8_param": "true"}}, True, [ENGINE], "fp8_param = true"),
    ],
)
def test_layers_that_cannot_be_are_refused(
    install, settings: dict, cuda: bool, installed: list, complaint: str
) -> None:
    install(*installed)
    with pytest.raises(ConfigError, match=complaint):
        choose_layers(LearnerConfig(**settings), cuda=cuda)


@pytest.mark.parametrize(
    ("asked", "cuda", "installed", "adam"),
    [
        ("auto", False, [ENGINE, "apex"], "torch"),
        ("auto", True, [ENGINE, "apex"], ENGINE),
        ("auto", True, ["apex"], "apex"),
        ("auto", True, ["pypi_apex"], "torch"),
        ("torch", True, [ENGINE], "torch"),
        ("apex", True, [ENGINE, "apex"], "apex"),
    ],
)
def test_the_optimizer_is_the_one_asked_for_or_found(install, asked: str, cuda: bool, installed: list, adam) -> None:
    install(*installed)
    assert choose_optimizer(LearnerConfig(optimizer=asked), cuda=cuda) == adam


@pytest.mark.parametrize(
    ("asked", "cuda", "installed"),
    [("apex", True, ["pypi_apex"]), (ENGINE, True, ["apex"]), ("apex", False, ["apex"])],
)
def test_an_optimizer_that_is_not_there_is_refused(install, asked: str, cuda: bool, installed: list) -> None:
    install(*installed)
    with pytest.raises(ConfigError, match=rf"learner.optimizer = '{asked}'(.|\n)*PyPI's apex is another project"):
        choose_optimizer(LearnerConfig(optimizer=asked), cuda=cuda)
