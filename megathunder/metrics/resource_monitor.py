"""Who holds how much memory, in which phase: samples of the run's processes, once a second, and their peaks.

    holder        processes
    learner       the ranks of this machine                                (host and GPU)
    coordinator   this process
    servers       children that run SGLang, and theirs                     (host and GPU)
    sandboxes     every other child, and theirs

    watch = MemoryWatch(); watch.start(); watch.enter("rollout"); ...; row = watch.add_memory(row); watch.close()

Peaks are of each holder alone: two holders' peaks may be seconds apart, and pages that processes share count in each.
Called by the monitor, in the coordinator's process. A sample takes some milliseconds in a thread of its own.
"""

from __future__ import annotations

import os
import threading
from collections import defaultdict

import msgspec
import psutil

from megathunder.metrics.row import MetricsRow
from megathunder.planning.memory import GpuUse, gpu_use

EVERY_S = 1.0
Holders = dict[int, str]  # process -> holder


class MemoryWatch:
    """Peaks since the last row, by phase and holder. `every_s` 0: sampled when a row asks alone."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        self._every_s, self._phase = every_s, "rollout"
        self._peaks: dict[str, dict[str, int]] = defaultdict(dict)
        self._ranks = learner_ranks()
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._gpus = gpu_use() is not None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample."""
        if self._every_s > 0:
            self._thread = threading.Thread(target=self._run, name="memory", daemon=True)
            self._thread.start()

    def enter(self, phase: str) -> None:
        """What the update is busy with from now on."""
        self._phase = phase

    def add_memory(self, row: MetricsRow) -> MetricsRow:
        """`row` with what was seen since the last one, and one sample more."""
        held, gpu = self.sample()
        with self._lock:
            peaks, self._peaks = {phase: dict(found) for phase, found in self._peaks.items()}, defaultdict(dict)
        return msgspec.structs.replace(
            row,
            host_memory_bytes=sum(size for holder, size in held.items() if not holder.startswith("gpu ")),
            memory_peaks=peaks,
            gpu_memory_bytes=gpu.memory_bytes if gpu else None,
            gpu_utilisation=gpu.utilisation if gpu else None,
        )

    def sample(self) -> tuple[dict[str, int], GpuUse | None]:
        """Bytes of every holder now, kept as peaks of the phase."""
        owners = holders(self._ranks)
        held: dict[str, int] = defaultdict(int)
        for process, holder in owners.items():
            try:
                held[holder] += psutil.Process(process).memory_info().rss
            except psutil.Error:  # ended since it was listed
                continue
        gpu = gpu_use() if self._gpus else None
        for process, size in (gpu.by_process if gpu else {}).items():
            held[f"gpu {owners.get(process, 'others')}"] += size
        with self._lock:
            peaks = self._peaks[self._phase]
            for holder, size in held.items():
                peaks[holder] = max(peaks.get(holder, 0), size)
        return held, gpu

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.sample()


def learner_ranks() -> frozenset[int]:
    """Rank 0, which is this process's parent, and the other ranks if torchrun started it."""
    rank_0 = psutil.Process(os.getppid())
    try:
        agent = rank_0.parent()
        words = agent.cmdline() if agent else []
        if any("torchrun" in word or "torch.distributed.run" in word for word in words):
            return frozenset(child.pid for child in agent.children())
    except psutil.Error:  # not ours to look at, or gone
        pass
    return frozenset([rank_0.pid])


def holders(ranks: frozenset[int]) -> Holders:
    """Every process of the run on this machine and whose it is."""
    here, found = psutil.Process(), {rank: "learner" for rank in ranks}
    found[here.pid] = "coordinator"
    for child in here.children():
        try:
            served = any("sglang" in word for word in child.cmdline())
            family = [child, *child.children(recursive=True)] if served else [child]
        except psutil.Error:  # ended since it was listed
            continue
        found.update((member.pid, "servers" if served else "sandboxes") for member in family)
    found.update((p.pid, "sandboxes") for p in here.children(recursive=True) if p.pid not in found)
    return found
