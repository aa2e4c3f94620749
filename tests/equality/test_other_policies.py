"""The KL term to a frozen reference, and ratios to the weights that sampled."""

import dataclasses
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.objective_losses import grpo_loss

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind
from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.errors import ConfigError
from megathunder.schedule.token_chain import train_rows
from megathunder.types import Differentiate, Score
from tests.equality import worlds

FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return worlds.write_model(tmp_path_factory.mktemp("model"))


def make(folder, *, grpo, schedule="thundersync", **learner):
    config = dataclasses.replace(worlds.make_config(folder, **learner), grpo=grpo, schedule=schedule)
    return worlds.make_learner(config)


def move(learner, seed=0):
    """Take the weights away from where they were loaded."""
    generator = torch.Generator().manual_seed(seed)
    for p in learner.store.layout.parameters:
        p.data.add_(0.02 * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype))


def under(copy, learner):
    """Log-probabilities of a chain under another version of the policy."""
    run = worlds.logprobs_of(learner)

    def frozen(token_ids):
        with copy.swapped_in():
            return run(token_ids)

    return frozen


@pytest.fixture(scope="module", params=[("float32", "fp32"), ("float64", "fp32"), ("float32", "exact")])
def regular(request, folder):
    """A learner with a KL term whose policy has left its reference."""
    dtype, accumulator = request.param
    learner = make(folder, grpo=GrpoConfig(kl_coefficient=0.3), dtype=dtype, accumulator=accumulator)
    move(learner)
    return learner


@FEW
@given(
    seed=st.integers(0, 10**6),
    values=st.sampled_from([(0.0, 1.0), (1.0,), (0.0, 0.5, 1.0)]),
    normalisation=st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_the_kl_term_equals_the_barrier(regular, seed, values, normalisation):
    learner, rng = regular, random.Random(seed)
    groups = worlds.random_groups(rng, values=values, sizes=[2, 3])
    loss = LossConfig(normalisation=normalisation)
    worlds.clear(learner)
    z = worlds.stream_grpo(learner, groups, rng, grpo=GrpoConfig(), loss=loss, reward_values=9)
    naive = grpo_loss(
        worlds.logprobs_of(learner),
        groups,
        advantage="std",
        normalisation=normalisation,
        kl_coefficient=0.3,
        reference_of=under(learner.others.reference, learner),
    )
    got = worlds.streamed_gradient(learner, 1.0 / z)
    limit = 1e-12 if learner.bundle.transformer_config.params_dtype is torch.float64 else 1e-5
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < limit


def test_the_reference_stays_where_the_policy_was_loaded(folder):
    learner = make(folder, grpo=GrpoConfig(kl_coefficient=0.1))
    rows = train_rows(worlds.random_trajectory(random.Random(0), 0, 0), 1.0)
    command = Differentiate(item=0, update=0, policy_version=0, target=BATCH, rows=rows)
    assert learner.differentiate(command).kl_sum == 0.0
    worlds.step(learner, 1.0)
    later = Differentiate(item=1, update=1, policy_version=1, target=BATCH, rows=rows)
    assert learner.differentiate(later).kl_sum > 0.0


def test_a_comparison_is_the_sum_of_log_ratios_of_the_sampled_tokens(folder):
    learner = make(folder, grpo=GrpoConfig(kl_coefficient=0.1, kl_in_reward=True))
    move(learner)
    rng, rows = random.Random(3), []
    for i in range(4):
        rows += train_rows(worlds.random_trajectory(rng, 0, i, split=i == 2), 1.0)
    found = learner.score(Score(item=0, update=0, policy_version=0, rows=tuple(rows))).divergences
    reference = under(learner.others.reference, learner)
    for row, value in zip(rows, found, strict=True):
        logprobs = reference(row.token_ids).detach().tolist()
        pairs = list(zip(row.engine_logprobs[1:], logprobs, row.loss_mask[1:], strict=True))
        assert value == pytest.approx(sum(p - q for p, q, m in pairs if m), rel=1e-5, abs=1e-5)
    command = Differentiate(item=1, update=0, policy_version=0, target=BATCH, rows=tuple(rows))
    assert learner.differentiate(command).kl_sum is None, "no loss term beside the reward"
    worlds.clear(learner)


def test_ratios_divide_by_the_weights_that_sampled(folder):
    grpo = GrpoConfig(importance_cap=1.5, old_logprobs="learner")
    learner = make(folder, grpo=grpo, schedule="one_step_off", dtype="float64")
    rng = random.Random(1)
    groups = worlds.random_groups(rng, values=(0.0, 1.0), sizes=[3, 3])
    groups[0] = [worlds.random_trajectory(rng, 0, i, reward=float(i % 2)) for i in range(3)]
    run = worlds.logprobs_of(learner)
    sampled = [[_as_sampled(t, run) for t in group] for group in groups]
    worlds.stream_grpo(learner, groups, rng, grpo=grpo)
    worlds.step(learner, 1.0)
    # The same trajectories, sampled before that step; the engine's numbers in `groups` are noise.
    z = worlds.stream_grpo(learner, groups, rng, grpo=grpo, version=1)
    naive = grpo_loss(worlds.logprobs_of(learner), sampled, advantage="std", importance_cap=1.5)
    got = worlds.streamed_gradient(learner, 1.0 / z)
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < 1e-12


def _as_sampled(trajectory, run):
    """`trajectory` with the log-probabilities of the present weights in the engine's place."""
    rows = []
    for row in trajectory.rows:
        with torch.no_grad():
            logprobs = [0.0, *run(row.token_ids).tolist()]
        segments, start = [], 0
        for segment in row.segments:
            end = start + len(segment.token_ids)
            if segment.logprobs:
                segment = _with(segment, logprobs=tuple(logprobs[start:end]))
            segments.append(segment)
            start = end
        rows.append(_with(row, segments=tuple(segments)))
    return _with(trajectory, rows=tuple(rows))


def _with(struct, **changes):
    return type(struct)(**{n: getattr(struct, n) for n in struct.__struct_fields__} | changes)


def test_a_clip_range_needs_the_sign_of_the_advantage(folder):
    learner = make(folder, grpo=GrpoConfig(clip_low=0.2, clip_high=0.3))
    rows = train_rows(worlds.random_trajectory(random.Random(0), 0, 0), 1.0)
    key = AccumulatorKey(AccumulatorKind.CLASS, 0, 0)
    with pytest.raises(ConfigError, match="class accumulators"):
        learner.differentiate(Differentiate(item=0, update=0, policy_version=0, target=key, rows=rows))
