"""A stand-in for Transformer Engine, which needs CUDA: its modules' names, arguments and parameters in plain torch.

Only as much as Megatron-Core's own Transformer Engine layers use, so that those, their spec and the names of their
parameters can be built and run on a CPU. What it computes is the textbook's; its kernels and FP8 are not here.
"""

from transformer_engine import common, pytorch

__version__ = "2.6.0"  # from 2.7 on Megatron-Core also imports kernels of routers
__all__ = ["common", "pytorch"]
