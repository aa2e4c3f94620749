"""SGLang plug-in `megathunder_cpu_kernels`: whole decoder layers by the kernels, on a CPU server.

    MEGATHUNDER_CPU_KERNELS = auto       the kernels in C; in plain torch where they cannot be compiled
                              torch      in plain torch
                              off        SGLang's own path
    POST /set_internal_state {"server_args": {"cpu_kernels": n}}    the n-th of CHOICES, from the next step on
    GET  /server_info -> internal_states[0].cpu_kernels             compiled, torch or off

Entry point of group `sglang.srt.plugins`; runs in each of a server's processes before it serves.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from megathunder.rollout.servers.cpu_kernels.compiled import CompiledKernels, compile_kernels
from megathunder.rollout.servers.cpu_kernels.decoder_layer import attend_rows, forward_layer
from megathunder.rollout.servers.cpu_kernels.interface import Kernels
from megathunder.rollout.servers.cpu_kernels.packed_weights import PackedWeights, fits
from megathunder.rollout.servers.cpu_kernels.portable import PortableKernels
from megathunder.rollout.servers.cpu_kernels.settings import CHOICES, VARIABLE

if TYPE_CHECKING:
    from torch import Tensor, nn

log = logging.getLogger(__name__)

KEY = "cpu_kernels"
SRT = "sglang.srt"
LAYERS = ("llama.LlamaDecoderLayer", "qwen2.Qwen2DecoderLayer", "qwen3.Qwen3DecoderLayer")
MIXTURES = ("qwen3_moe.Qwen3MoeDecoderLayer", "glm4_moe.Glm4MoeDecoderLayer")
ATTENTION = f"{SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend"
UPDATER = f"{SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater"
UPDATES = ("disk", "distributed", "tensor", "ipc")

Original = Callable[..., object]


class Switch:
    """Which kernels this process computes with, None for SGLang's own path, and the weights they read."""

    def __init__(self) -> None:
        self.kernels: Kernels | None = None
        self.packed = PackedWeights()
        self._compiled: CompiledKernels | str | None = None

    def choose(self, choice: str) -> bool:
        """Take `choice` from now on; False where it is none of CHOICES."""
        if choice not in CHOICES:
            return False
        if choice == "auto" and self._compiled is None:
            self._compiled = compile_kernels()
            if isinstance(self._compiled, str):
                log.warning("attention in plain torch, which is slower: %s", self._compiled)
        compiled = isinstance(self._compiled, CompiledKernels)
        self.kernels = (
            None if choice == "off" else self._compiled if choice == "auto" and compiled else PortableKernels()
        )
        return True

    @property
    def name(self) -> str:
        return "off" if self.kernels is None else self.kernels.name


switch = Switch()


def install() -> None:
    """Hook SGLang's layers, weight updates and state. Raises ValueError for a choice there is not."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    choice = os.environ.get(VARIABLE, "auto")
    if not switch.choose(choice):
        raise ValueError(f"{VARIABLE} = {choice!r}; expected one of {', '.join(CHOICES)}")
    hooks = {
        **{f"{SRT}.models.{layer}.forward": _layer for layer in LAYERS + MIXTURES},
        **{f"{UPDATER}.update_weights_from_{source}": _update for source in UPDATES},
        f"{ATTENTION}._run_sdpa_forward_decode": _decode,
        f"{ATTENTION}._run_sdpa_forward_extend": _extend,
        f"{SRT}.layers.quantization.unquant.UnquantizedLinearMethod.apply": _linear,
        f"{SRT}.layers.logits_processor.LogitsProcessor._compute_lm_head": _logits,
        f"{SRT}.managers.scheduler.Scheduler.set_internal_state": _set_state,
        f"{SRT}.managers.scheduler.Scheduler.get_internal_state": _get_state,
    }
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


def _layer(
    original: Original,
    layer: nn.Module,
    positions: Tensor,
    hidden_states: Tensor,
    forward_batch: object,
    residual: Tensor | None,
    **options: object,
) -> object:
    if switch.kernels is not None and all(value is None for value in options.values()):
        result = forward_layer(layer, switch.kernels, switch.packed, positions, hidden_states, forward_batch, residual)
        if result is not None:
            return result
    return original(layer, positions, hidden_states, forward_batch, residual, **options)


def _update(original: Original, updater: object, *arguments: object, **options: object) -> object:
    try:
        return original(updater, *arguments, **options)
    finally:
        switch.packed.invalidate()  # also after an update that failed half-way


def _decode(
    original: Original,
    backend: object,
    query: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    encoder_lens: Tensor | None = None,
    **options: object,
) -> object:
    ours = switch.kernels is not None and encoder_lens is None
    if ours and attend_rows(switch.kernels, query, output, keys, values, (table, rows, lengths), None, options):
        return output
    return original(backend, query, output, keys, values, table, rows, lengths, encoder_lens, **options)


def _extend(
    original: Original,
    backend: object,
    query: Tensor,
    output: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    rows: Tensor,
    lengths: Tensor,
    prefix: Tensor,
    fresh: Tensor,
    encoder_lens: Tensor | None = None,
    **options: object,
) -> object:
    if switch.kernels is not None and encoder_lens is None and options.get("causal"):
        where, counts = (table, rows, lengths), fresh.to(torch.int64)
        if attend_rows(switch.kernels, query, output, keys, values, where, counts, options):
            return output
    return original(backend, query, output, keys, values, table, rows, lengths, prefix, fresh, encoder_lens, **options)


def _linear(original: Original, method: object, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> object:
    if switch.kernels is not None and _is_rows(x) and fits(layer):
        return switch.packed.linear(layer, x, bias)
    return original(method, layer, x, bias)


def _logits(
    original: Original, processor: object, hidden: Tensor, lm_head: nn.Module, embedding_bias: Tensor | None = None
) -> object:
    adapted = hasattr(lm_head, "set_lora") or embedding_bias is not None
    if switch.kernels is not None and not adapted and _is_rows(hidden) and fits(lm_head):
        return switch.packed.linear(lm_head, hidden)
    return original(processor, hidden, lm_head, embedding_bias)


def _is_rows(x: Tensor) -> bool:
    return x.dim() == 2 and x.dtype is torch.float32 and x.is_contiguous() and x.shape[0] > 0


def _set_state(original: Original, scheduler: object, request: object) -> object:
    """Take our key; any other is SGLang's, or another plug-in's."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    if KEY not in request.server_args:
        return original(scheduler, request)
    number = request.server_args[KEY]  # SGLang takes numbers only
    known = len(request.server_args) == 1 and number in range(len(CHOICES))
    return SetInternalStateReqOutput(updated=known and switch.choose(CHOICES[int(number)]))


def _get_state(original: Original, scheduler: object, request: object) -> object:
    answer = original(scheduler, request)
    answer.internal_state[KEY] = switch.name
    return answer
