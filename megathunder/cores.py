"""Cores of one machine follow the work: processes that compute tell each other so, and share the cores there are.

    servers that compute     one core each
    learner ranks that do    the other cores: at least one each, the rest in proportion to the core-seconds used so far

The board is a small file in shared memory, one slot per process: learner ranks mark a command, CPU servers a
step. A process that has died is not counted. No locks: a share that is a step old costs a moment, not a result.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "MEGATHUNDER_CORE_BOARD"
SLOTS = 64
_SLOT = struct.Struct("=IHHd")  # process id, role, busy, core-seconds


class Role(enum.IntEnum):
    LEARNER = 1
    SERVER = 2


def board_path(run_folder: Path) -> Path:
    """Where the processes of a run meet; the same for every process of this user on this machine."""
    memory = Path("/dev/shm")
    key = hashlib.sha256(str(run_folder.resolve()).encode()).hexdigest()[:16]
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"megathunder-{os.getuid()}-{key}"


def share_out(cores: int, weights: Sequence[float]) -> list[int]:
    """Threads of each busy process: at least one, the rest in proportion to `weights` (equally where all are 0).

    share_out(8, [1.0, 3.0]) == [2, 6]; share_out(2, [1.0, 9.0]) == [1, 1]; share_out(4, [0.0]) == [4]
    """
    spare = cores - len(weights)
    if spare <= 0:
        return [1] * len(weights)
    total = sum(weights)
    parts = [w / total if total else 1 / len(weights) for w in weights]
    shares = [max(1, int(cores * part)) for part in parts]
    while sum(shares) > cores:  # those of least work have been given a whole core
        shares[shares.index(max(shares))] -= 1
    wanting = sorted(range(len(weights)), key=lambda i: shares[i] - cores * parts[i])
    for i in wanting[: cores - sum(shares)]:
        shares[i] += 1
    return shares


class CoreBoard:
    """One process's slot. `begin` says that it computes, and on how many threads; `end` that it waits."""

    def __init__(self, path: Path, role: Role) -> None:
        self._role = role
        self._cores = len(os.sched_getaffinity(0))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.ftruncate(descriptor, SLOTS * _SLOT.size)
            self._memory = mmap.mmap(descriptor, SLOTS * _SLOT.size)
            self._slot = self._claim()
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # the mapping keeps the file open
            os.close(descriptor)
        self._since_s = 0.0
        self._threads = 0  # while busy
        self._used = 0.0

    def _claim(self) -> int | None:
        """The first slot whose process is gone; None where all are taken: this process then stays on one thread."""
        for slot in range(SLOTS):
            pid = _SLOT.unpack_from(self._memory, slot * _SLOT.size)[0]
            if not pid or not _lives(pid):
                _SLOT.pack_into(self._memory, slot * _SLOT.size, os.getpid(), self._role, 0, 0.0)
                return slot
        return None

    def begin(self) -> int:
        """Threads to compute on now; may be called again, before every step."""
        if self._slot is None:
            return 1
        self._account()
        self._write(busy=True)
        self._threads = self._shares(self._busy()).get(self._slot, 1)
        return self._threads

    def end(self) -> None:
        """Nothing to compute until the next `begin`."""
        if self._slot is not None and self._threads:
            self._account()
            self._threads = 0
            self._write(busy=False)

    def describe(self) -> str:
        """The balance so far, and the shares it gives."""
        found = [(i, role, used) for i, role, used in self._members() if role]
        total, shares = sum(used for _, _, used in found) or 1.0, self._shares(found)
        parts = []
        for role in Role:
            mine = [(i, used) for i, number, used in found if number == role]
            threads = "+".join(str(shares[i]) for i, _ in mine) or "0"
            work = sum(used for _, used in mine) / total
            parts.append(f"{role.name.lower()}s {threads} ({work:.0%} of the work so far)")
        return (
            f"{self._cores} cores while all compute: {', '.join(parts)}; a learner that computes alone has every core"
        )

    def _shares(self, members: list[tuple[int, int, float]]) -> dict[int, int]:
        """Threads by slot of `members` (slot, role, core-seconds)."""
        learners = [(i, used) for i, role, used in members if role == Role.LEARNER]
        shares = {i: 1 for i, role, _ in members if role == Role.SERVER}
        counts = share_out(self._cores - len(shares), [used for _, used in learners]) if learners else []
        return shares | {i: count for (i, _), count in zip(learners, counts, strict=True)}

    def _account(self) -> None:
        now = time.monotonic()
        self._used += self._threads * (now - self._since_s)
        self._since_s = now

    def _write(self, *, busy: bool) -> None:
        _SLOT.pack_into(self._memory, self._slot * _SLOT.size, os.getpid(), self._role, busy, self._used)

    def _busy(self) -> list[tuple[int, int, float]]:
        """(slot, role, core-seconds) of the processes that compute, this one included."""
        busy = {i for i, (_, _, flag, _) in enumerate(_SLOT.iter_unpack(self._memory)) if flag}
        return [member for member in self._members() if member[0] in busy]

    def _members(self) -> list[tuple[int, int, float]]:
        """(slot, role, core-seconds) of the processes that live."""
        slots = enumerate(_SLOT.iter_unpack(self._memory))
        return [(i, role, used) for i, (pid, role, _, used) in slots if pid and (i == self._slot or _lives(pid))]


def open_board(path: str, role: Role) -> CoreBoard | None:
    """The board at `path`; None for no path, or where it cannot be used: then every process keeps its threads."""
    if not path:
        return None
    try:
        return CoreBoard(Path(path), role)
    except OSError:
        return None


def remove_board(path: Path) -> None:
    """The run has ended; processes that still have it open go on with it."""
    with contextlib.suppress(OSError):
        path.unlink()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
