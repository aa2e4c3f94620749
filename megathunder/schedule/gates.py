"""Admission: how many groups with unknown coefficients a cell holds accumulators for, and how many trajectories
without a reward. A group is bound to the cell that first works for it while its coefficients are unknown, so that
only that cell holds its accumulators. Called by the dispatcher.
"""

from __future__ import annotations

from megathunder.schedule.state import Group


class Gates:
    """Open groups and own accumulators of each cell."""

    def __init__(self, *, cells: int, max_open_groups: int, max_own: int) -> None:
        self._open: list[dict[int, Group]] = [{} for _ in range(cells)]
        self._own = [0] * cells
        self._max_open_groups, self._max_own = max_open_groups, max_own
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

    def has_own_room(self, cell: int) -> bool:
        return self._own[cell] < self._max_own

    def take_own(self, cell: int) -> None:
        self._own[cell] += 1

    def free_own(self, cell: int, count: int) -> None:
        self._own[cell] -= count
