"""Real servers, streaming on, two learner ranks: the layouts that split layers, experts, and matrices with adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import ROOT, job
from safetensors.torch import load_file

from examples.policies.build.upcycle_policy import Arguments, upcycle

CASES = {
    "stages of 2 and 1 layers": {"learner.pipeline_parallel": 2},
    "experts": {"learner.expert_parallel": 2},
    "shared accumulators, divergence inside the reward": {
        "learner.accumulator_shards": 2,
        "grpo.kl_coefficient": 0.05,
        "grpo.kl_in_reward": "true",
    },
    "adapters": {"learner.tensor_parallel": 2, "learner.lora_rank": 8, "publish.lora": "adapter"},
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_with_streaming_and_agree_with_the_engine(case: str, tmp_path: Path) -> None:
    settings = {"run.updates": 2, "run.groups_per_update": 4, **CASES[case]}
    if case == "experts":
        student = ROOT / "examples" / "policies" / "student"
        upcycle(Arguments(source=student, target=tmp_path / "mixture"))
        settings["learner.model"] = tmp_path / "mixture"
    with job(tmp_path, "layout", ranks=2, **settings) as running:
        assert running.end(150.0) == 0, running.output()
        assert not running.orphans()
    rows = running.rows()
    assert len(rows) == 2 and any(row["stepped"] for row in rows)
    for row in rows:
        assert row["schedule"] == "thundersync" and row["policy_lag_max"] == 0
        assert row["engine_learner_logprob_diff_max"] < 1e-4
        assert row["stepped"] == (row["grad_norm"] > 0)
        assert (row["kl_to_reference"] is not None) == ("grpo.kl_in_reward" in settings)
    written = load_file(running.run / "policy" / "model.safetensors")
    started = load_file(Path(settings.get("learner.model", ROOT / "examples/policies/student")) / "model.safetensors")
    changed = [name for name in written if not written[name].equal(started[name])]
    adapted = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    if case == "adapters":
        assert {name.split(".")[-2] for name in changed} == adapted
        assert len(load_file(running.run / "policy" / "adapter" / "adapter_model.safetensors")) == 3 * 7 * 2
    else:
        assert {"embed_tokens", "norm", *adapted} <= {name.split(".")[-2] for name in changed}
