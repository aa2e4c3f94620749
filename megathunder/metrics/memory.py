"""Memory of a run: resident bytes of its processes on this host, what the host has, and the GPUs' own account.

`gpu_use()` is None where there is no NVIDIA driver or nvidia-ml-py is not installed. Called once an update.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Of all GPUs of this host: the fullest one's bytes, and the mean share of time in which kernels ran."""

    memory_bytes: int
    limit_bytes: int
    utilisation: float


def host_memory_bytes(process_id: int | None = None) -> int:
    """Resident bytes of a process and all its descendants (servers, sandboxes); shared pages count in each."""
    root = psutil.Process(process_id)
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # ended since it was listed
            continue
    return total


def host_limit_bytes() -> int:
    """Memory this machine has."""
    return psutil.virtual_memory().total


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
        busy = [nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100 for handle in handles]
    finally:
        nvml.nvmlShutdown()
    if not handles:
        return None
    fullest = max(memory, key=lambda info: info.used)
    return GpuUse(memory_bytes=fullest.used, limit_bytes=fullest.total, utilisation=sum(busy) / len(busy))
