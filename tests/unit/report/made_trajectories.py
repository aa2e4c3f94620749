"""Trajectory files of a run that was never run, drawn from a seed, in the words of the shipped policy's tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from megathunder.jsonl import encode_lines
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.trajectories import TrajectoryRecord, Turn
from megathunder.types import EndReason, Role, Row, Segment, Trajectory, TrajectoryId

STUDENT = Path(__file__).resolve().parents[3] / "examples" / "policies" / "student"


def write_trajectories(
    folder: RunFolder, *, updates: int = 2, groups: int = 3, size: int = 4, teacher: bool = False
) -> int:
    """Files of `updates` updates; how many trajectories they hold. One of each update was lost."""
    tokenizer = Tokenizer.from_file(str(STUDENT / "tokenizer.json"))
    prompt, answer, output = (tuple(tokenizer.encode(words).ids) for words in ("read the file", "cat a.txt", "seven"))
    folder.trajectories.mkdir(exist_ok=True)
    for update in range(updates):
        noise = random.Random(update)
        records = []
        for group in range(groups):
            for index in range(size):
                key = TrajectoryId(update, group, index)
                if (group, index) == (groups - 1, size - 1):
                    records.append(TrajectoryRecord(id=key, lost="the server answered 500"))
                    continue
                records.append(_record(key, float(index % 2), (prompt, answer, output), noise, teacher, tokenizer))
        folder.trajectories_of(update).write_bytes(encode_lines(records))
    return updates * groups * size


def _record(
    key: TrajectoryId,
    reward: float,
    words: tuple[tuple[int, ...], ...],
    noise: random.Random,
    teacher: bool,
    tokenizer: Tokenizer,
) -> TrajectoryRecord:
    prompt, answer, output = words
    logprobs = tuple(-noise.random() for _ in answer)
    action = Segment(role=Role.ACTION, token_ids=answer, logprobs=logprobs, policy_versions=(key.update,) * len(answer))
    row = Row(
        segments=(
            Segment(role=Role.PROMPT, token_ids=prompt),
            action,
            Segment(role=Role.OBSERVATION, token_ids=output),
            action,
        )
    )
    trajectory = Trajectory(
        id=key,
        task_id=f"task-{key.group}",
        rows=(row,),
        end_reason=EndReason.ANSWERED,
        started_s=10.0,
        completed_s=11.5,
        turns=2,
        tool_s=0.25,
        reward=reward,
    )
    scores = tuple(p - 0.5 for p in logprobs) if teacher else ()
    return TrajectoryRecord(
        id=key,
        trajectory=trajectory,
        text=(tokenizer.decode(row.token_ids, skip_special_tokens=False),),
        turns=tuple(Turn(turn=n, completed_s=10.5 + n / 2, teacher_logprobs=scores) for n in range(2)),
        reward=reward,
        reward_parts={"format": 1.0, "answer": reward},
        rewarded_s=12.0,
        verifier_s=0.5,
    )
