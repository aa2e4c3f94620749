"""Laws of the task stream."""

from __future__ import annotations

import pytest

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.tasks import SourceState, build_source
from megathunder.tasks.shell import KINDS


def test_training_and_heldout_tasks_share_no_content() -> None:
    heldout = {t.content_key for t in build_source(TasksConfig(size=1)).heldout(300)}
    assert len(heldout) == 300
    for seed in (0, 1):
        train = {t.content_key for t in build_source(TasksConfig(seed=seed, size=2000)).take(2000)}
        assert len(train) == 2000
        assert not train & heldout


def test_every_kind_appears_in_training_and_in_the_heldout_set() -> None:
    source = build_source(TasksConfig(size=200))
    assert {t.kind for t in source.take(200)} == {t.kind for t in source.heldout(64)} == set(KINDS)


def test_heldout_tasks_do_not_depend_on_the_seed() -> None:
    first, second = (build_source(TasksConfig(seed=s, size=1)).heldout(20) for s in (0, 5))
    assert first == second


def test_three_prompts_serve_five_updates_of_two_and_each_epoch_visits_all() -> None:
    source = build_source(TasksConfig(size=3))
    ids = [t.id for _ in range(6) for t in source.take(2)]
    assert all(len(set(ids[i : i + 3])) == 3 for i in range(0, 12, 3))
    assert source.state() == SourceState(epoch=3, cursor=3, size=3)


def test_epochs_differ_in_order_and_repeat_from_the_seed() -> None:
    source, again = (build_source(TasksConfig(size=50)) for _ in range(2))
    first, second = source.take(50), source.take(50)
    assert first != second and set(first) == set(second)
    assert again.take(100) == first + second


def test_batch_larger_than_an_unwrapped_source_names_both_numbers() -> None:
    source = build_source(TasksConfig(size=3, wrap=False))
    with pytest.raises(ConfigError, match=r"batch of 4 .* 3 of 3"):
        source.take(4)
    assert len(source.take(3)) == 3
    assert len(build_source(TasksConfig(size=3)).take(4)) == 4


def test_restored_source_continues_where_it_stood() -> None:
    source, fresh = (build_source(TasksConfig(size=7)) for _ in range(2))
    source.take(10)
    fresh.restore(source.state())
    assert fresh.take(9) == source.take(9)


def test_unknown_kind_and_impossible_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="juggle"):
        build_source(TasksConfig(kinds=("read", "juggle")))
    with pytest.raises(ConfigError, match="distinct train tasks"):
        build_source(TasksConfig(kinds=("find",), size=5000))
