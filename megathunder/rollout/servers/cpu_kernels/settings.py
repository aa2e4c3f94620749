"""How a server is told which kernels to compute with; `rollout.cpu_kernels` has the choices."""

from __future__ import annotations

PLUGIN, VARIABLE = "megathunder_cpu_kernels", "MEGATHUNDER_CPU_KERNELS"
CHOICES = ("auto", "torch", "off")
