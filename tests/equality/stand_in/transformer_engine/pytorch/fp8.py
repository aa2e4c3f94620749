class FP8GlobalStateManager:
    """Asked by Megatron-Core's layers whether they compute in FP8."""

    @staticmethod
    def is_fp8_enabled():
        return False


def fp8_autocast(*arguments, **settings):
    raise RuntimeError("the stand-in has no FP8")
