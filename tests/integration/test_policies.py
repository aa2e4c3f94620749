"""The shipped policies are what their card says: a student that must learn, and a teacher worth learning from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from megathunder.config.tasks import TasksConfig
from megathunder.tasks import ChatFormat, build_source

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from examples.policies.build.make_policies import success


@pytest.mark.parametrize(
    ("policy", "temperature", "low", "high"),
    [("teacher", 1.0, 0.95, 1.0), ("student", 1.0, 0.25, 0.5), ("student", 0.0, 0.0, 0.25)],
)
def test_success_of_the_shipped_policies(policy: str, temperature: float, low: float, high: float) -> None:
    torch.set_num_threads(1)
    folder = ROOT / "examples" / "policies" / policy
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = ChatFormat(AutoTokenizer.from_pretrained(folder))
    tasks = build_source(TasksConfig(size=1, latency_scale=0.0)).heldout(140)
    by_kind = success(model, chat, tasks, temperature)
    assert low <= by_kind["all"] <= high, by_kind
    if policy == "student" and temperature == 1.0:
        assert min(by_kind.values()) > 0, "a skill that is absent from the start never appears"
