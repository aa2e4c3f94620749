"""GPUs by name, for plans, predictions and utilisation: the one table of their figures.

    gpu_named("H100") -> Gpu      gpu_of_device("NVIDIA H100 80GB HBM3") -> Gpu or None

Peaks are dense bfloat16 without sparsity and bandwidths are the vendor's, from the data sheets; memory is what the
driver reports as the total, rounded down (the 80 GB models of A100 and H100).
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from megathunder.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`flops`: dense bfloat16 operations a second; `bandwidth_bytes_s`: of its memory."""

    name: str
    flops: float
    bandwidth_bytes_s: float
    memory_gib: float

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30


_TABLE = (
    ("A100", 312e12, 2.0e12, 79.0),
    ("A800", 312e12, 2.0e12, 79.0),
    ("H100", 989e12, 3.35e12, 79.0),
    ("H200", 989e12, 4.8e12, 139.0),
    ("H800", 989e12, 3.35e12, 79.0),
    ("H20", 148e12, 4.0e12, 95.0),
    ("B200", 2250e12, 8.0e12, 178.0),
    ("B300", 2250e12, 8.0e12, 267.0),
    ("L40S", 362e12, 0.864e12, 44.0),
    ("L40", 181e12, 0.864e12, 44.0),
    ("L4", 121e12, 0.3e12, 22.0),
)
GPUS = {
    name: Gpu(name=name, flops=flops, bandwidth_bytes_s=bandwidth, memory_gib=memory)
    for name, flops, bandwidth, memory in _TABLE
}


def gpu_named(name: str) -> Gpu:
    """The GPU called `name`, in any case. Raises ConfigError that lists the known ones."""
    if found := GPUS.get(name.upper()):
        return found
    near = difflib.get_close_matches(name.upper(), list(GPUS), 1, 0.4)
    raise ConfigError(
        f"GPU {name!r}",
        expected=f"one of {', '.join(GPUS)}",
        remedy=f"did you mean {near[0]}?" if near else "choose the nearest one",
    )


def gpu_of_device(device_name: str) -> Gpu | None:
    """The GPU that a driver calls `device_name`; None where it is not in the table."""
    words = device_name.upper().replace("NVIDIA", "").replace("-", " ").split()
    found = [name for name in GPUS if name in words]
    return GPUS[max(found, key=len)] if found else None
