"""Lengths of trajectories by group, from a recorded run or from a file of such: {name: [[length, ...], ...]}.

Called by tools/simulate.py. Refuses (UserError) a run that recorded no trajectories.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path

from megathunder.config.sagc import LengthName
from megathunder.errors import UserError
from megathunder.metrics.run_folder import RunFolder
from megathunder.metrics.trajectories import read_trajectories
from megathunder.rollout.group_size.straggler import length_of

Groups = list[list[float]]


def recorded_lengths(folder: RunFolder) -> dict[str, Groups]:
    """ "NAME, tokens" and so on -> the lengths of every group of the run, in order."""
    found: dict[str, Groups] = {}
    for file in sorted(folder.trajectories.glob("update_*.jsonl")):
        groups: dict[int, list] = {}
        for record in read_trajectories(file):
            if record.trajectory is not None:
                groups.setdefault(record.id.group, []).append(record.trajectory)
        for measure in typing.get_args(LengthName):
            lengths = [[round(length_of(t, measure), 3) for t in groups[index]] for index in sorted(groups)]
            found.setdefault(f"{folder.path.name}, {measure}", []).extend(lengths)
    if not found:
        raise UserError(
            f"{folder.trajectories} holds nothing",
            expected="trajectories/update_*.jsonl of a run that has taken updates",
            remedy="run with metrics.trajectories = true, or name another folder",
        )
    return found


def read_lengths(file: Path) -> dict[str, Groups]:
    """What `write_lengths` wrote."""
    return json.loads(file.read_text())


def write_lengths(found: dict[str, Groups], file: Path) -> None:
    """One line a group would be long; one a stream it is."""
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(groups)}" for name, groups in found.items())
    file.write_text("{\n" + lines + "\n}\n")
