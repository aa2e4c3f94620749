"""Turns released before their trajectory ends, and prompts computed once, give the gradient of the whole."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.objective_losses import grpo_loss, opd_loss

from megathunder.accumulator_keys import BATCH
from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.errors import ConfigError, MegathunderError
from megathunder.types import Differentiate
from tests.equality import turns, worlds

FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SEEDS = st.integers(0, 10**6)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """One learner a setting, made on first use."""
    folder = worlds.write_model(tmp_path_factory.mktemp("model"))
    made = {}

    def learner(**setting):
        key = tuple(sorted(setting.items()))
        if key not in made:
            made[key] = worlds.make_learner(worlds.make_config(folder, **setting))
        worlds.clear(made[key])
        return made[key]

    return learner


def limit(learner):
    return 1e-12 if learner.bundle.transformer_config.params_dtype is torch.float64 else 1e-5


def check(learner, z, naive):
    got = worlds.streamed_gradient(learner, 1.0 / z)
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < limit(learner)
    assert not learner.store.open_keys


@pytest.mark.parametrize(
    ("dtype", "recompute"), [("float32", "none"), ("float32", "selective"), ("float64", "none"), ("float64", "full")]
)
@pytest.mark.parametrize("mode", ["turn", "turn_forward"])
@FEW
@given(seed=SEEDS, count=st.integers(1, 4), normalisation=st.sampled_from(["token_mean", "sequence_mean"]))
def test_opd_turns_equal_the_barrier(make, mode, dtype, recompute, seed, count, normalisation):
    learner = make(release=mode, dtype=dtype, recompute=recompute)
    rng = random.Random(seed)
    trajectories = [worlds.random_trajectory(rng, i, 0, turns=4, split=rng.random() < 0.3) for i in range(count)]
    scores = worlds.random_scores(rng, trajectories)
    loss = LossConfig(normalisation=normalisation)
    z = turns.release_opd(learner, trajectories, scores, rng, mode=mode, loss=loss)
    assert learner.release._turns.open_chains == 0
    twin = make(dtype=dtype)  # the same weights, without recomputation
    naive = opd_loss(worlds.logprobs_of(twin), trajectories, scores, normalisation=normalisation)
    got = worlds.streamed_gradient(learner, 1.0 / z)
    assert worlds.largest_difference(got, worlds.naive_gradient(twin, naive)) < limit(learner)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@FEW
@given(seed=SEEDS, sizes=st.lists(st.integers(2, 3), min_size=1, max_size=2))
def test_grpo_turns_forward_equal_the_barrier(make, dtype, seed, sizes):
    learner = make(release="turn_forward", dtype=dtype)
    rng = random.Random(seed)
    groups = worlds.random_groups(rng, values=(0.0, 0.5, 1.0), sizes=sizes)
    z = turns.release_grpo(learner, groups, rng)
    naive = grpo_loss(worlds.logprobs_of(learner), groups, advantage="std")
    if isinstance(naive, float):
        assert all(float(g.abs().max()) == 0.0 for g in worlds.streamed_gradient(learner, 1.0).values())
        return
    check(learner, z, naive)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shared", ["group", "packed"])
@FEW
@given(
    seed=SEEDS,
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    reward_values=st.sampled_from([0, 2]),
    content_ready=st.sampled_from([0.0, 0.5]),
)
def test_shared_prompts_equal_the_barrier(make, shared, dtype, seed, sizes, reward_values, content_ready):
    learner = make(shared_prompt=shared, dtype=dtype)
    rng = random.Random(seed)
    groups = worlds.random_groups(rng, values=(0.0, 0.3, 1.0), sizes=sizes)
    z = worlds.stream_grpo(
        learner, groups, rng, grpo=GrpoConfig(), reward_values=reward_values, content_ready=content_ready
    )
    learner.release.finish(worlds.tally(learner))
    naive = grpo_loss(worlds.logprobs_of(learner), groups, advantage="std")
    if isinstance(naive, float):
        return
    check(learner, z, naive)


def test_a_prompt_is_settled_when_its_group_is_complete(make):
    learner = make(shared_prompt="group")
    rng = random.Random(6)
    size = learner.release._config.run.group_size
    groups = [[worlds.random_trajectory(rng, 0, i, reward=float(i % 2)) for i in range(size)]]
    z = worlds.stream_grpo(learner, groups, rng)
    assert learner.release._prompts.open_prompts == 0  # before the step
    check(learner, z, grpo_loss(worlds.logprobs_of(learner), groups, advantage="std"))


@pytest.mark.parametrize("shared", ["group", "packed"])
def test_shared_prompts_report_the_tokens_they_save(make, shared):
    learner = make(shared_prompt=shared)
    rng = random.Random(1)
    group = [worlds.random_trajectory(rng, 0, i, reward=float(i % 2)) for i in range(6)]
    rows = [r for t in group for r in worlds.train_rows(t, 1.0)]
    command = Differentiate(item=0, update=0, policy_version=0, target=BATCH, rows=tuple(rows))
    stats = learner.differentiate(command)
    plain = make().differentiate(command)
    prompt = rows[0].prompt_tokens - 1
    assert stats.prompt_tokens_saved == 5 * prompt == plain.tokens - stats.tokens


def test_what_a_trajectory_leaves_behind_is_freed_at_its_last_turn(make):
    learner = make(release="turn_forward")
    rng = random.Random(2)
    rows = turns.growing_rows(worlds.random_trajectory(rng, 0, 0, turns=4), 1.0)
    first = rows[0].take(1, last=False, whole_mask=True)
    learner.differentiate(Differentiate(item=0, update=0, policy_version=0, target=BATCH, rows=(first,), last=False))
    assert learner.release._turns.open_chains == 1
    # An abandoned chain: nothing new, nothing trained.
    chain = rows[0]
    gone = chain.chain.train_row(chain.source, row=0, context_turns=1, end_turn=1, mask_from_turn=1, scale=1.0)
    learner.differentiate(Differentiate(item=1, update=0, policy_version=0, target=BATCH, rows=(gone,), last=True))
    assert learner.release._turns.open_chains == 0
    assert all(float(g.abs().max()) == 0.0 for g in worlds.streamed_gradient(learner, 1.0).values())


def test_dropping_what_the_context_is_owed_would_be_seen(make):
    """The control: without the replay the gradient is visibly wrong."""
    learner = make(release="turn")
    rng = random.Random(3)
    trajectory = worlds.random_trajectory(rng, 0, 0, turns=4)
    while trajectory.turns < 3:
        trajectory = worlds.random_trajectory(rng, 0, 0, turns=4)
    scores = worlds.random_scores(rng, [trajectory])
    row = turns.growing_rows(trajectory, 1.0, scores[0])[0]
    for end in range(1, row.chain.turns + 1):
        part = row.take(end, last=False, whole_mask=False)
        learner.differentiate(Differentiate(item=0, update=0, policy_version=0, target=BATCH, rows=(part,), last=False))
    naive = opd_loss(worlds.logprobs_of(learner), [trajectory], scores)
    got = worlds.streamed_gradient(learner, 1.0 / trajectory.sampled_tokens)
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) > 1e-4


@pytest.mark.parametrize("mode", ["turn", "turn_forward"])
def test_context_that_this_cell_does_not_hold_is_refused(make, mode):
    learner = make(release=mode)
    row = turns.growing_rows(worlds.random_trajectory(random.Random(4), 0, 0, turns=1), 1.0)[0].take(
        1, last=False, whole_mask=False
    )
    fields = {n: getattr(row, n) for n in row.__struct_fields__}
    bad = type(row)(**fields | {"context_tokens": 2})
    with pytest.raises(MegathunderError, match="this cell holds 0"):
        learner.differentiate(Differentiate(item=0, update=0, policy_version=0, target=BATCH, rows=(bad,), last=False))


def test_turns_with_shared_prompts_are_refused(make):
    with pytest.raises(ConfigError, match="shared_prompt"):
        make(release="turn", shared_prompt="group")
