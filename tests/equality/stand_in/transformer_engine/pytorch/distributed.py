class CudaRNGStatesTracker:
    """The base of a tracker of Megatron-Core's that is not used here."""


def activation_recompute_forward(*arguments, **settings):
    raise RuntimeError("the stand-in recomputes nothing in FP8")
