"""The law of the learner: what streams in, in any order, adds up to the gradient and step of the naive barrier loss."""

import random

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracles.objective_losses import grpo_loss, opd_loss

from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.config.root import Config
from megathunder.objectives.build_objective import build_objective
from tests.equality import worlds

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}
FEW = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=["float32", "float64"])
def learner(request, tmp_path_factory):
    folder = worlds.write_model(tmp_path_factory.mktemp("model"))
    return worlds.make_learner(worlds.make_config(folder, dtype=request.param))


def tolerance(learner):
    return TOLERANCE[learner.bundle.transformer_config.params_dtype.__str__().removeprefix("torch.")]


@FEW
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    values=st.sampled_from([(0.0, 1.0), (1.0,), (0.0, 0.25, 0.5, 1.0), (-1.0, 0.3, 0.7)]),
    advantage=st.sampled_from(["std", "sample_std", "none", "leave_one_out"]),
    normalisation=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    reward_values=st.sampled_from([0, 1, 2, 5]),
    content_ready=st.sampled_from([0.0, 0.5, 1.0]),
    cap=st.sampled_from([0.0, 2.0]),
)
def test_streamed_grpo_gradient_equals_barrier_gradient(
    learner, seed, sizes, values, advantage, normalisation, reward_values, content_ready, cap
):
    rng = random.Random(seed)
    groups = worlds.random_groups(rng, values=values, sizes=sizes)
    grpo = GrpoConfig(advantage=advantage, importance_cap=cap)
    loss = LossConfig(normalisation=normalisation, constant=7.0)
    learner.runner.token_loss = type(learner.runner.token_loss)(importance_cap=cap)
    worlds.clear(learner)
    z = worlds.stream_grpo(
        learner, groups, rng, grpo=grpo, loss=loss, reward_values=reward_values, content_ready=content_ready
    )
    got = worlds.streamed_gradient(learner, 1.0 / z)
    naive = grpo_loss(
        worlds.logprobs_of(learner),
        groups,
        advantage=advantage,
        normalisation=normalisation,
        constant=7.0,
        importance_cap=cap,
    )
    if isinstance(naive, float):
        assert all(float(g.abs().max()) < 1e-5 for g in got.values())
        return
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < tolerance(learner)
    assert not learner.store.open_keys


@FEW
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=3),
    values=st.sampled_from([(0.0, 1.0), (0.0, 0.25, 0.5, 1.0)]),
    advantage=st.sampled_from(worlds.ADVANTAGES),
    normalisation=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    reward_values=st.sampled_from([0, 1, 2, 5]),
    content_ready=st.sampled_from([0.0, 0.5]),
)
def test_any_advantage_that_treats_equal_rewards_equally_streams_exactly(
    learner, seed, sizes, values, advantage, normalisation, reward_values, content_ready
):
    rng = random.Random(seed)
    groups = worlds.random_groups(rng, values=values, sizes=sizes)
    groups = worlds.with_parts(rng, groups) if advantage == "gdpo" else groups
    learner.runner.token_loss = type(learner.runner.token_loss)()
    worlds.clear(learner)
    z = worlds.stream_grpo(
        learner,
        groups,
        rng,
        grpo=worlds.grpo_of(advantage),
        loss=LossConfig(normalisation=normalisation, constant=7.0),
        reward_values=reward_values,
        content_ready=content_ready,
    )
    got = worlds.streamed_gradient(learner, 1.0 / z)
    naive = grpo_loss(
        worlds.logprobs_of(learner),
        groups,
        **worlds.naive_advantage(advantage),
        normalisation=normalisation,
        constant=7.0,
    )
    assume(torch.is_tensor(naive))
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < tolerance(learner)
    assert not learner.store.open_keys


@FEW
@given(
    seed=st.integers(0, 10**6),
    normalisation=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
)
def test_an_objective_in_a_file_streams_exactly(learner, seed, normalisation):
    """REINFORCE with a baseline from the updates before."""
    rng = random.Random(seed)
    groups = worlds.random_groups(rng, values=(0.0, 0.3, 1.0), sizes=(3, 1))
    loss = LossConfig(normalisation=normalisation, constant=7.0)
    objective = build_objective(Config(objective=worlds.OWN_OBJECTIVE, loss=loss))
    learner.runner.token_loss = type(learner.runner.token_loss)()
    worlds.clear(learner)
    z = worlds.stream_grpo(learner, groups, rng, objective=objective)
    got = worlds.streamed_gradient(learner, 1.0 / z)
    naive = grpo_loss(
        worlds.logprobs_of(learner),
        groups,
        advantage=lambda group: [t.reward - 0.5 for t in group],
        normalisation=normalisation,
        constant=7.0,
    )
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < tolerance(learner)


