"""The kernels in C: compiled by this machine's `cc` at first use, kept by source, compiler flags and CPU.

A home folder shared by unlike machines therefore holds one library for each kind. Called by `plugin.py`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from megathunder.rollout.servers.cpu_kernels.interface import Heads, Step

SOURCE = Path(__file__).with_name("kernels.c")
REORDER = ("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno", "-freciprocal-math")
"""What vectorised sums need. Not -ffast-math: a library linked with it makes the whole process flush denormals to 0."""
FLAGS = ("-O3", "-march=native", *REORDER, "-fopenmp", "-shared", "-fPIC")
COMPILE_LIMIT_S = 120.0

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_DECODE = (POINTER, LONG, POINTER, POINTER, POINTER, POINTER, LONG, POINTER, POINTER)
_SHAPE = (LONG, INT, INT, INT, FLOAT, INT)
SIGNATURES = {
    "attention_decode": (INT, (*_DECODE, *_SHAPE)),
    "attention_extend": (INT, (*_DECODE, POINTER, *_SHAPE)),
    "rms_norm": (None, (POINTER, LONG, POINTER, POINTER, POINTER, LONG, INT, FLOAT, INT)),
    "prepare_heads": (
        None,
        (POINTER, LONG, LONG, INT, INT, INT, POINTER, POINTER, FLOAT, POINTER, POINTER, INT)
        + (POINTER, POINTER, POINTER, INT),
    ),
    "silu_mul": (None, (POINTER, POINTER, LONG, LONG, INT)),
}


def compile_kernels(folder: Path | None = None) -> CompiledKernels | str:
    """The kernels, or in words why there are none. `folder`: where libraries are kept."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        return "no C compiler (cc) on the path"
    flags = (*FLAGS, "-mprefer-vector-width=512") if "avx512f" in _cpu() else FLAGS
    key = hashlib.sha256("\n".join([SOURCE.read_text(), compiler, *flags, _cpu()]).encode()).hexdigest()[:20]
    library = (folder or _cache_folder()) / f"kernels-{key}.so"
    try:
        if not library.exists():
            _compile(compiler, flags, library)
        return CompiledKernels(ctypes.CDLL(str(library)))
    except subprocess.SubprocessError as error:
        return f"{compiler} failed: {(getattr(error, 'stderr', None) or str(error)).strip()[-300:]}"
    except OSError as error:
        return f"{library} cannot be used: {error}"


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megathunder" / "cpu_kernels"


def _cpu() -> str:
    """Model and instruction sets of this machine's first core."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / library.name
        command = [compiler, *flags, "-o", str(built), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
        os.replace(built, library)  # another server may have been first: the same library


class CompiledKernels:
    """`interface.Kernels` by the library; as many threads as torch has."""

    name = "compiled"

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
        rows, width = x.shape
        y = torch.empty(rows, width)
        kept = None if residual is None else residual.data_ptr()
        self._library.rms_norm(
            x.data_ptr(), x.stride(0), kept, weight.data_ptr(), y.data_ptr(), rows, width, eps, torch.get_num_threads()
        )
        return y

    def prepare_heads(self, qkv: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> None:
        self._library.prepare_heads(
            qkv.data_ptr(),
            qkv.stride(0),
            qkv.shape[0],
            heads.heads,
            heads.kv_heads,
            heads.size,
            None if heads.query_norm is None else heads.query_norm.data_ptr(),
            None if heads.key_norm is None else heads.key_norm.data_ptr(),
            heads.eps,
            step.positions.data_ptr(),
            heads.cos_sin.data_ptr(),
            heads.cos_sin.shape[1],
            keys.data_ptr(),
            values.data_ptr(),
            step.slots.data_ptr(),
            torch.get_num_threads(),
        )

    def attend(self, qkv: Tensor, heads: Heads, step: Step, keys: Tensor, values: Tensor) -> Tensor:
        out = torch.empty(qkv.shape[0], heads.heads * heads.size)
        where = (step.table.data_ptr(), step.table.stride(0), step.rows.data_ptr(), step.lengths.data_ptr())
        shape = (step.lengths.shape[0], heads.heads, heads.kv_heads, heads.size, heads.scale, torch.get_num_threads())
        tensors = (qkv.data_ptr(), qkv.stride(0), out.data_ptr(), keys.data_ptr(), values.data_ptr())
        if step.fresh is None:
            done = self._library.attention_decode(*tensors, *where, *shape)
        else:
            done = self._library.attention_extend(*tensors, *where, step.fresh.data_ptr(), *shape)
        if not done:
            raise MemoryError(f"attention over {int(step.lengths.max())} positions: out of host memory")
        return out

    def silu_mul(self, x: Tensor) -> Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        y = torch.empty(rows, width)
        self._library.silu_mul(x.data_ptr(), y.data_ptr(), rows, width, torch.get_num_threads())
        return y
