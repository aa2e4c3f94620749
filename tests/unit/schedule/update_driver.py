"""Drives an `UpdateScheduler` through events and fake cells, in any interleaving that a seed chooses."""

from __future__ import annotations

import random
from dataclasses import dataclass

from fake_learner import FakeCell, divergence, row_gradient

from megathunder.accumulator_keys import BATCH
from megathunder.config.root import Config
from megathunder.objectives.base import Objective
from megathunder.schedule.scheduler import UpdateScheduler
from megathunder.schedule.step_planner import next_step, queue_of
from megathunder.types import (
    Differentiate,
    Done,
    EndReason,
    Event,
    Fold,
    Rewarded,
    Role,
    Row,
    Score,
    Segment,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
    WorkStats,
)


@dataclass
class Outcome:
    scheduler: UpdateScheduler
    cells: list[FakeCell]
    commands: list[Differentiate | Fold | Score]

    @property
    def gradient(self) -> float:
        return sum(c.accumulators[BATCH] for c in self.cells)

    @property
    def differentiations(self) -> list[Differentiate]:
        return [c for c in self.commands if isinstance(c, Differentiate)]


def computed(command: Differentiate | Fold | Score) -> int:
    """Tokens that a learner says it computed: the last one of a row predicts nothing."""
    if not isinstance(command, Differentiate):
        return 0
    return sum(max(len(row.token_ids) - row.context_tokens - 1, 0) for row in command.rows)


def loss(command: Differentiate | Fold | Score, release: str) -> float:
    """Loss that a learner says its rows have: here the number that their gradient is, so that sums must agree."""
    if not isinstance(command, Differentiate) or not (command.last or release == "turn"):
        return 0.0
    return sum(row_gradient(row) for row in command.rows)


def check_queues(scheduler: UpdateScheduler) -> None:
    """What may run is where the state says that it may run: no change of the state forgot a chain."""
    state = scheduler._state
    for chain in (chain for group in state.groups for chain in group.chains):
        step = next_step(state, chain)
        assert chain.queue == (None if step is None else queue_of(state, chain, step)), str(chain)


def drive(
    config: Config,
    sizes: list[int],
    events: list[Event],
    *,
    cells: int = 1,
    seed: int = 0,
    version: int = 0,
    exact: bool = False,
    objective: Objective | None = None,
) -> Outcome:
    """Deliver `events` in order; between them, cells take and finish work at random, up to two commands ahead."""
    rng = random.Random(seed)
    scheduler = UpdateScheduler(config, 0, version, sizes, cells, objective)
    outcome = Outcome(scheduler, [FakeCell(config.streaming.release, exact=exact) for _ in range(cells)], [])
    busy: dict[int, list[Differentiate | Fold | Score]] = {}
    queue, now = list(events), 0.0
    while not scheduler.finished:
        check_queues(scheduler)
        now += 1.0
        for cell in range(cells):
            in_hand = len(busy.get(cell, ()))
            ask = (scheduler.next_work, scheduler.next_ahead)[in_hand] if in_hand < 2 else None
            if ask and (command := ask(cell, now)):
                busy.setdefault(cell, []).append(command)
                outcome.commands.append(command)
        if busy and (not queue or rng.random() < 0.5):
            cell = rng.choice(sorted(busy))
            command = busy[cell].pop(0)
            busy = {c: commands for c, commands in busy.items() if commands}
            found = tuple(map(divergence, command.rows)) if isinstance(command, Score) else ()
            if not found:
                outcome.cells[cell].execute(command)
            told = loss(command, config.streaming.release)
            stats = WorkStats(tokens=computed(command), loss_sum=told, divergences=found)
            scheduler.on_done(Done(item=command.item, cell=cell, started_s=0, ended_s=0, stats=stats), now)
        elif queue:
            scheduler.on_event(queue.pop(0), now)
        else:
            raise AssertionError(f"starvation: {scheduler.ledger.counts}")
        assert now < 1e5
    # Only what verifiers say of groups that were dropped as a whole may come too late to matter.
    late = all(isinstance(e, (Rewarded, TrajectoryLost)) for e in queue)
    assert late and not busy, "finished while work is outstanding"
    return outcome


def make_trajectory(
    group: int, index: int, turns_per_row: list[int], *, salt: int = 0, versions: int = 0, action: int = 2
) -> Trajectory:
    """Unique token ids everywhere; prompt of 2, actions of `action`, observations of 1."""
    token = (salt * 100 + group * 20 + index) * 1000 + 1
    rows = []
    for turns in turns_per_row:
        segments = []
        for turn in range(turns):
            for role, length in ((Role.OBSERVATION if turn else Role.PROMPT, 1 if turn else 2), (Role.ACTION, action)):
                ids = tuple(range(token, token + length))
                token += length
                sampled = role is Role.ACTION
                segments.append(
                    Segment(
                        role=role,
                        token_ids=ids,
                        logprobs=tuple(-0.1 * (t % 7) for t in ids) if sampled else (),
                        policy_versions=(versions,) * (length * sampled),
                    )
                )
        rows.append(Row(segments=tuple(segments)))
    return Trajectory(
        id=TrajectoryId(0, group, index),
        task_id="t",
        rows=tuple(rows),
        end_reason=EndReason.ANSWERED,
        started_s=0,
        completed_s=0,
        turns=sum(turns_per_row),
    )


def turn_events(trajectory: Trajectory) -> list[TurnCompleted]:
    events, turn = [], 0
    for number, row in enumerate(trajectory.rows):
        pending: list[Segment] = []
        for segment in row.segments:
            pending.append(segment)
            if segment.role is Role.ACTION:
                events.append(TurnCompleted(id=trajectory.id, turn=turn, row=number, segments=tuple(pending), at_s=0))
                pending, turn = [], turn + 1
    return events


def teacher(token: int) -> float:
    return -0.05 * (token % 11)


def score_events(trajectory: Trajectory) -> list[TurnScored]:
    return [
        TurnScored(id=e.id, turn=e.turn, teacher_logprobs=tuple(map(teacher, e.segments[-1].token_ids)), at_s=0)
        for e in turn_events(trajectory)
    ]


def grpo_events(trajectory: Trajectory, reward: float | None, *, lost_late: bool = False) -> list[Event]:
    """Events of one trajectory in causal order; reward None: it is lost after its first turn, or to its verifier."""
    turns = turn_events(trajectory)
    completed = TrajectoryCompleted(trajectory=trajectory, at_s=0)
    if reward is None:
        done = [*turns, completed] if lost_late else turns[:1]
        return [*done, TrajectoryLost(id=trajectory.id, reason="server", at_s=0)]
    return [*turns, completed, Rewarded(id=trajectory.id, reward=reward, verifier_s=0, at_s=0)]


def interleave(streams: list[list[Event]], rng: random.Random) -> list[Event]:
    """A random merge that keeps the order inside each stream."""
    streams = [list(s) for s in streams if s]
    merged = []
    while streams:
        stream = rng.choice(streams)
        merged.append(stream.pop(0))
        streams = [s for s in streams if s]
    return merged
