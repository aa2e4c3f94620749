class QuantizedTensor:
    """No parameter of the stand-in is one."""
