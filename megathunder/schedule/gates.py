"""Admission: how many groups with unknown weights a cell holds accumulators for, and how many trajectories that have an
accumulator each. A group is bound to the cell that first works for it while its weights are unknown, so that only that
cell holds its accumulators. Part of `UpdateState`.
"""

from __future__ import annotations

from megathunder.schedule.state import Group


class Gates:
    """Open groups and per-trajectory accumulators of each cell; `max_trajectories` None: no limit of their own."""

    def __init__(self, *, cells: int, max_open_groups: int, max_trajectories: int | None) -> None:
        self._open: list[dict[int, Group]] = [{} for _ in range(cells)]
        self._trajectories = [0] * cells
        self._max_open_groups, self._max_trajectories = max_open_groups, max_trajectories
        self.peak_open = 0

    def open_groups(self, cell: int) -> list[Group]:
        """Groups that hold accumulators on `cell`, oldest first."""
        return list(self._open[cell].values())

    def is_open(self, group: Group) -> bool:
        return group.cell is not None and group.index in self._open[group.cell]

    def has_room(self, cell: int) -> bool:
        return len(self._open[cell]) < self._max_open_groups

    def open(self, cell: int, group: Group) -> None:
        group.cell = cell
        self._open[cell][group.index] = group
        self.peak_open = max(self.peak_open, len(self._open[cell]))

    def close(self, group: Group) -> None:
        assert group.cell is not None
        self._open[group.cell].pop(group.index, None)

    @property
    def none_open(self) -> bool:
        return not any(self._open)

    def has_trajectory_room(self, cell: int) -> bool:
        return self._max_trajectories is None or self._trajectories[cell] < self._max_trajectories

    def add_trajectory(self, cell: int) -> None:
        self._trajectories[cell] += 1

    def free_trajectories(self, cell: int, count: int) -> None:
        self._trajectories[cell] -= count
