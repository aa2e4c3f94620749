"""The model of a folder as transformers runs it: the oracle of `parity.py`.

    logits(rows)     [T, V] of each row alone, laid end to end
    gradient(name)   of sum over rows and tokens of -log pi(next token), by per-expert name

Needs transformers, which only tools and tests import.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from megathunder.learner.model.weights.hf_files import FusedPart

Rows = Sequence[Sequence[int]]


class Reference:
    """Loads `folder` in `dtype` with plain attention."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self._parameters = dict(self.model.named_parameters())

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Replace the parameters by `weights`, by per-expert name."""
        for name, value in weights.items():
            if name.endswith("e_score_correction_bias"):
                continue
            self._part(name, "data").copy_(value)

    def logits(self, rows: Rows) -> Tensor:
        """Logits [T, V]; leaves the gradients."""
        every = []
        for row in rows:
            ids = torch.tensor([list(row)])
            logits = self.model(ids).logits[0]
            if len(row) > 1:
                F.cross_entropy(logits[:-1], ids[0, 1:], reduction="sum").backward()
            every.append(logits.detach())
        return torch.cat(every)

    def gradient(self, name: str) -> Tensor:
        """The gradient that `logits` left."""
        return self._part(name, "grad")

    def _part(self, name: str, of: str) -> Tensor:
        if name in self._parameters:
            return getattr(self._parameters[name], of)
        fused = FusedPart.named(name)
        return fused.of(getattr(self._parameters[fused.stored], of)[fused.expert : fused.expert + 1])
