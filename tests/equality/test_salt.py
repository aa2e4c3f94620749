"""SALT streamed through the scheduler, in any order and under any schedule, is the naive SALT update at the barrier."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.advantages import group_advantages
from oracles.objective_losses import salt_update

from megathunder.accumulator_keys import AccumulatorKey
from megathunder.config.root import Config
from megathunder.config.salt import SaltConfig
from megathunder.config.streaming import StreamingConfig
from megathunder.errors import ConfigError
from megathunder.learner.passes.gradient_geometry import GradientGeometry, Sketch
from megathunder.objectives.build_objective import build_objective
from megathunder.objectives.salt import reweigh
from megathunder.schedule.scheduler import UpdateScheduler
from megathunder.types import Differentiate, Done, Rewarded, TrajectoryCompleted, WorkStats
from megathunder.work_stats import SaltStats, add_known
from tests.equality import worlds

FEW = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
STRONG = SaltConfig(amplification=4.0, severe_cancellation=0.05, explained_share=0.4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return worlds.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learner(folder):
    return worlds.make_learner(worlds.make_config(folder, dtype="float64"))


@pytest.fixture(scope="module")
def exact_learner(folder):
    return worlds.make_learner(worlds.make_config(folder, accumulator="exact"))


def configured(learner, salt: SaltConfig, **sections) -> Config:
    """A configuration of `learner`, which reweighs as it says from now on."""
    base = Config(learner=learner._settings, salt=salt, streaming=StreamingConfig(pack_tokens=40, max_open_groups=8))
    config = replace(base, **sections)
    learner.release._geometry = GradientGeometry.of(config, learner.store)
    return config


def stream(learner, config: Config, groups, rng) -> tuple[float, dict[str, float]]:
    """One update up to the step; the normaliser, and what the learner reported."""
    worlds.clear(learner)
    streams = []
    for group in groups:
        for t in group:
            bare = type(t)(**{f: getattr(t, f) for f in t.__struct_fields__} | {"reward": None})
            rewarded = Rewarded(id=t.id, reward=t.reward, verifier_s=0.0, at_s=0.0)
            streams.append([TrajectoryCompleted(trajectory=bare, at_s=0.0), rewarded])
    scheduler = UpdateScheduler(config, 0, 0, [len(g) for g in groups], 1)
    done = WorkStats()
    while not scheduler.finished:
        command = scheduler.next_work(0, 0.0) if rng.random() < 0.6 or not streams else None
        if command is not None:
            run = learner.differentiate if isinstance(command, Differentiate) else learner.fold
            done += run(command)
            scheduler.on_done(Done(item=command.item, cell=0, started_s=0, ended_s=0, stats=WorkStats()), 0.0)
        elif streams:
            chosen = rng.choice(streams)
            scheduler.on_event(chosen.pop(0), 0.0)
            streams = [s for s in streams if s]
    tally = worlds.tally(learner)
    learner.release.finish(tally)
    assert learner.store.open_keys == frozenset()
    return scheduler.normaliser, add_known(done.salt, tally.salt) or SaltStats()


def own_gradients(learner, group, normalisation: str) -> torch.Tensor:
    """[n, D] of u_i sum_t m_t (-log pi_t), by autograd, one trajectory at a time."""
    logprobs_of, rows = worlds.logprobs_of(learner), []
    for t in group:
        loss = 0.0
        for row in t.rows:
            at = torch.tensor([i for i, m in enumerate(row.loss_mask) if m])
            loss = loss - logprobs_of(row.token_ids)[at - 1].sum()
        found = worlds.naive_gradient(learner, row_scale_of(normalisation, t) * loss)
        rows.append(torch.cat([g.flatten().double() for g in found.values()]))
    return torch.stack(rows)


def row_scale_of(normalisation: str, trajectory) -> float:
    return 1.0 / trajectory.sampled_tokens if normalisation == "sequence_mean" else 1.0


def naive(learner, config: Config, groups) -> torch.Tensor:
    """[D]: SALT of every group, or of the batch, on whole gradients."""
    salt, features, weights = config.salt, [], []
    for group in groups:
        advantages = group_advantages([t.reward for t in group], config.grpo.advantage, config.grpo.epsilon)
        if any(advantages):
            features.append(own_gradients(learner, group, config.loss.normalisation))
            weights.append(torch.tensor(advantages, dtype=torch.float64))
    if salt.scope == "batch" and features:
        features, weights = [torch.cat(features)], [torch.cat(weights)]
    return sum(
        salt_update(
            f,
            w,
            amplification=salt.amplification,
            explained_share=salt.explained_share,
            severe_cancellation=salt.severe_cancellation,
        )
        for f, w in zip(features, weights, strict=True)
    )


@FEW
@given(
    seed=st.integers(0, 10**6),
    values=st.sampled_from([(0.0, 1.0), (0.0, 0.25, 0.5, 1.0)]),
    scope=st.sampled_from(["group", "batch"]),
    schedule=st.sampled_from(["sync", "periodic_async", "thundersync", "one_step_off"]),
    content_ready=st.booleans(),
    advantage=st.sampled_from(["std", "none", "leave_one_out"]),
    normalisation=st.sampled_from(["token_mean", "sequence_mean"]),
)
def test_streamed_salt_equals_salt_at_the_barrier(
    learner, seed, values, scope, schedule, content_ready, advantage, normalisation
) -> None:
    rng = random.Random(seed)
    groups = worlds.random_groups(rng, values=values, sizes=[3, 4])
    config = configured(
        learner,
        replace(STRONG, scope=scope),
        schedule=schedule,
        grpo=replace(Config().grpo, advantage=advantage),
        loss=replace(Config().loss, normalisation=normalisation),
        streaming=StreamingConfig(pack_tokens=40, content_ready=content_ready and schedule == "thundersync"),
    )
    _, salt = stream(learner, config, groups, rng)
    got = torch.cat([g.flatten().double() for g in worlds.streamed_gradient(learner, 1.0).values()])
    want = naive(learner, config, groups)
    if not torch.is_tensor(want):
        assert float(got.abs().max()) == 0.0 and not salt.geometries
        return
    assert float((got - want).norm() / want.norm()) < 1e-10
    assert salt.geometries == (1.0 if scope == "batch" else sum(len({t.reward for t in g}) > 1 for g in groups))


def test_amplification_0_is_the_objective_without_salt(learner) -> None:
    off = configured(learner, SaltConfig())
    assert learner.release._geometry is None and not build_objective(off).keeps_each_gradient


@settings(FEW, max_examples=4)
@given(seed=st.integers(0, 10**6), orders=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_under_exact_sums_measuring_changes_no_bit_and_no_order_does(exact_learner, seed, orders) -> None:
    groups = worlds.random_groups(random.Random(seed), values=(0.0, 1.0), sizes=[4, 4])
    sums = {}
    for name, salt in (("grpo", SaltConfig()), ("measured", SaltConfig(measure=True)), ("salt", STRONG)):
        config = configured(exact_learner, salt)
        for order in orders:
            stream(exact_learner, config, groups, random.Random(order))
            sums[name, order] = [flat.clone() for flat in exact_learner.store.batch.flats]

    def equal(a, b) -> bool:
        return all(torch.equal(x, y) for x, y in zip(sums[a], sums[b], strict=True))

    first, second = orders
    assert equal(("grpo", first), ("measured", first)) and equal(("grpo", first), ("measured", second))
    assert equal(("salt", first), ("salt", second))


def test_a_sketch_keeps_inner_products_up_to_its_reported_error(learner) -> None:
    groups = worlds.random_groups(random.Random(5), values=(0.0, 1.0), sizes=[6])
    found = {}
    for dimension in (64, 16384):
        config = configured(learner, replace(STRONG, features="sketch", sketch_dimension=dimension))
        _, salt = stream(learner, config, groups, random.Random(1))
        found[dimension] = salt.sketch_error / salt.sketched
    assert found[16384] < 0.05 < 3 * found[64]
    part = configured(learner, replace(STRONG, features="sketch", sketch_layers=("layers.0.",)))
    wanted = Sketch(part, learner.store)._maps
    assert 0 < len(wanted) < len(learner.store.layout.names)
    with pytest.raises(ConfigError, match="no parameter has such a name"):
        Sketch(configured(learner, replace(STRONG, features="sketch", sketch_layers=("bogus",))), learner.store)


def test_a_groups_trajectories_have_an_accumulator_each_and_no_more_groups_are_open_than_may_be(learner) -> None:
    config = configured(learner, STRONG, streaming=StreamingConfig(pack_tokens=40, max_open_groups=1))
    groups = worlds.random_groups(random.Random(3), values=(0.0, 1.0), sizes=[3, 3, 3])
    most, of = 0, learner.store.of

    def counted(key: AccumulatorKey):
        nonlocal most
        result = of(key)
        most = max(most, len(learner.store.open_keys))
        return result

    learner.store.of = counted
    stream(learner, config, groups, random.Random(0))
    del learner.store.of
    assert most == 3


def test_cells_that_gather_sketches_at_the_barrier_agree_with_one_cell(learner, monkeypatch) -> None:
    """Two cells with half of the trajectories each, played by one learner."""
    groups = worlds.random_groups(random.Random(7), values=(0.0, 1.0), sizes=[4, 4])
    config = configured(learner, replace(STRONG, scope="batch", features="sketch", sketch_dimension=256))
    geometry, kept = learner.release._geometry, []
    monkeypatch.setattr(geometry, "finish", lambda tally: kept.extend(geometry._kept) or [])
    monkeypatch.setattr("megathunder.learner.passes.gradient_runner.GradientRunner.clear", lambda self: None)
    with pytest.raises(AssertionError):  # the gradients are still there
        stream(learner, config, groups, random.Random(2))
    terms = [term for fold in kept for term in fold.terms]
    keys, own = [t.source for t in terms], np.array([t.coefficient for t in terms])
    tally, half = worlds.tally(learner), len(keys) // 2
    want = reweigh(geometry._gram(keys, tally), own, config.salt)
    parts = [(keys[p], own[p], geometry._sketch.project(keys[p], tally)) for p in (slice(half), slice(half, None))]

    def gather(into, mine) -> None:
        into[:] = parts

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    halves = [geometry._over_ranks(keys[p], own[p], 2, tally)[1] for p in (slice(half), slice(half, None))]
    assert want.factor > 1.0
    assert np.allclose(np.concatenate(halves), want.coefficients, rtol=1e-9)
    learner.store.abandon()
    geometry.clear()
