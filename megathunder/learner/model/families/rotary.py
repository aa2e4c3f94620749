"""Rotary frequencies of a model folder.

    angle[t, j] = position[t] * inv_freq[j],   inv_freq[j] = theta ** (-2j / d)      (RoPE, Su et al. 2021)

`llama3` scaling is that of Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, smoothly in between.
Called by `model.build_model`. Refuses other kinds of scaling.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megathunder.learner.model.families.rules import head_dimensions, rope_parameters


def inverse_frequencies(hf: dict[str, Any]) -> torch.Tensor:
    """inv_freq [d / 2], float32, as transformers computes it; d is the rotated part of a head."""
    parameters = rope_parameters(hf)
    theta = float(parameters["rope_theta"])
    dimensions = int(head_dimensions(hf) * parameters["partial_rotary_factor"])
    exponent = torch.arange(0, dimensions, 2, dtype=torch.int64).float() / dimensions
    plain = 1.0 / (theta**exponent)
    return _llama3(plain, parameters) if parameters["rope_type"] == "llama3" else plain


def _llama3(plain: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained_on, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > trained_on / low, plain / factor, plain)
    smooth = (trained_on / wavelength - low) / (high - low)
    between = (1 - smooth) * slowed / factor + smooth * slowed
    medium = ~(wavelength < trained_on / high) & ~(wavelength > trained_on / low)
    return torch.where(medium, between, slowed)
