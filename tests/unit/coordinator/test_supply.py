"""Tasks of a run and of a comparison: what is drawn once, and what is drawn again."""

from __future__ import annotations

import dataclasses

from benchmarks.comparison.repeated_supply import RepeatedSupply
from megathunder.config import Config
from megathunder.coordinator.rollouts import Rollouts
from megathunder.coordinator.sizing import GroupSizes
from megathunder.coordinator.supply import SampledSupply
from megathunder.tasks import build_source
from megathunder.types import EndReason, Role, Row, Segment, Trajectory, TrajectoryId

FEW = dataclasses.replace(Config().tasks, size=64)  # each source of these tests makes all its tasks anew


def supply(**tasks: object) -> SampledSupply:
    run = dataclasses.replace(Config().run, groups_per_update=3, group_size=2)
    config = dataclasses.replace(Config(), run=run, tasks=dataclasses.replace(FEW, **tasks))
    return SampledSupply(config, build_source(config.tasks), None)  # type: ignore[arg-type]


def ids(groups: list) -> list[str]:
    return [group[0].id for group in groups]


def test_a_comparison_draws_the_same_replacements_for_every_schedule() -> None:
    drawn = RepeatedSupply(supply())
    first = ids(drawn.groups(0)) + ids([drawn.replacement_group(0, 3), drawn.replacement_group(0, 4)])
    again = ids(drawn.groups(0)) + ids([drawn.replacement_group(0, 3), drawn.replacement_group(0, 4)])
    assert first == again and len(set(first)) == 5
    assert not set(first) & set(ids(drawn.groups(1)))


def test_a_plain_run_draws_every_task_anew() -> None:
    drawn = supply()
    seen = (
        ids(drawn.groups(0))
        + ids([drawn.replacement_group(0, 3)])
        + ids(drawn.groups(1))
        + ids([drawn.replacement_group(1, 3)])
    )
    assert len(set(seen)) == len(seen)


def test_a_source_that_is_used_up_has_no_replacement() -> None:
    drawn = supply(size=4, wrap=False)
    drawn.groups(0)
    assert drawn.replacement_group(0, 3) is not None
    assert drawn.replacement_group(0, 4) is None


def sized(sizes: GroupSizes, config: Config, batch: int, wild: str = "") -> list[int]:
    """Draw a batch, end it (trajectories of kind `wild` straggle, and every group of 16), and say the sizes drawn."""
    drawn = SampledSupply(config, build_source(config.tasks), None, sizes).groups(batch)  # type: ignore[arg-type]
    rollouts = Rollouts(update=batch, batch=batch, policy_version=0, groups=drawn)
    for b, group in enumerate(drawn):
        for i in range(len(group)):
            straggles = i == 0 and (group[0].kind == wild or len(group) == 16)
            rollouts.trajectories[TrajectoryId(batch, b, i)] = trajectory(batch, b, i, tokens=9 if straggles else 2)
    sizing = sizes.observe(rollouts)
    assert sum(sizing.groups_by_size.values()) == len(drawn) == sizing.measured
    assert sizing.straggled == sum(group[0].kind == wild or len(group) == 16 for group in drawn)
    return [len(group) for group in drawn]


def trajectory(batch: int, group: int, index: int, *, tokens: int) -> Trajectory:
    action = Segment(role=Role.ACTION, token_ids=(1,) * tokens, logprobs=(0.0,) * tokens, policy_versions=(0,) * tokens)
    return Trajectory(
        id=TrajectoryId(batch, group, index),
        task_id="t",
        rows=(Row(segments=(action,)),),
        end_reason=EndReason.ANSWERED,
        started_s=0.0,
        completed_s=1.0,
        turns=1,
    )


def controlled(**sagc: object) -> Config:
    run = dataclasses.replace(Config().run, group_size=4, groups_per_update=6, group_control="sagc")
    return dataclasses.replace(Config(), run=run, tasks=FEW, sagc=dataclasses.replace(Config().sagc, **sagc))


def test_sizes_follow_the_stragglers_and_prompts_follow_the_sizes() -> None:
    config = controlled(trajectories_per_update=64)
    sizes = GroupSizes(config)
    batches = [sized(sizes, config, batch) for batch in range(12)]
    assert batches[0] == [4] * 16 and batches[1] == [8] * 8 and [16] * 4 in batches
    assert all(sum(batch) == 64 for batch in batches), "64 is a multiple of every size"
    fixed = controlled()
    sizes = GroupSizes(fixed)
    assert [len(sized(sizes, fixed, batch)) for batch in range(2)] == [6, 6], "without a target prompts stay"


def test_prompts_of_one_update_get_groups_of_different_sizes() -> None:
    config = controlled(trajectories_per_update=64, prompt_prior="kind", target_rate=0.1)
    sizes = GroupSizes(config)
    batches = [sized(sizes, config, batch, wild="chase") for batch in range(40)]
    assert any(len(set(batch)) > 1 for batch in batches)
    assert all(64 - 16 <= sum(batch) <= 64 + 16 for batch in batches)


def test_sizes_go_on_from_a_checkpoint() -> None:
    config = controlled()
    straight, resumed = GroupSizes(config), GroupSizes(config)
    for batch in range(5):
        sized(straight, config, batch)
    resumed.restore(straight.state())
    assert [sized(straight, config, b) for b in range(5, 15)] == [sized(resumed, config, b) for b in range(5, 15)]
    fixed = GroupSizes(Config())
    fixed.restore(straight.state())
    assert fixed.state() == b""


def test_a_replacement_has_the_size_of_its_batch() -> None:
    config = controlled()
    drawn = SampledSupply(config, build_source(config.tasks), None)  # type: ignore[arg-type]
    assert {len(group) for group in drawn.groups(0)} == {len(drawn.replacement_group(0, 6))} == {4}
