"""The barrier: resuming, skipping, bad gradients, stale tokens, learning rates."""

import json
import random
import threading

import pytest
import torch

from megathunder.accumulator_keys import BATCH
from megathunder.errors import MegathunderError, StalePolicyError
from megathunder.learner.checkpoint import checkpoint_status
from megathunder.learner.checkpoint.snapshot import Snapshot
from megathunder.types import Differentiate, FinishCheckpoint, SaveCheckpoint, TakeStep
from tests.equality import worlds
from tests.equality.jobs import run_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return worlds.write_model(tmp_path_factory.mktemp("model"))


def update(learner, k):
    rng = random.Random(k)
    groups = worlds.random_groups(rng, values=(0.0, 1.0), sizes=[3, 4])
    z = worlds.stream_grpo(learner, groups, rng, version=k)
    return worlds.step(learner, z, k)


def weights(learner):
    return [p.detach().clone() for p in learner.store.layout.parameters]


@pytest.mark.parametrize("settings", [{}, {"accumulator": "exact"}, {"distributed_optimizer": True}])
def test_ten_updates_equal_five_and_resume_and_five(folder, tmp_path, settings):
    config = worlds.make_config(folder, warmup_updates=3, **settings)
    straight, first, second = (worlds.make_learner(config, seed) for seed in (1, 1, 2))
    for k in range(10):
        update(straight, k)
    for k in range(5):
        update(first, k)
    first.save(tmp_path / "checkpoint")
    second.load(tmp_path / "checkpoint")
    for k in range(5, 10):
        stats = update(second, k)
    assert stats.stepped
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(second), strict=True))


@pytest.mark.parametrize("settings", [{}, {"accumulator": "exact"}, {"distributed_optimizer": True}])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(folder, tmp_path, settings, monkeypatch):
    config = worlds.make_config(folder, warmup_updates=3, **settings)
    straight, resumed = (worlds.make_learner(config, seed) for seed in (1, 2))
    later = threading.Event()
    write = Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda self: later.wait(60) and write(self))
    for k in range(2):
        update(straight, k)
    files = tmp_path / "checkpoint"
    straight.save_checkpoint(SaveCheckpoint(item=0, folder=str(files), background=True))
    for k in range(2, 4):
        update(straight, k)
    assert not checkpoint_status.read_all(files), (
        "not a byte before two more updates have changed every weight and moment"
    )
    later.set()
    straight.finish_checkpoint(FinishCheckpoint(item=1))
    assert checkpoint_status.read_all(files) == {0: ""}
    resumed.load(files)
    for k in range(2, 4):
        update(resumed, k)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))


def test_a_save_in_the_background_that_fails_says_so(folder, tmp_path, monkeypatch):
    learner = worlds.make_learner(worlds.make_config(folder))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Snapshot, "write", full)
    learner.save_checkpoint(SaveCheckpoint(item=0, folder=str(tmp_path), background=True))
    with pytest.raises(OSError, match="No space"):
        learner.finish_checkpoint(FinishCheckpoint(item=1))
    assert "No space" in checkpoint_status.read_all(tmp_path)[0]
    assert not (tmp_path / "learner.json").exists()


def test_an_all_equal_batch_makes_no_step_and_the_schedule_goes_on(folder):
    learner = worlds.make_learner(worlds.make_config(folder, warmup_updates=4))
    before = weights(learner)
    stats = learner.take_step(TakeStep(item=0, update=0, normaliser=10.0, skip=True))
    assert not stats.stepped and stats.skip_reason and stats.learning_rate == pytest.approx(1e-2 / 4)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(learner), strict=True))
    assert update(learner, 1).learning_rate == pytest.approx(1e-2 / 2)


