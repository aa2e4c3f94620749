"""Admission, order of work, ledger, versions, replacement: the laws of the schedule besides exactness."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from update_driver import computed, drive, grpo_events, make_trajectory, score_events, turn_events

from megathunder.accumulator_keys import BATCH, AccumulatorKind
from megathunder.config.learner import LearnerConfig
from megathunder.config.objective import GrpoConfig
from megathunder.config.root import Config
from megathunder.config.streaming import StreamingConfig
from megathunder.errors import ConfigError, IllegalMove, InfrastructureFailure, StalePolicyError
from megathunder.schedule.answers import shares
from megathunder.schedule.ledger import Drop, Ledger
from megathunder.schedule.lifecycle import MOVES, START, Inputs, Phase, State, Work, move, moved
from megathunder.schedule.next_work import WorkRules, next_work
from megathunder.schedule.packing import PackLimits, pack
from megathunder.schedule.scheduler import UpdateScheduler
from megathunder.schedule.work_counts import Idle
from megathunder.types import (
    ContributionId,
    Differentiate,
    Done,
    Fold,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    WorkStats,
)


def give(scheduler: UpdateScheduler, *streams: list) -> None:
    for stream in streams:
        for event in stream:
            scheduler.on_event(event, 0.0)


def done(scheduler: UpdateScheduler, command: Differentiate | Fold, cell: int = 0, now: float = 0.0) -> None:
    scheduler.on_done(
        Done(item=command.item, cell=cell, started_s=0, ended_s=0, stats=WorkStats(tokens=computed(command))), now
    )


def rewarded(group: int, index: int, reward: float) -> list:
    return grpo_events(make_trajectory(group, index, [1]), reward)


def source(command: Differentiate) -> tuple[int, int]:
    return command.rows[0].source.group, command.rows[0].source.trajectory


def test_thundersync_works_on_the_first_rewarded_trajectory_and_sync_does_not() -> None:
    for schedule, works in (("thundersync", True), ("periodic_async", False), ("sync", False)):
        scheduler = UpdateScheduler(Config(schedule=schedule), 0, 0, [2, 2])
        give(scheduler, rewarded(0, 0, 1.0))
        assert (scheduler.next_work(0, 0.0) is not None) is works


def test_periodic_async_works_on_a_whole_group_with_its_advantages() -> None:
    scheduler = UpdateScheduler(Config(schedule="periodic_async"), 0, 0, [2, 2])
    give(scheduler, rewarded(1, 0, 1.0), rewarded(1, 1, 0.0))
    command = scheduler.next_work(0, 0.0)
    assert isinstance(command, Differentiate) and command.target == BATCH
    assert [r.scale for r in command.rows] == pytest.approx([1.0, -1.0], abs=1e-5)


def test_the_choice_of_work_changes_nothing_and_a_schedule_of_ones_own_is_a_row_in_a_file(tmp_path) -> None:
    (tmp_path / "mine.py").write_text(
        "from megathunder.schedule.schedules import ReleasePoint, Rule\n"
        "RULE = Rule('mine', ReleasePoint.GROUP, (0, 1, 2))\nNONE = 3\n"
    )
    config = Config(schedule=f"{tmp_path / 'mine.py'}:RULE")
    scheduler = UpdateScheduler(config, 0, 2, [2, 2])
    give(scheduler, rewarded(1, 0, 1.0), rewarded(0, 0, 1.0))
    state, rules = scheduler._state, WorkRules.of(config)
    assert next_work(state, rules, 0) is Idle.NO_WORK
    give(scheduler, rewarded(1, 1, 0.0))
    assert next_work(state, rules, 0) == next_work(state, rules, 0)
    assert scheduler.next_work(0, 0.0).target == BATCH and scheduler.report.policy_lag_max == 2
    with pytest.raises(ConfigError, match="(?s)is 3.*Rule"):
        UpdateScheduler(Config(schedule=f"{tmp_path / 'mine.py'}:NONE"), 0, 0, [2])
    with pytest.raises(ConfigError, match="(?s)one_step_off, periodic_async, sync, thundersync.*did you mean 'sync'"):
        UpdateScheduler(Config(schedule="synch"), 0, 0, [2])


def test_direct_work_comes_before_open_groups_before_new_groups() -> None:
    config = Config(streaming=StreamingConfig(pack_rows=1))
    scheduler = UpdateScheduler(config, 0, 0, [3, 3, 2])
    give(scheduler, rewarded(0, 0, 1.0))
    first = scheduler.next_work(0, 0.0)
    give(scheduler, rewarded(1, 0, 1.0), rewarded(0, 1, 1.0), rewarded(2, 0, 1.0), rewarded(2, 1, 0.0))
    order = [source(first)]
    done(scheduler, first)
    while (command := scheduler.next_work(0, 0.0)) is not None:
        order.append(source(command))
        done(scheduler, command)
    assert order == [(0, 0), (2, 0), (2, 1), (0, 1), (1, 0)]


def test_groups_with_two_different_rewards_come_before_groups_that_may_be_worthless() -> None:
    scheduler = UpdateScheduler(Config(), 0, 0, [3, 3])
    give(scheduler, rewarded(0, 0, 1.0), rewarded(0, 1, 1.0), rewarded(1, 0, 1.0), rewarded(1, 1, 0.0))
    assert source(scheduler.next_work(0, 0.0))[0] == 1


def test_contributions_of_one_class_share_a_micro_batch() -> None:
    scheduler = UpdateScheduler(Config(), 0, 0, [4])
    give(scheduler, rewarded(0, 0, 1.0), rewarded(0, 1, 0.0), rewarded(0, 2, 1.0))
    command = scheduler.next_work(0, 0.0)
    assert [r.source.trajectory for r in command.rows] == [0, 2] and command.target.kind is AccumulatorKind.CLASS


def test_a_third_reward_value_goes_to_the_moments_one_row_an_item() -> None:
    scheduler = UpdateScheduler(Config(), 0, 0, [5])
    give(scheduler, *(rewarded(0, i, r) for i, r in enumerate([1.0, 0.0, 0.5, 0.5])))
    kinds = []
    while (command := scheduler.next_work(0, 0.0)) is not None:
        kinds.append((command.target.kind, len(command.rows), command.features))
        done(scheduler, command)
    assert kinds == [("class", 1, ()), ("class", 1, ()), *[("moment", 1, (1.0, 0.5))] * 2]


def test_the_cap_blocks_new_groups_and_the_blocked_time_is_reported() -> None:
    config = Config(streaming=StreamingConfig(max_open_groups=1))
    scheduler = UpdateScheduler(config, 0, 0, [2, 2])
    give(scheduler, rewarded(0, 0, 1.0), rewarded(1, 0, 1.0))
    done(scheduler, scheduler.next_work(0, 0.0), now=2.0)
    assert scheduler.next_work(0, 2.0) is None
    assert scheduler.next_work(0, 5.0) is None
    give(scheduler, rewarded(0, 1, 0.0))
    fold = scheduler.next_work(0, 6.0)
    assert isinstance(fold, Fold) and scheduler.cell_time(0).blocked_s == 4.0 and scheduler.cell_time(0).busy_s == 2.0


def test_a_busy_cell_has_its_next_command_while_as_many_chains_wait_as_there_are_cells() -> None:
    config = Config(streaming=StreamingConfig(pack_rows=1))
    scheduler = UpdateScheduler(config, 0, 0, [5], cells=2)
    give(scheduler, *(rewarded(0, i, float(i % 2)) for i in range(4)))
    in_hand = scheduler.next_work(0, 0.0)
    ahead = scheduler.next_ahead(0, 0.0)
    assert ahead is not None and source(ahead) != source(in_hand)
    assert scheduler.next_ahead(0, 0.0) is not None
    assert scheduler.next_ahead(0, 0.0) is None, "one chain is left and another cell may be free for it sooner"
    done(scheduler, in_hand, now=2.0)
    done(scheduler, ahead, now=3.0)
    assert scheduler.cell_time(0).busy_s == 3.0 and scheduler.cell_time(0).idle_s == 0.0


def test_work_that_a_reward_would_make_cheaper_is_not_given_ahead() -> None:
    config = Config(streaming=StreamingConfig(content_ready=True, pack_rows=1))
    scheduler = UpdateScheduler(config, 0, 0, [3])
    give(scheduler, rewarded(0, 0, 1.0), *(grpo_events(make_trajectory(0, i, [1]), 0.0)[:-1] for i in (1, 2)))
    assert scheduler.next_work(0, 0.0) is not None and scheduler.next_ahead(0, 0.0) is None


def test_a_group_is_not_folded_while_work_for_its_accumulators_is_in_flight() -> None:
    scheduler = UpdateScheduler(Config(streaming=StreamingConfig(pack_rows=1)), 0, 0, [2, 2])
    give(scheduler, rewarded(0, 0, 1.0))
    first = scheduler.next_work(0, 0.0)
    give(scheduler, rewarded(1, 0, 1.0))
    ahead = scheduler.next_ahead(0, 0.0)
    give(scheduler, rewarded(0, 1, 0.0), rewarded(1, 1, 0.0))
    done(scheduler, first)
    fold = scheduler.next_ahead(0, 0.0)
    assert isinstance(fold, Fold) and {term.source.group for term in fold.terms} == {0}
    done(scheduler, ahead)
    done(scheduler, fold)
    assert isinstance(scheduler.next_work(0, 0.0), Fold)


def test_a_reward_moves_a_trajectory_out_of_its_accumulator_where_the_cap_is_reached_or_nothing_else_is_to_do() -> None:
    for cap, expected in (
        (1, ["per_trajectory", "fold", "per_trajectory"]),
        (2, ["per_trajectory", "per_trajectory", "fold"]),
    ):
        streaming = StreamingConfig(content_ready=True, pack_rows=1, max_per_trajectory_accumulators=cap)
        scheduler = UpdateScheduler(Config(streaming=streaming), 0, 0, [3])
        give(scheduler, rewarded(0, 0, 1.0)[:-1], rewarded(0, 1, 0.0)[:-1])
        kinds = []
        for _ in range(3):
            command = scheduler.next_work(0, 0.0)
            kinds.append("fold" if isinstance(command, Fold) else command.target.kind.value)
            done(scheduler, command)
            if len(kinds) == 1:
                give(scheduler, rewarded(0, 0, 1.0)[-1:])
        assert kinds == expected
        assert scheduler.next_work(0, 0.0) is None


def test_an_open_group_stays_on_its_cell_and_direct_work_goes_to_any() -> None:
    scheduler = UpdateScheduler(Config(), 0, 0, [3], cells=2)
    give(scheduler, rewarded(0, 0, 1.0))
    first = scheduler.next_work(0, 0.0)
    give(scheduler, rewarded(0, 1, 0.0))
    assert scheduler.next_work(1, 0.0) is None
    give(scheduler, rewarded(0, 2, 0.0))  # the group closes: what is left is direct
    direct = scheduler.next_work(1, 0.0)
    assert direct.target == BATCH and len(direct.rows) == 2
    assert first.target.kind is AccumulatorKind.CLASS


def test_a_shared_prompt_keeps_direct_work_on_its_cell_unless_the_other_would_idle() -> None:
    learner, streaming = LearnerConfig(shared_prompt="group"), StreamingConfig(pack_rows=1)
    config = Config(learner=learner, streaming=streaming, schedule="sync")
    scheduler = UpdateScheduler(config, 0, 0, [2, 2], cells=2)
    give(scheduler, *(rewarded(g, i, float(i)) for g in (0, 1) for i in (0, 1)))
    a, b = scheduler.next_work(0, 0.0), scheduler.next_work(1, 0.0)
    done(scheduler, b, cell=1)
    c = scheduler.next_work(1, 0.0)
    assert source(a)[0] != source(b)[0] == source(c)[0]
    done(scheduler, c, cell=1)
    assert source(scheduler.next_work(1, 0.0))[0] == source(a)[0]


def test_content_ready_work_is_folded_when_the_reward_lands_and_dropped_on_loss() -> None:
    config = Config(streaming=StreamingConfig(content_ready=True))
    scheduler = UpdateScheduler(config, 0, 0, [3])
    kept, lost = (make_trajectory(0, i, [1]) for i in range(2))
    give(scheduler, grpo_events(kept, 1.0)[:-1], grpo_events(lost, 1.0)[:-1])
    for _ in range(2):
        command = scheduler.next_work(0, 0.0)
        assert command.target.kind is AccumulatorKind.PER_TRAJECTORY
        done(scheduler, command)
    assert scheduler.next_work(0, 0.0) is None
    give(scheduler, grpo_events(kept, 1.0)[-1:], [TrajectoryLost(id=lost.id, reason="verifier", at_s=0)])
    fold = scheduler.next_work(0, 0.0)
    assert [t.target.kind for t in fold.terms] == ["class"] and {k.slot for k in fold.free} == {0, 1}


def test_turns_run_in_order_on_one_cell_and_the_last_one_replays() -> None:
    config = Config(objective="opd", streaming=StreamingConfig(release="turn"))
    trajectory = make_trajectory(0, 0, [3])
    turns, scores = turn_events(trajectory), score_events(trajectory)
    scheduler = UpdateScheduler(config, 0, 0, [1], cells=2)
    give(scheduler, turns[:1], scores[:1])
    first = scheduler.next_work(1, 0.0)
    done(scheduler, first, cell=1)
    give(scheduler, turns[1:], scores[1:2])
    assert scheduler.next_work(0, 0.0) is None  # the other cell does not hold the keys and values
    second = scheduler.next_work(1, 0.0)
    done(scheduler, second, cell=1)
    give(scheduler, scores[2:])
    third = scheduler.next_work(1, 0.0)
    done(scheduler, third, cell=1)
    assert [(c.rows[0].context_tokens, len(c.rows[0].token_ids), c.last) for c in (first, second, third)] == [
        (0, 4, False),
        (4, 7, False),
        (7, 10, False),
    ]
    give(scheduler, [TrajectoryCompleted(trajectory=trajectory, at_s=0)])
    replay = scheduler.next_work(1, 0.0)
    assert (
        replay.last
        and replay.rows[0].context_tokens == len(replay.rows[0].token_ids)
        and not sum(replay.rows[0].loss_mask)
    )
    done(scheduler, replay, cell=1)
    assert scheduler.finished


@pytest.mark.parametrize(
    ("schedule", "bad"), [("sync", 4), ("periodic_async", 6), ("thundersync", 4), ("one_step_off", 3)]
)
def test_a_token_of_another_policy_version_is_refused(schedule: str, bad: int) -> None:
    scheduler = UpdateScheduler(Config(schedule=schedule), 0, 5, [1])
    with pytest.raises(StalePolicyError, match=f"version {bad}"):
        give(scheduler, grpo_events(make_trajectory(0, 0, [1], versions=bad), 1.0))


def test_the_staleness_certificate_counts_every_token_by_lag() -> None:
    for schedule, version, lag in (("thundersync", 5, 0), ("one_step_off", 4, 1)):
        config = Config(schedule=schedule)
        events = [e for i in range(2) for e in grpo_events(make_trajectory(0, i, [2], versions=version), float(i))]
        report = drive(config, [2], events, version=5).scheduler.report
        assert report.tokens_by_lag == ((lag, 8),) and report.policy_lag_max == lag


def test_an_equal_group_is_replaced_up_to_the_limit_and_the_ledger_balances() -> None:
    config = Config(grpo=GrpoConfig(dynamic_sampling=True, max_replacements=1))
    scheduler = UpdateScheduler(config, 0, 0, [2])
    give(scheduler, rewarded(0, 0, 1.0), rewarded(0, 1, 1.0))
    assert not scheduler.finished and scheduler.needs_replacement() == 1
    assert scheduler.add_group(2) == 1 and scheduler.needs_replacement() == 0
    give(scheduler, rewarded(1, 0, 1.0), rewarded(1, 1, 1.0))
    assert scheduler.needs_replacement() == 0 and scheduler.finished and scheduler.skip
    assert scheduler.ledger.counts.dropped_by_reason == {"replaced": 4} and scheduler.ledger.counts.balanced
    assert scheduler.normaliser == 0


def test_work_on_a_group_that_turns_out_equal_is_counted_as_wasted() -> None:
    scheduler = UpdateScheduler(Config(), 0, 0, [2])
    give(scheduler, rewarded(0, 0, 1.0))
    done(scheduler, scheduler.next_work(0, 0.0))
    give(scheduler, rewarded(0, 1, 1.0))
    fold = scheduler.next_work(0, 0.0)
    assert fold.terms == () and len(fold.free) == 1
    done(scheduler, fold)
    assert scheduler.finished and scheduler.report.wasted_share == 1.0
    assert scheduler.report.wasted_tokens == 3, "what the learner computed: one token less than the row has"


@given(st.integers(0, 10_000), st.lists(st.integers(0, 500), min_size=1, max_size=8))
def test_what_an_item_took_is_shared_out_whole(total: int, parts: list[int]) -> None:
    out = shares(total, parts)
    assert sum(out) == total and min(out) >= 0 and len(out) == len(parts)
    if sum(parts):
        assert all(abs(got - total * part / sum(parts)) < 1 for got, part in zip(out, parts, strict=True))


def test_on_lost_fail_ends_the_run() -> None:
    scheduler = UpdateScheduler(Config(streaming=StreamingConfig(on_lost="fail")), 0, 0, [2])
    with pytest.raises(InfrastructureFailure, match="on_lost"):
        give(scheduler, [TrajectoryLost(id=TrajectoryId(0, 0, 1), reason="dead server", at_s=0)])


def test_events_that_cannot_be_are_refused() -> None:
    scheduler = UpdateScheduler(Config(), 0, 0, [2])
    give(scheduler, rewarded(0, 0, 1.0))
    with pytest.raises(IllegalMove, match="already ended"):
        give(scheduler, rewarded(0, 0, 1.0))
    with pytest.raises(IllegalMove, match="did not ask for"):
        give(scheduler, rewarded(7, 0, 1.0))
    with pytest.raises(IllegalMove, match="rewarded 0.5 after 1.0"):
        give(scheduler, rewarded(0, 0, 0.5)[-1:])
    with pytest.raises(IllegalMove, match="was not given"):
        scheduler.on_done(Done(item=99, cell=0, started_s=0, ended_s=0, stats=WorkStats()), 0.0)


def test_no_step_drops_what_was_folded() -> None:
    events = [e for i in range(2) for e in rewarded(0, i, float(i))]
    scheduler = drive(Config(), [2], events).scheduler
    scheduler.on_step(False)
    assert scheduler.ledger.counts.dropped_by_reason == {"no_step": 2} and scheduler.ledger.counts.balanced


def test_the_same_events_give_the_same_commands() -> None:
    events = [e for g in range(3) for i in range(3) for e in rewarded(g, i, float((g + i) % 2))]
    assert drive(Config(), [3] * 3, events, cells=2).commands == drive(Config(), [3] * 3, events, cells=2).commands


def test_lifecycle_reaches_applied_in_both_orders_and_in_no_other_way() -> None:
    for middle in ((State.REWARDED, State.DIFFERENTIATED), (State.DIFFERENTIATED, State.REWARDED)):
        path = START
        for to in (State.COMPLETE, *middle, State.FOLDED, State.APPLIED):
            path = move(path, to, "x")
        with pytest.raises(IllegalMove):
            move(path, State.DROPPED, "x")
    with pytest.raises(IllegalMove, match="never differentiated"):
        move((State.GENERATING, State.COMPLETE, State.REWARDED), State.FOLDED, "x")
    for state in State:
        legal = MOVES[state]
        assert state in (State.APPLIED, State.DROPPED) or State.DROPPED in legal


def test_trajectories_and_chains_move_by_the_same_table() -> None:
    for path in (
        (Phase.SAMPLING, Phase.COMPLETE, Phase.COMPARING, Phase.COMPLETE, Phase.SETTLED, Phase.LOST),
        (Inputs.OPEN, Inputs.CLOSED, Inputs.ABANDONED),
        (Work.IDLE, Work.IN_FLIGHT, Work.IDLE, Work.IN_FLIGHT, Work.DONE),
    ):
        for before, after in itertools.pairwise(path):
            assert moved(before, after, "x") is after
    for stage, to in (
        (Phase.LOST, Phase.COMPLETE),
        (Phase.SETTLED, Phase.COMPARING),
        (Phase.SAMPLING, Phase.SETTLED),
        (Inputs.ABANDONED, Inputs.CLOSED),
        (Work.DONE, Work.IN_FLIGHT),
        (Work.IDLE, Work.DONE),
    ):
        with pytest.raises(IllegalMove, match=f"x: {stage.value} -> {to.value}; legal from here"):
            moved(stage, to, "x")
    assert set(MOVES) == {*State, *Phase, *Inputs, *Work}


def test_a_contribution_is_registered_once_and_dropped_once() -> None:
    ledger, name = Ledger(), ContributionId(0, 0, 0)
    ledger.register(name)
    with pytest.raises(IllegalMove, match="twice"):
        ledger.register(name)
    ledger.drop(name, Drop.LOST)
    with pytest.raises(IllegalMove):
        ledger.drop(name, Drop.LOST)
    assert ledger.counts.balanced and ledger.settled


def test_packing_respects_both_limits_and_lets_a_long_row_run_alone() -> None:
    limits = PackLimits(tokens=10, rows=3)
    assert pack(4, [7, 3, 3, 1], limits, int) == [4, 3, 3]
    assert pack(1, [1, 1, 1], limits, int) == [1]  # equal objects are the first one itself
    assert pack(25, [1], limits, int) == [25]
