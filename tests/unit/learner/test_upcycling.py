"""A mixture made of a dense policy computes what the dense policy computes."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.policies.build.upcycle_policy import Arguments, upcycle

STUDENT = Path(__file__).parents[3] / "examples" / "policies" / "student"


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(40)[None] * 7 % 512).logits[0]


def test_without_noise_the_mixture_is_the_dense_function(tmp_path: Path) -> None:
    assert upcycle(Arguments(source=STUDENT, target=tmp_path / "same", noise=0.0))
    assert torch.allclose(logits(tmp_path / "same"), logits(STUDENT), atol=1e-4)


def test_with_noise_the_experts_differ_and_the_policy_stays_near(tmp_path: Path) -> None:
    upcycle(Arguments(source=STUDENT, target=tmp_path / "apart"))
    gap = (logits(tmp_path / "apart") - logits(STUDENT)).abs().mean()
    assert 1e-3 < float(gap) < 0.5
    assert not upcycle(Arguments(source=STUDENT, target=tmp_path / "apart")), "a second call finds it there"


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    upcycle(Arguments(source=STUDENT, target=tmp_path / "mixture"))
    with pytest.raises(ValueError, match="expected qwen3"):
        upcycle(Arguments(source=tmp_path / "mixture", target=tmp_path / "twice"))
