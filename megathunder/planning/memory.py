"""What the host lets this process have, and the GPUs' own account of their memory and use.

`gpu_use()` is None where there is no NVIDIA driver or nvidia-ml-py is not installed. Called by `watch.py` and for the
plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Of all GPUs of this host: the fullest one's bytes, and the mean share of time in which kernels ran."""

    memory_bytes: int
    limit_bytes: int
    utilisation: float
    by_process: dict[int, int] = field(default_factory=dict)
    """Bytes of each process that computes on any of them; empty where the driver does not say."""


def host_limit_bytes(process: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory this process may take: the machine's, or the least of what its control groups (a container, a batch
    system) allow. `process` and `groups` are files of the kernel, others in tests."""
    return min([psutil.virtual_memory().total, *_group_limits(process, groups)])


def _group_limits(process: Path, groups: Path) -> Iterator[int]:
    """Limits of the process's group and of every group around it, version 2 (`0::/a/b`) and 1 (`5:memory:/a/b`)."""
    if not process.exists():
        return
    for line in process.read_text().splitlines():
        number, controllers, place = line.split(":", 2)
        if number != "0" and "memory" not in controllers.split(","):
            continue
        root, name = (groups, "memory.max") if number == "0" else (groups / "memory", "memory.limit_in_bytes")
        here = root / place.lstrip("/")
        for folder in (here, *here.parents):
            file = folder / name
            if folder.is_relative_to(root) and file.is_file() and (text := file.read_text().strip()).isdigit():
                yield int(text)


def gpu_use(nvml: ModuleType | None = None) -> GpuUse | None:
    """What the driver says of this host's GPUs; `nvml` replaces the library in tests."""
    if nvml is None:
        if find_spec("pynvml") is None:
            return None
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or none that answers
        return None
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        memory = [nvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        by_process = _by_process(nvml, handles)
        busy = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
    finally:
        nvml.nvmlShutdown()
    if not handles:
        return None
    fullest = max(memory, key=lambda info: info.used)
    return GpuUse(
        memory_bytes=fullest.used,
        limit_bytes=fullest.total,
        utilisation=sum(busy) / len(busy),
        by_process=by_process,
    )


def _by_process(nvml: ModuleType, handles: list[object]) -> dict[int, int]:
    total: dict[int, int] = {}
    for handle in handles:
        try:
            running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        except nvml.NVMLError:  # not allowed to see other processes
            return {}
        for process in running:
            total[process.pid] = total.get(process.pid, 0) + (process.usedGpuMemory or 0)
    return total
