"""The policy that placement is measured with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megathunder.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
STUDENT = ROOT / "examples" / "policies" / "student"


@pytest.fixture
def wide_policy(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    from rollout_bench.wide import wide_policy

    return wide_policy


def test_it_has_the_shape_asked_for_the_tokenizer_given_and_the_same_weights_from_one_seed(wide_policy, tmp_path):
    models = [
        AutoModelForCausalLM.from_pretrained(wide_policy(tmp_path / name, STUDENT, hidden=256, layers=2))
        for name in ("a", "b")
    ]
    config = models[0].config
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (256, 2, 4096)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) <= config.vocab_size
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("hidden, layers", [(0, 2), (100, 2), (64, 2), (256, 0)])
def test_a_shape_that_no_server_could_run_is_refused(wide_policy, tmp_path, hidden, layers):
    with pytest.raises(ConfigError, match="multiple of 128 units"):
        wide_policy(tmp_path / "a", STUDENT, hidden=hidden, layers=layers)
    assert not (tmp_path / "a").exists()
