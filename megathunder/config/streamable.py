"""What cannot be streamed exactly, by name, and why: it must see every trajectory before the first backward pass.

A trajectory's weight is a function of the rewards of its group that treats equal rewards equally, up to one number for
the whole batch, so its gradient may be added before the group is known. Whoever asks for one
of these, as a value or as a setting of its own, gets the reason instead of "no such setting". Called where settings
are read and by objectives/.
"""

from __future__ import annotations

from megathunder.errors import ConfigError

NOT_STREAMABLE = {
    "batch_whitening": "its mean runs over all groups; reinforce_plus_plus_baseline divides by the batch's deviation",
    "relative_length_penalty": "the penalty of one trajectory depends on the lengths of the others of its group",
    "multi_step_clipping": "from the second step on, the weight of a token depends on the moved policy",
}


def reject_non_streamable(word: str) -> None:
    """ConfigError naming `word` (hyphens and a section before it are the same to it) if it cannot be streamed."""
    name = word.rpartition(".")[2].lstrip("-").replace("-", "_")
    if name in NOT_STREAMABLE:
        raise ConfigError(
            f"{name!r}",
            expected="a weight that the rewards of a trajectory's own group decide, up to one number for the batch",
            remedy=f"choose another grpo.advantage; {name} is refused because {NOT_STREAMABLE[name]}",
        )
