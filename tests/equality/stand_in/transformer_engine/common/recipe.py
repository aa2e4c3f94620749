class DelayedScaling:
    """Named by Megatron-Core's own recipe class."""
