"""Tasks of a run and of a comparison: what is drawn once, and what is drawn again."""

from __future__ import annotations

import dataclasses

from megathunder.config import Config
from megathunder.coordinator.supply import SampledSupply
from megathunder.tasks import build_source


def supply(*, alternate: tuple[str, ...] = (), **tasks: object) -> SampledSupply:
    run = dataclasses.replace(Config().run, groups_per_update=3, group_size=2, alternate=alternate)
    config = dataclasses.replace(Config(), run=run, tasks=dataclasses.replace(Config().tasks, **tasks))
    return SampledSupply(config, build_source(config.tasks), None)  # type: ignore[arg-type]


def ids(groups: list) -> list[str]:
    return [group[0].id for group in groups]


def test_a_comparison_draws_the_same_replacements_for_every_schedule() -> None:
    drawn = supply(alternate=("sync", "thundersync"))
    first = ids(drawn.groups(0)) + ids([drawn.another(0, 3), drawn.another(0, 4)])
    again = ids(drawn.groups(0)) + ids([drawn.another(0, 3), drawn.another(0, 4)])
    assert first == again and len(set(first)) == 5
    assert not set(first) & set(ids(drawn.groups(1)))


def test_a_plain_run_draws_every_task_anew() -> None:
    drawn = supply()
    seen = ids(drawn.groups(0)) + ids([drawn.another(0, 3)]) + ids(drawn.groups(1)) + ids([drawn.another(1, 3)])
    assert len(set(seen)) == len(seen)


def test_a_source_that_is_used_up_has_no_replacement() -> None:
    drawn = supply(size=4, wrap=False)
    drawn.groups(0)
    assert drawn.another(0, 3) is not None
    assert drawn.another(0, 4) is None
