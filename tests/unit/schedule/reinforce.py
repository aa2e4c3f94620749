"""REINFORCE with a moving baseline, as a user would bring it: A_i = r_i - b, where b is known before the update.

b follows the mean reward of the batches before: b <- decay b + (1 - decay) mean. So the weight of a trajectory is
known with its reward: no group, no accumulator, every contribution is direct.

    objective = "reinforce.py:build"
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from megathunder.config.root import Config
from megathunder.objectives.base import Objective, Survivor
from megathunder.objectives.weights import Affine

DECAY = 0.9


class Reinforce(Objective):
    """See the module docstring."""

    name = "reinforce"
    baseline = 0.5

    def opening_weights(self) -> Affine:
        """A = r - b."""
        return Affine(-self.baseline, (1.0,))

    def end_update(self, survivors: Sequence[Survivor]) -> None:
        """Move the baseline."""
        if survivors:
            mean = math.fsum(s.signal[0] for s in survivors) / len(survivors)
            self.baseline = DECAY * self.baseline + (1.0 - DECAY) * mean

    def state(self) -> bytes:
        """The baseline, for the checkpoint."""
        return struct.pack("d", self.baseline)

    def restore(self, data: bytes) -> None:
        """Go on from a checkpoint; one of another objective keeps nothing."""
        if data:
            (self.baseline,) = struct.unpack("d", data)


def build(config: Config) -> Reinforce:
    """What `objective` names."""
    return Reinforce(config.loss)
