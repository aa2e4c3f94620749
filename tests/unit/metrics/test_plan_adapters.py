"""What low-rank adapters save: said by the plan, and held by the learner that is built."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from examples.policies.build.tiny import make_tiny
from megathunder.accumulator_keys import AccumulatorKey, AccumulatorKind
from megathunder.config import Config
from megathunder.config.learner import LearnerConfig
from megathunder.config.model_shape import read_model_shape
from megathunder.learner.learner import Learner
from megathunder.learner.parallel import initialize
from megathunder.planning.plan import in_bytes, make_plan, plan_lines
from megathunder.types import TakeStep


def held_bytes(config: Config) -> dict[str, int]:
    """Of a learner after one step, with one open accumulator."""
    learner = Learner(config, initialize(config.learner))
    learner.store.of(AccumulatorKey(AccumulatorKind.CLASS, 0, 0))
    learner.take_step(TakeStep(item=0, update=0, normaliser=1.0))
    moments = [
        t for part in learner.stepper.optimizer.optimizer.state.values() for t in part.values() if torch.is_tensor(t)
    ]
    return {
        "gradient buffer": sum(home.numel() * home.element_size() for home in learner.store.layout.homes),
        "optimizer": sum(t.numel() * t.element_size() for t in moments if t.dim()),
        "accumulator": learner.store.bytes,
    }


@pytest.mark.parametrize("family", ["qwen3", "glm4_moe"])
def test_the_plan_says_what_adapters_save_and_the_learner_holds_so_much_less(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / family)
    full = Config(learner=LearnerConfig(model=str(folder), device="cpu"))
    low = replace(full, learner=replace(full.learner, lora_rank=4))
    plan = make_plan(low, read_model_shape(folder))
    full_held, low_held = held_bytes(full), held_bytes(low)
    measured = {name: full_held[name] - low_held[name] for name in full_held}
    accumulators = 2 * full.run.groups_per_update  # two rewards of every open group
    states = measured["gradient buffer"] + measured["optimizer"] + accumulators * measured["accumulator"]
    own_weights = 4 * plan.trained.total
    assert plan.saved_bytes == pytest.approx(states - own_weights, rel=1e-3)  # Megatron pads its buffers
    line = dict(plan_lines(plan))["adapters save"]
    assert line.startswith(in_bytes(plan.saved_bytes + own_weights)) and in_bytes(own_weights) in line


def test_a_plan_of_full_fine_tuning_saves_nothing() -> None:
    config = Config()
    plan = make_plan(config, read_model_shape(config.learner.model))
    assert plan.saved_bytes == 0 and "adapters save" not in dict(plan_lines(plan))
