"""A third objective, of one file outside the package, runs under every schedule and release: REINFORCE."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from fake_learner import trajectory_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from update_driver import drive, grpo_events, interleave, make_trajectory

from megathunder.config.learner import LearnerConfig
from megathunder.config.objective import LossConfig
from megathunder.config.root import Config
from megathunder.config.streaming import StreamingConfig
from megathunder.errors import ConfigError
from megathunder.objectives.build_objective import build_objective
from megathunder.planning.footprint import accumulators_held
from megathunder.schedule.schedules import RULES

FILE = Path(__file__).parent / "reinforce.py"
REINFORCE = f"{FILE}:build"


@given(
    rewards=st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0, None]), min_size=1, max_size=4), min_size=1, max_size=3),
    schedule=st.sampled_from(sorted(RULES)),
    release=st.sampled_from(["trajectory", "turn_forward"]),
    loss=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    exact=st.booleans(),
    content_ready=st.booleans(),
    cells=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=150, deadline=None)
def test_an_objective_in_a_file_gives_the_barrier_gradient_under_every_schedule(
    rewards, schedule, release, loss, exact, content_ready, cells, seed
) -> None:
    rng = random.Random(seed)
    config = Config(
        objective=REINFORCE,
        schedule=schedule,
        loss=LossConfig(normalisation=loss, constant=3.0),
        learner=LearnerConfig(accumulator="exact" if exact else "fp32"),
        streaming=StreamingConfig(release=release, content_ready=content_ready),
    )
    groups = [
        [(make_trajectory(g, i, [rng.randint(1, 3)]), r) for i, r in enumerate(group)]
        for g, group in enumerate(rewards)
    ]
    streams = [grpo_events(t, r) for group in groups for t, r in group]
    outcome = drive(config, [len(g) for g in groups], interleave(streams, rng), cells=cells, seed=seed)
    kept = [(t, r) for group in groups for t, r in group if r is not None]
    scale = {"sequence_mean": lambda t: 1.0 / t.sampled_tokens}.get(loss, lambda t: 1.0)
    assert outcome.gradient == pytest.approx(math.fsum((r - 0.5) * scale(t) * trajectory_gradient(t) for t, r in kept))
    z = {"token_mean": sum(t.sampled_tokens for t, _ in kept), "sequence_mean": len(kept), "constant": 3.0}[loss]
    assert outcome.scheduler.normaliser == z
    assert all(cell.clean and cell.peak_groups == 0 for cell in outcome.cells), "no accumulator, whatever the schedule"
    outcome.scheduler.on_step(True)
    assert outcome.scheduler.ledger.counts.applied == len(kept)
    assert outcome.scheduler.report.groups_zero_advantage == 0


def test_what_an_objective_learns_of_an_update_is_there_in_the_next_and_after_a_resume() -> None:
    config = Config(objective=REINFORCE)
    objective = build_objective(config)
    gradients = []
    for _ in range(2):
        events = [e for i, r in enumerate((1.0, 0.0, 1.0, 1.0)) for e in grpo_events(make_trajectory(0, i, [1]), r)]
        outcome = drive(config, [4], events, objective=objective)
        gradients.append(outcome.gradient)
        outcome.scheduler.on_step(True)
    second = 0.9 * 0.5 + 0.1 * 0.75
    g = [trajectory_gradient(make_trajectory(0, i, [1])) for i in range(4)]
    for got, b in zip(gradients, (0.5, second), strict=True):
        assert got == pytest.approx(sum((r - b) * x for r, x in zip((1.0, 0.0, 1.0, 1.0), g, strict=True)))
    resumed = build_objective(config)
    resumed.restore(objective.state())
    assert resumed.opening_weights() == objective.opening_weights() != build_objective(config).opening_weights()


def test_an_objective_in_a_file_is_known_to_the_plan_and_refused_where_it_is_none(tmp_path: Path) -> None:
    assert accumulators_held(Config(objective=REINFORCE)) == (0, 0)
    with pytest.raises(ConfigError, match="(?s)drop_group.*in the sum already"):
        build_objective(Config(objective=REINFORCE, streaming=StreamingConfig(on_lost="drop_group")))
    with pytest.raises(ConfigError, match="(?s)release = 'turn'.*whole trajectory"):
        build_objective(Config(objective=REINFORCE, streaming=StreamingConfig(release="turn")))
    (tmp_path / "wrong.py").write_text("def build(config):\n    return 3\n\n\ndef two(a, b):\n    return a\n")
    for name, text in (("build", "(?s)built 3.*subclass"), ("two", "signature"), ("bild", "did you mean 'build'")):
        with pytest.raises(ConfigError, match=text):
            build_objective(Config(objective=f"{tmp_path / 'wrong.py'}:{name}"))
    with pytest.raises(ConfigError, match="(?s)grpo, opd.*did you mean 'grpo'"):
        build_objective(Config(objective="gpro"))
    assert len(FILE.read_text().splitlines()) <= 60
