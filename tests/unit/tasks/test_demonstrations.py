"""Laws of the scripted demonstrations."""

from __future__ import annotations

import random

from examples.policies.build.demonstrations import demonstrate
from megathunder.config.tasks import TasksConfig
from megathunder.tasks import build_source


def test_sound_demonstrations_always_earn_the_reward_within_the_turns() -> None:
    rng = random.Random(0)
    for task in build_source(TasksConfig(size=500)).take(500):
        demonstration = demonstrate(task, rng, 1.0, 160)
        assert demonstration.reward == 1.0
        assert len(demonstration.turns) + 1 <= task.max_turns


def test_wrong_habits_mostly_fail() -> None:
    rng = random.Random(0)
    tasks = build_source(TasksConfig(size=500)).take(500)
    assert sum(demonstrate(t, rng, 0.0, 160).reward for t in tasks) / 500 < 0.2
