"""Megatron-Core 0.16.1 on CPU and gloo: every adaptation in one place, each with its reason.

`install()` is called by `parallel.initialize` when the learner's device is the CPU, before Megatron builds anything.
It changes only this process, can be called again, and is never called where CUDA computes. Lines named below are of
`megatron/core/` 0.16.1.

    what Megatron assumes                       what stands in for it
    a current CUDA device                       torch.device("cpu")
    CUDA random states, one per parallel rank   the same tracker over CPU generators
    device="cuda" and pin_memory=True literals  a module-local `torch` that drops them
    Tensor.type() starts with "torch.cuda."     answered so to the optimizer alone
    streams and events                          objects that do nothing (CPU work is ordered)
    collectives of uneven parts (NCCL only)     gather: padded to the largest; reduce-scatter: all-reduce and cut
    Transformer Engine's GEMM, compiled fusions absent: None and eager execution
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

CPU = torch.device("cpu")

# Modules that write device="cuda" or pin_memory=True into a tensor factory.
_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.pipeline_parallel.schedules",  # 596, 983, 2138
    "megatron.core.optimizer.optimizer",  # 481, 485, 907
    "megatron.core.optimizer.clip_grads",  # 103, 174, 207
    "megatron.core.optimizer.grad_scaler",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.transformer.utils",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.core.utils",  # 1207
    "megatron.core.models.common.embeddings.rope_utils",  # 62, context parallel
)
_FACTORIES = frozenset({"tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn"})

_installed = False


def import_megatron() -> None:
    """Import Megatron-Core without torch's compiler, before anything else does; only where torch is built for CPUs.

    Its fusions are decorated with torch.compile as they are imported, which loads Inductor (a second of every start),
    and on a CPU they are never compiled."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    compiler, torch.compile = torch.compile, lambda function=None, **_: function or (lambda decorated: decorated)
    try:
        importlib.import_module("megatron.core")
    finally:
        torch.compile = compiler


class _CpuStream:
    """A stream on a device whose work is already in order; Megatron subclasses and compares it, so it is a class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _CpuEvent:
        return _CpuEvent()

    def synchronize(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CpuStream)

    def __hash__(self) -> int:
        return hash(_CpuStream)


class _CpuEvent:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _TorchOnCpu(types.ModuleType):
    """`torch` as seen by one Megatron module: tensor factories ignore device="cuda" and pin_memory=True."""

    def __init__(self) -> None:
        super().__init__("torch")

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name not in _FACTORIES:
            return value

        def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
            kwargs.pop("pin_memory", None)
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = CPU
            return value(*args, **kwargs)

        return factory


def install() -> None:
    """Adapt this process's Megatron-Core to the CPU. Idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    _current_device()
    _random_states()
    _streams()
    _literals()
    _optimizer_types()
    _mixture_of_experts()
    _uneven_collectives()
    _eager()


def _current_device() -> None:
    # rotary_pos_embedding.py:162, mappings.py:141, layers.py:552, p2p_communication.py:190, moe/router.py:90 and others
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args: None  # p2p_communication.py:242,398
    # language_module.py:244 (pipeline parallel with tied embeddings), rope_utils.py:64 (context parallel)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _random_states() -> None:
    # tensor_parallel/random.py reads and seeds the CUDA generator; dropout and initialisation here draw from the CPU's.
    from megatron.core.tensor_parallel import random as megatron_random

    class CpuRngStatesTracker(megatron_random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} or seed {seed} is already there")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator("cpu").manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = megatron_random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    megatron_random._CUDA_RNG_STATE_TRACKER = CpuRngStatesTracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment]


def _streams() -> None:
    # moe/token_dispatcher.py:445,871-876
    torch.cuda.Stream = _CpuStream  # type: ignore[misc,assignment]
    torch.cuda.Event = _CpuEvent  # type: ignore[misc,assignment]
    torch.cuda.current_stream = lambda *args: _CpuStream()  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *args: _CpuStream()  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]


def _literals() -> None:
    stand_in = _TorchOnCpu()
    for name in _MODULES_WITH_CUDA_LITERALS:
        importlib.import_module(name).torch = stand_in


def _optimizer_types() -> None:
    # optimizer.py:671, distrib_optimizer.py:361,420,582 and clip_grads.py:167 sort parameters by "torch.cuda.*Tensor".
    plain = torch.Tensor.type

    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain(self, *args, **kwargs)
        if args or kwargs or answer.startswith("torch.cuda."):
            return answer
        asked_by_optimizer = "megatron/core/optimizer" in sys._getframe(1).f_code.co_filename
        return answer.replace("torch.", "torch.cuda.", 1) if asked_by_optimizer else answer

    torch.Tensor.type = type_of  # type: ignore[method-assign,assignment]


def _mixture_of_experts() -> None:
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # moe_utils.py:1192 reads a name that only Transformer Engine defines

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # moe_utils.py:1093 converts to numpy only what it has copied from the GPU
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu


def _uneven_collectives() -> None:
    # mappings.py:150,193: expert-tensor-parallel ranks exchange unequal numbers of tokens, gloo takes equal parts only
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather_uneven(
        part: torch.Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(part, group, output_split_sizes, use_global_buffer)
        padded = part.new_zeros(max(output_split_sizes), *part.shape[1:])
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in output_split_sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([p[:size] for p, size in zip(parts, output_split_sizes, strict=True)])

    def reduce_scatter_uneven(
        whole: torch.Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(whole, group, input_split_sizes, use_global_buffer)
        total = whole.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = reduce_scatter_uneven


def _eager() -> None:
    # Megatron's fusions are torch.compile; on the CPU each costs seconds at first use and needs a C++ compiler.
    torch._dynamo.config.disable = True
