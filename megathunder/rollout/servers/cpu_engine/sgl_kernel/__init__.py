"""Stand-in for sgl-kernel's CPU build: the index operations that SGLang's plain-torch CPU path calls, in torch.

Shapes: N requests of the batch. The model's forward is SGLang's own; what is not listed here raises
AttributeError on import or `NotImplementedError` on call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def assign_req_to_token_pool_cpu(
    request_rows: torch.Tensor,  # [N]
    table: torch.Tensor,  # [requests, positions] cache slot of every token
    start: torch.Tensor,  # [N]
    end: torch.Tensor,  # [N]
    slots: torch.Tensor,  # [sum(end - start)]
    _table_width: int,
) -> None:
    """table[row, start:end] = the next slots, request after request."""
    taken = 0
    for row, first, last in zip(request_rows.tolist(), start.tolist(), end.tolist()):
        table[row, first:last] = slots[taken : taken + last - first].to(table.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(
    request_rows: torch.Tensor,
    table: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    _table_width: int,
) -> None:
    """The inverse read: slots = table[row, start:end], request after request."""
    taken = 0
    for row, first, last in zip(request_rows.tolist(), start.tolist(), end.tolist()):
        slots[taken : taken + last - first] = table[row, first:last].to(slots.dtype)
        taken += last - first


def _absent(name: str) -> Callable[..., None]:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel is a stand-in on this server: {name} needs the real one")

    return refuse


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
build_draft_decode_metadata_cpu = _absent("build_draft_decode_metadata_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
