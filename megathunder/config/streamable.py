"""What cannot be streamed exactly, by name, and why: it must see every trajectory before the first backward pass.

A trajectory's weight is a r + c once its group is known, so its gradient may be added before that. Whoever asks for one
of these, as a value or as a setting of its own, gets the reason instead of "no such setting". Called where settings
are read and by objectives/.
"""

from __future__ import annotations

from megathunder.errors import ConfigError

NORMALISATIONS = ("std", "sample_std", "none", "leave_one_out")

NOT_STREAMABLE = {
    "batch_whitening": "its mean and deviation run over all groups, so no group can close before the last one",
    "quantile": "which trajectories are kept depends on ranks, not on each reward times a constant",
    "relative_length_penalty": "the penalty of one trajectory depends on the lengths of the others of its group",
    "multi_step_clipping": "from the second step on, the weight of a token depends on the moved policy",
}


def reject_non_streamable(word: str) -> None:
    """ConfigError naming `word` (hyphens and a section before it are the same to it) if it cannot be streamed."""
    name = word.rpartition(".")[2].lstrip("-").replace("-", "_")
    if name in NOT_STREAMABLE:
        raise ConfigError(
            f"{name!r}",
            expected="a weight that is affine in each trajectory's reward once its group is known",
            remedy=f"choose one of {', '.join(NORMALISATIONS)}; {name} is refused because {NOT_STREAMABLE[name]}",
        )
