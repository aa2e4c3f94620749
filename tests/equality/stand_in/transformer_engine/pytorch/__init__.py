"""Linear, LayerNormLinear, GroupedLinear and RMSNorm, with the parameters and the sharding of Transformer Engine's."""

import torch
import torch.nn.functional as F

from transformer_engine.pytorch import distributed, fp8, ops

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNormLinear", "Linear", "RMSNorm", "distributed", "fp8", "ops"]


def _tensor_parallel():
    from megatron.core import tensor_parallel  # which imports this package

    return tensor_parallel


class _Sharded(torch.nn.Module):
    """What the linear layers share: the part of the features that a rank holds, and who speaks with whom."""

    def __init__(self, in_features, out_features, *, parallel_mode=None, tp_group=None, tp_size=1,
                 sequence_parallel=False, bias=True, return_bias=False, **unused):  # fmt: skip
        super().__init__()
        self.parallel_mode, self.tp_group, self.tp_size = parallel_mode, tp_group, tp_size
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.use_bias, self.return_bias = bias, return_bias

    def parameter(self, name, *shape, dtype, device):
        parameter = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device))
        self.register_parameter(name, parameter)
        if name.startswith("weight"):
            sharded, dimension = self.parallel_mode is not None, 1 if self.parallel_mode == "row" else 0
            _tensor_parallel().set_tensor_model_parallel_attributes(parameter, sharded, dimension, 1)

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)  # what Transformer Engine gives without FP8

    def set_extra_state(self, state):
        pass

    def enter(self, x):
        if self.parallel_mode != "column" or self.tp_size == 1:
            return x
        if self.sequence_parallel:
            return _tensor_parallel().mappings.gather_from_sequence_parallel_region(x, group=self.tp_group)
        return _tensor_parallel().mappings.copy_to_tensor_model_parallel_region(x, group=self.tp_group)

    def leave(self, y):
        if self.parallel_mode != "row" or self.tp_size == 1:
            return y
        if self.sequence_parallel:
            return _tensor_parallel().mappings.reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return _tensor_parallel().mappings.reduce_from_tensor_model_parallel_region(y, group=self.tp_group)


class Linear(_Sharded):
    def __init__(self, in_features, out_features, *, params_dtype=None, device="cpu", **arguments):
        super().__init__(in_features, out_features, **arguments)
        self.parameter("weight", self.out_features, self.in_features, dtype=params_dtype, device=device)
        if self.use_bias:
            self.parameter("bias", self.out_features, dtype=params_dtype, device=device)

    def forward(self, x, is_first_microbatch=None):
        y = self.leave(F.linear(self.enter(x), self.weight))
        bias = getattr(self, "bias", None)
        if self.return_bias:
            return y, bias
        return y if bias is None else y + bias


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps=1e-5, normalization="LayerNorm", **arguments):
        assert normalization == "RMSNorm"
        super().__init__(in_features, out_features, **arguments)
        self.eps = eps
        dtype, device = arguments["params_dtype"], arguments["device"]
        self.parameter("layer_norm_weight", in_features, dtype=dtype, device=device)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


class GroupedLinear(_Sharded):
    def __init__(self, num_gemms, in_features, out_features, *, params_dtype=None, device="cpu", **arguments):
        super().__init__(in_features, out_features, **arguments)
        self.num_gemms = num_gemms
        for number in range(num_gemms):
            self.parameter(f"weight{number}", self.out_features, self.in_features, dtype=params_dtype, device=device)

    def forward(self, x, m_splits, is_first_microbatch=None):
        pieces = x.split(list(map(int, m_splits)))
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        return torch.cat([F.linear(piece, weight) for piece, weight in zip(pieces, weights, strict=True)])


class RMSNorm(torch.nn.RMSNorm):
    def __init__(self, hidden_size, eps=1e-5, sequence_parallel=None, zero_centered_gamma=False, params_dtype=None,
                 device="cpu"):  # fmt: skip
        super().__init__(hidden_size, eps=eps, dtype=params_dtype, device=device)
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel


class DotProductAttention(torch.nn.Module):
    """Named by Megatron-Core's spec; attention here is the package's own."""
