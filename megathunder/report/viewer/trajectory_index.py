"""All trajectories of a run in short, and any one of them in full.

    index = TrajectoryIndex(folder); index.refresh()     reads what is new; a run may still be going on
    index.table()      one list per column, for the list of the page
    index.find(words)  which trajectories hold the words
    index.record(n)    the n-th in full

Reading the list skips tokens and log-probabilities, so that thousands of trajectories take well under a second. Files
are read again where they have changed. Called by `server.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import msgspec

from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.trajectories import TrajectoryRecord
from megathunder.types import TrajectoryId

LOST = "lost"


class _Segment(msgspec.Struct):
    role: str
    token_ids: msgspec.Raw


class _Row(msgspec.Struct):
    segments: list[_Segment]


class _Trajectory(msgspec.Struct):
    task_id: str
    rows: list[_Row]
    end_reason: str
    started_s: float
    completed_s: float
    turns: int


class _Short(msgspec.Struct):
    id: TrajectoryId
    trajectory: _Trajectory | None = None
    reward: float | None = None
    lost: str = ""


@dataclass(slots=True)
class _File:
    stamp: tuple[int, int]  # time of change, size
    places: list[tuple[int, int]] = field(default_factory=list)  # byte offset and length of each line
    short: list[_Short] = field(default_factory=list)


class TrajectoryIndex:
    """See the module docstring. Trajectories are numbered in the order of updates, groups and indices."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}
        self._order: list[tuple[Path, int]] = []
        self._decoder = msgspec.json.Decoder(_Short)

    def refresh(self) -> None:
        """Read files that are new or have changed."""
        found = {}
        for path in sorted(self._folder.trajectories.glob("update_*.jsonl")):
            stat = path.stat()
            stamp, known = (stat.st_mtime_ns, stat.st_size), self._files.get(path)
            found[path] = known if known and known.stamp == stamp else self._read(path, stamp)
        self._files = found
        self._order = [(path, number) for path, file in found.items() for number in range(len(file.short))]

    def __len__(self) -> int:
        return len(self._order)

    def table(self) -> dict[str, list[object]]:
        """Columns, one entry per trajectory."""
        rows = [self._files[path].short[number] for path, number in self._order]
        means = _group_means(rows)
        return {
            "update": [row.id.update for row in rows],
            "group": [row.id.group for row in rows],
            "index": [row.id.index for row in rows],
            "task": [row.trajectory.task_id if row.trajectory else "" for row in rows],
            "reward": [row.reward for row in rows],
            "advantage": [
                None if row.reward is None else row.reward - means[row.id.update, row.id.group] for row in rows
            ],
            "end": [row.trajectory.end_reason if row.trajectory and not row.lost else LOST for row in rows],
            "turns": [row.trajectory.turns if row.trajectory else 0 for row in rows],
            "tokens": [_sampled_tokens(row) for row in rows],
            "seconds": [
                row.trajectory.completed_s - row.trajectory.started_s if row.trajectory else 0.0 for row in rows
            ],
        }

    def find(self, words: str) -> list[int]:
        """Numbers of the trajectories whose text, task or reason of a loss holds `words`, in any case."""
        wanted = msgspec.json.encode(words)[1:-1].lower()  # as it stands in the file
        return [number for number, (_, line) in enumerate(self._lines()) if wanted in line.lower()]

    def record(self, number: int) -> TrajectoryRecord:
        """One trajectory in full. Raises IndexError where there is none."""
        path, line = self._order[number]
        offset, length = self._files[path].places[line]
        with path.open("rb") as file:
            file.seek(offset)
            return msgspec.json.decode(file.read(length), type=TrajectoryRecord)

    def group_rewards(self, record: TrajectoryRecord) -> list[float]:
        """Rewards of the trajectories in the group of `record`."""
        path = self._folder.trajectories_of(record.id.update)
        same = [row for row in self._files[path].short if row.id.group == record.id.group]
        return [row.reward for row in same if row.reward is not None]

    def _read(self, path: Path, stamp: tuple[int, int]) -> _File:
        file, offset = _File(stamp), 0
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                file.places.append((offset, len(line)))
                file.short.append(self._decoder.decode(line))
            offset += len(line)
        return file

    def _lines(self) -> Iterator[tuple[Path, bytes]]:
        for path in self._files:
            for line in path.read_bytes().splitlines(keepends=True)[: len(self._files[path].short)]:
                yield path, line


def _group_means(rows: list[_Short]) -> dict[tuple[int, int], float]:
    groups: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if row.reward is not None:
            groups.setdefault((row.id.update, row.id.group), []).append(row.reward)
    return {key: fmean(rewards) for key, rewards in groups.items()}


def _sampled_tokens(row: _Short) -> int:
    if row.trajectory is None:
        return 0
    actions = (part for one in row.trajectory.rows for part in one.segments if part.role == "action")
    return sum(bytes(part.token_ids).count(b",") + (len(bytes(part.token_ids)) > 2) for part in actions)