def test_an_infinite_gradient_makes_no_step_is_named_and_stops_the_run_when_it_repeats(folder):
    learner = worlds.make_learner(worlds.make_config(folder, max_bad_updates=2))
    before = weights(learner)
    name = learner.store.layout.names[3]
    learner.store.layout.home_views[3].view(-1)[0] = float("nan")
    stats = learner.take_step(TakeStep(item=0, update=0, normaliser=1.0))
    assert not stats.stepped and name in stats.skip_reason
    assert all(torch.equal(a, b) for a, b in zip(before, weights(learner), strict=True))
    learner.store.layout.home_views[0].view(-1)[0] = float("inf")
    with pytest.raises(MegathunderError, match="2 updates in a row"):
        learner.take_step(TakeStep(item=0, update=1, normaliser=1.0))


def test_a_good_update_after_a_bad_one_is_untouched_by_it(folder):
    clean, hurt = (worlds.make_learner(worlds.make_config(folder)) for _ in range(2))
    hurt.store.layout.home_views[0].view(-1)[0] = float("nan")
    assert not hurt.take_step(TakeStep(item=0, update=0, normaliser=1.0)).stepped
    update(clean, 1)
    update(hurt, 1)
    assert all(torch.equal(a, b) for a, b in zip(weights(clean), weights(hurt), strict=True))


def test_a_token_of_another_policy_version_is_refused(folder):
    learner = worlds.make_learner(worlds.make_config(folder))
    learner.differentiate(Differentiate(item=0, update=0, policy_version=4, target=BATCH, rows=()))
    with pytest.raises(StalePolicyError, match="version 3 in an update of version 4"):
        learner.differentiate(Differentiate(item=1, update=0, policy_version=3, target=BATCH, rows=()))


def test_tokens_sampled_before_the_last_step_are_refused(folder):
    learner = worlds.make_learner(worlds.make_config(folder))
    update(learner, 0)
    with pytest.raises(StalePolicyError, match="version 0 after the step"):
        update(learner, 0)
    update(learner, 1)


@pytest.mark.parametrize(("settings", "steps"), [({}, 0), ({"distributed_optimizer": True}, 0), ({}, 1)])
def test_a_checkpoint_from_before_the_first_step_is_read(folder, tmp_path, settings, steps):
    config = worlds.make_config(folder, **settings)
    straight, resumed = (worlds.make_learner(config, seed) for seed in (1, 2))
    for k in range(steps):
        update(straight, k)
    straight.take_step(TakeStep(item=0, update=steps, normaliser=10.0, skip=True))
    straight.save(tmp_path / "checkpoint")
    resumed.load(tmp_path / "checkpoint")
    for k in range(steps + 1, steps + 3):
        update(straight, k)
        update(resumed, k)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(resumed), strict=True))


@pytest.mark.parametrize(
    ("ranks", "fields"), [(1, []), (2, ["tensor_parallel=2"]), (2, ["distributed_optimizer=true"])]
)
def test_weight_decay_is_that_of_adamw_with_a_group_of_matrices_and_one_of_vectors(folder, tmp_path, ranks, fields):
    run_job("tests.equality.weight_decay", [folder, tmp_path / "out", *fields], ranks)
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("out*"))]
    assert len(found) == ranks
    for rank in found:
        assert rank["vectors"] and rank["matrices"] and rank["difference"] < 1e-7
        assert rank["difference_if_all_decay"] > 1e-4, "the test tells the two apart"


@pytest.mark.parametrize(("decay", "last"), [("constant", 1e-2), ("linear", 0.0), ("cosine", 0.0)])
def test_learning_rate_decays_to_zero_where_it_is_told_to(folder, decay, last):
    config = worlds.make_config(folder, warmup_updates=2, learning_rate_decay=decay)
    stepper = worlds.make_learner(config).stepper
    rates = [stepper.learning_rate(k) for k in range(config.run.updates)]
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 1e-2]) and rates[-1] == pytest.approx(last, abs=1e-12)


def test_learning_rate_warms_up_then_falls_to_its_minimum_at_the_last_update(folder):
    config = worlds.make_config(folder, warmup_updates=2, learning_rate_decay="cosine", min_learning_rate=1e-3)
    stepper = worlds.make_learner(config).stepper
    rates = [stepper.learning_rate(k) for k in range(config.run.updates)]
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 1e-2]) and rates[-1] == pytest.approx(1e-3)
    assert rates[2:] == sorted(rates[2:], reverse=True)
