"""Attempts as they end, kept in a file so that an interrupted evaluation goes on where it was.

    attempts.jsonl     line 1: the Plan (what is evaluated, how)      then one Attempt a line, in the order they ended

An attempt is known by (task, number): finished ones are not run again, lost ones are. A file of another plan is
refused, because its attempts would answer another question. A last line that was cut off is dropped.
Called by tools/evaluate.py.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megathunder.errors import UserError
from megathunder.jsonl import append_line, decoded_lines
from megathunder.types import Trajectory

LIMITS = ("max_new_tokens", "max_tokens", "observation_characters", "top_p", "agent", "agent_command")
"""Settings of [rollout] that an outcome depends on."""
RIGHT_FROM = 1.0 - 1e-9  # rewards of weighted tests add up to 1 within rounding


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What makes two evaluations comparable. `checkpoint` and `tasks` are digests of content, not names of files."""

    checkpoint: str
    tasks: str
    seed: int
    temperature: float
    limits: str


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Attempt `number` (from 0) at a task. `reward` is None when the machinery lost it: then `error` says why."""

    task_id: str
    kind: str
    number: int
    reward: float | None
    end_reason: str = ""
    turns: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0
    error: str = ""
    trajectory: Trajectory | None = None  # every token and log-probability; in the file alone

    @property
    def right(self) -> bool:
        return self.reward is not None and self.reward >= RIGHT_FROM

    @staticmethod
    def of(trajectory: Trajectory, kind: str) -> Attempt:
        """The attempt that a graded trajectory was."""
        return Attempt(
            task_id=trajectory.task_id,
            kind=kind,
            number=trajectory.id.index,
            reward=trajectory.reward,
            end_reason=trajectory.end_reason.value,
            turns=trajectory.turns,
            sampled_tokens=trajectory.sampled_tokens,
            seconds=trajectory.completed_s - trajectory.started_s,
            trajectory=trajectory,
        )


def read_attempts(path: Path) -> list[Attempt]:
    """The attempts of one evaluation of a run, with their tokens: `score` of them is the figure it wrote."""
    return [attempt for _, attempt in decoded_lines(path, msgspec.json.Decoder(Attempt))]


class AttemptLog:
    """The file. `attempts` has one entry a (task, number): the one with a reward where there is one."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self._path = path
        self._known: dict[tuple[str, int], Attempt] = {}
        lines = [line for line, _ in decoded_lines(path, msgspec.json.Decoder(msgspec.Raw))]
        if lines and msgspec.json.decode(lines[0], type=Plan) != plan:
            raise UserError(
                f"{path} holds attempts of another evaluation: {lines[0].decode().rstrip()}",
                expected=f"the same checkpoint, tasks and settings: {msgspec.json.encode(plan).decode()}",
                remedy="name another --json file, or delete this one",
            )
        for line in lines[1:]:
            self._keep(msgspec.json.decode(line, type=Attempt))
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            append_line(path, plan)

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple(self._known.values())

    def finished(self, task_id: str, number: int) -> bool:
        """Whether the attempt has a reward."""
        known = self._known.get((task_id, number))
        return known is not None and known.reward is not None

    def add(self, attempt: Attempt) -> None:
        """Keep an attempt that ended."""
        self._keep(attempt)
        append_line(self._path, attempt)

    def _keep(self, attempt: Attempt) -> None:
        if not self.finished(attempt.task_id, attempt.number):
            self._known[attempt.task_id, attempt.number] = msgspec.structs.replace(attempt, trajectory=None)
