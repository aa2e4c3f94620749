"""Weights of linear layers in the layout oneDNN's GEMM reads, packed once for every version of the weights.

    y = x W^T + bias,    W [out, in] float32, its packed copy opaque and as large again

A GEMM over an unpacked weight packs it in every call, which at one token costs more than the product. The product is
in true float32 as long as `torch.get_float32_matmul_precision()` is "highest", SGLang's default.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_pack = torch.ops.mkldnn._reorder_linear_weight.default
_product = torch.ops.mkldnn._linear_pointwise.default
_ROWS_HINT = 32  # rows of a typical decode step; one layout serves any number
_KEPT = "_megathunder_packed"


class PackedWeights:
    """The packed copies of one engine's linear layers; `invalidate` once its weights have changed."""

    def __init__(self) -> None:
        self._version = 0

    def invalidate(self) -> None:
        """Every layer is packed again when it is next used."""
        self._version += 1

    def linear(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [N, in] contiguous -> [N, out]."""
        kept = layer.__dict__.get(_KEPT)
        if kept is None or kept[0] != self._version:
            kept = layer.__dict__[_KEPT] = (self._version, _pack(layer.weight.data, _ROWS_HINT))
        return _product(x, kept[1], bias, "none", [], "")


def fits(layer: nn.Module) -> bool:
    """Whether `layer` is a float32 linear layer of SGLang that is not quantised."""
    weight = getattr(layer, "weight", None)
    return (
        isinstance(weight, Tensor)
        and weight.dtype is torch.float32
        and weight.dim() == 2
        and weight.is_contiguous()
        and type(getattr(layer, "quant_method", None)).__name__
        in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    )
