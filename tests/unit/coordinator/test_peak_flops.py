"""The peak that MFU is relative to: of the GPUs that the learner's cells name."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from megathunder.config import Config
from megathunder.coordinator import assembly
from megathunder.planning.flops import known_peak


def learner(*devices: str) -> SimpleNamespace:
    hellos = {cell: SimpleNamespace(device=device, ranks=4) for cell, device in enumerate(devices)}
    return SimpleNamespace(hellos=hellos, ranks=4 * len(devices))


def test_gpus_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "resolve_device", lambda _: "cuda")
    h200 = known_peak("NVIDIA H200")
    assert h200 > 5e14
    assert assembly.peak_flops(Config(), learner("NVIDIA H200", "NVIDIA H200")) == 8 * h200
    assert assembly.peak_flops(Config(), learner("A GPU of tomorrow")) == 0.0


def test_a_setting_goes_before_what_is_known() -> None:
    config = dataclasses.replace(Config(), metrics=dataclasses.replace(Config().metrics, peak_flops=1e12))
    assert assembly.peak_flops(config, learner("NVIDIA H200")) == 4e12
