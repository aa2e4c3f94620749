"""Whose layers and whose optimizer a learner computes with: what the settings ask for, and what is installed.

    learner.layers        local | transformer_engine         auto: the latter on CUDA where it is installed, or with FP8
    learner.optimizer     torch | apex | transformer_engine  auto: the fused one that is installed, on CUDA

Looks packages up without importing them. Called by the checks, before anything starts, and by the learner, which knows
its device. Refuses what is not installed, and FP8 where it cannot run.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError

ENGINE = "transformer_engine"
INSTALL = "on a GPU machine: pip install -e .[gpu], or the Dockerfile's image"


def choose_layers(learner: LearnerConfig, *, cuda: bool) -> str:
    """`local` or `transformer_engine`. Raises ConfigError where the settings ask for what cannot be."""
    fp8 = learner.megatron.get("fp8", "none")
    quantised = fp8.lower() != "none"
    if quantised:
        _check_fp8(learner, fp8, cuda=cuda)
    if learner.layers == ENGINE and find_spec(ENGINE) is None:
        raise ConfigError(
            f"learner.layers = {ENGINE!r}, and Transformer Engine is not installed",
            expected=f"{ENGINE} importable",
            remedy=f"{INSTALL}; or set learner.layers = 'auto'",
        )
    wanted = learner.layers == ENGINE or quantised
    if wanted or (learner.layers == "auto" and cuda and find_spec(ENGINE) is not None):
        return ENGINE
    if learner.grouped_experts:
        raise ConfigError(
            "learner.megatron.moe_grouped_gemm = true with Megatron-Core's own layers",
            expected="Transformer Engine's: the experts of Megatron-Core's own grouped layer are one parameter",
            remedy="set learner.layers = 'transformer_engine', or remove moe_grouped_gemm",
        )
    return "local"


def choose_optimizer(learner: LearnerConfig, *, cuda: bool) -> str:
    """`torch`, `apex` or `transformer_engine`. Raises ConfigError where the settings name one that is not there."""
    installed = {"torch": True, "apex": _has_apex(), ENGINE: find_spec(ENGINE) is not None}
    if learner.optimizer == "auto":
        return next(name for name in (ENGINE, "apex", "torch") if installed[name]) if cuda else "torch"
    if learner.optimizer == "torch" or (installed[learner.optimizer] and cuda):
        return learner.optimizer
    missing = "on a CPU" if installed[learner.optimizer] else "and its fused optimizer is not installed"
    raise ConfigError(
        f"learner.optimizer = {learner.optimizer!r}, {missing}",
        expected="Transformer Engine, or NVIDIA's apex built with its CUDA extensions (PyPI's apex is another project)",
        remedy=f"{INSTALL}; or set learner.optimizer = 'auto'",
    )


def _check_fp8(learner: LearnerConfig, fp8: str, *, cuda: bool) -> None:
    seen = f"learner.megatron.fp8 = {fp8!r}"
    if learner.layers == "local":
        raise ConfigError(
            f"{seen} with learner.layers = 'local'",
            expected="Transformer Engine's layers, which alone compute in FP8",
            remedy="set learner.layers = 'auto', or remove fp8 from [learner.megatron]",
        )
    if find_spec(ENGINE) is None:
        raise ConfigError(
            f"{seen} without Transformer Engine",
            expected=f"{ENGINE} importable (FP8 runs in its layers, on a GPU)",
            remedy=f"{INSTALL}; or remove fp8 from [learner.megatron]",
        )
    if not cuda:
        raise ConfigError(
            f"{seen} on a CPU", expected="a GPU with FP8 (Hopper or newer)", remedy="remove fp8 from [learner.megatron]"
        )
    if learner.megatron.get("fp8_param", "false").lower() in ("true", "1"):
        raise ConfigError(
            "learner.megatron.fp8_param = true",
            expected="false: weights are published and saved as they are held, in learner.dtype",
            remedy="remove fp8_param from [learner.megatron]",
        )


def _has_apex() -> bool:
    """NVIDIA's, by what it is made of."""
    spec = find_spec("apex")
    folders = spec.submodule_search_locations if spec is not None else None
    return find_spec("amp_C") is not None and any((Path(f) / "optimizers").is_dir() for f in folders or ())
