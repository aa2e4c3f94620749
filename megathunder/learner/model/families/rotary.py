"""Rotary frequencies of a model folder.

    angle[t, j] = position[t] * inv_freq[j],   inv_freq[j] = theta ** (-2j / d)      (RoPE, Su et al. 2021)

`llama3` scaling is that of Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, smoothly in between.
Called by `model.build_model`. Refuses other kinds of scaling.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import head_dimensions


def inverse_frequencies(hf: dict[str, Any]) -> torch.Tensor:
    """inv_freq [d / 2], float32, as transformers computes it; d is the rotated part of a head.

    Reads both spellings of config.json: `rope_parameters` (newer) and `rope_theta` with `rope_scaling`.
    """
    parameters = dict(hf.get("rope_scaling") or {}) | dict(hf.get("rope_parameters") or {})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters.get("rope_theta", hf.get("rope_theta", 10000.0)))
    dimensions = int(head_dimensions(hf) * parameters.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1)))
    exponent = torch.arange(0, dimensions, 2, dtype=torch.int64).float() / dimensions
    plain = 1.0 / (theta**exponent)
    if kind == "default":
        return plain
    if kind == "llama3":
        return _llama3(plain, parameters)
    raise ConfigError(
        f"rope_type {kind!r} in config.json", expected="default or llama3", remedy="use a model of one of these kinds"
    )


def _llama3(plain: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained_on, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    wavelength = 2 * math.pi / plain
    slowed = torch.where(wavelength > trained_on / low, plain / factor, plain)
    smooth = (trained_on / wavelength - low) / (high - low)
    between = (1 - smooth) * slowed / factor + smooth * slowed
    medium = ~(wavelength < trained_on / high) & ~(wavelength > trained_on / low)
    return torch.where(medium, between, slowed)