@FEW
@given(
    seed=st.integers(0, 10**6),
    count=st.integers(1, 6),
    normalisation=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
)
def test_streamed_opd_gradient_equals_barrier_gradient(learner, seed, count, normalisation):
    rng = random.Random(seed)
    trajectories = [worlds.random_trajectory(rng, i, 0, split=rng.random() < 0.3) for i in range(count)]
    scores = worlds.random_scores(rng, trajectories)
    worlds.clear(learner)
    z = worlds.stream_opd(
        learner, trajectories, scores, rng, loss=LossConfig(normalisation=normalisation, constant=3.0)
    )
    got = worlds.streamed_gradient(learner, 1.0 / z)
    naive = opd_loss(worlds.logprobs_of(learner), trajectories, scores, normalisation=normalisation, constant=3.0)
    assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < tolerance(learner)


def test_the_step_equals_a_textbook_step_on_the_barrier_gradient(learner):
    """Three updates: divide, clip, AdamW (no decay on norms), against torch.optim on the naive gradient."""
    names, parameters = learner.store.layout.names, learner.store.layout.parameters
    shadow = {n: p.detach().clone().requires_grad_() for n, p in zip(names, parameters, strict=True)}
    config = learner.stepper._config
    textbook = torch.optim.AdamW(shadow.values(), lr=config.learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    learner.runner.token_loss = type(learner.runner.token_loss)()
    for update in range(3):
        rng = random.Random(update)
        groups = worlds.random_groups(rng, values=(0.0, 1.0), sizes=[4, 4])
        groups[0] = [
            type(t)(**{f: getattr(t, f) for f in t.__struct_fields__} | {"reward": i % 2})
            for i, t in enumerate(groups[0])
        ]
        worlds.clear(learner)
        want = worlds.naive_gradient(learner, grpo_loss(worlds.logprobs_of(learner), groups, advantage="std"))
        z = worlds.stream_grpo(learner, groups, rng)
        stats = worlds.step(learner, z, update)
        for name, gradient in want.items():
            shadow[name].grad = gradient.clone()
        norm = torch.nn.utils.clip_grad_norm_(shadow.values(), config.clip_grad)
        textbook.step()
        assert stats.stepped and abs(stats.grad_norm - float(norm)) < 1e-4 * float(norm)
        worst = max(float((p.detach() - shadow[n]).abs().max()) for n, p in zip(names, parameters, strict=True))
        assert worst < (2e-5 if tolerance(learner) > 1e-9 else 1e-11)


@pytest.fixture(scope="module")
def exact_learner(tmp_path_factory):
    folder = worlds.write_model(tmp_path_factory.mktemp("model"))
    return worlds.make_learner(worlds.make_config(folder, accumulator="exact"))


@FEW
@given(
    seed=st.integers(0, 10**6),
    orders=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    values=st.sampled_from([(0.0, 1.0), (0.0, 0.25, 0.5, 1.0)]),
    content_ready=st.sampled_from([0.0, 0.7]),
)
def test_exact_sums_are_bit_identical_for_any_order_and_packing(exact_learner, seed, orders, values, content_ready):
    learner = exact_learner
    groups = worlds.random_groups(random.Random(seed), values=values, sizes=[3, 4])
    sums = []
    for order, ready in zip(orders, (0.0, content_ready), strict=True):
        worlds.clear(learner)
        z = worlds.stream_grpo(learner, groups, random.Random(order), reward_values=99, content_ready=ready)
        sums.append([flat.clone() for flat in learner.store.batch.flats])
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))
    naive = grpo_loss(worlds.logprobs_of(learner), groups, advantage="std")
    if torch.is_tensor(naive):
        got = worlds.streamed_gradient(learner, 1.0 / z)
        assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < 1e-5


@settings(FEW, max_examples=5)
@given(seed=st.integers(0, 10**6), reward_values=st.sampled_from([0, 2]))
def test_accumulators_on_the_host_equal_the_barrier(tmp_path_factory, seed, reward_values):
    folder = worlds.write_model(tmp_path_factory.mktemp("model"))
    learner = worlds.make_learner(worlds.make_config(folder, accumulator_placement="host"))
    groups = worlds.random_groups(random.Random(seed), values=(0.0, 0.4, 1.0), sizes=[3, 4])
    z = worlds.stream_grpo(learner, groups, random.Random(seed), reward_values=reward_values, content_ready=0.3)
    naive = grpo_loss(worlds.logprobs_of(learner), groups, advantage="std")
    if torch.is_tensor(naive):
        got = worlds.streamed_gradient(learner, 1.0 / z)
        assert worlds.largest_difference(got, worlds.naive_gradient(learner, naive)) < 1e-5
