"""The examples on repositories and terminal tasks train for real: their policy solves some, and a step is taken."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch
from jobs import job
from transformers import AutoTokenizer, Qwen3ForCausalLM

from megathunder.config.sandbox import SandboxConfig
from megathunder.sandbox import SandboxPool
from megathunder.tasks import ChatFormat

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from examples.policies.build.make_mender import Recipe, attempt_all, given

MENDER = ROOT / "examples" / "policies" / "mender"


def test_an_update_on_repositories_has_both_rewards_and_takes_a_step(tmp_path: Path) -> None:
    changes = {"run.updates": 1, "run.groups_per_update": 4}
    with job(tmp_path, "swe", ranks=1, config="swe_cpu", **changes) as running:
        assert running.end(240.0) == 0, running.output()
        (row,) = running.rows()
    assert row["stepped"] and row["grad_norm"] > 0.0, row["skip_reason"]
    assert 0.0 < row["reward_mean"] < 1.0 and row["groups_degenerate"] < 4
    assert row["policy_lag_max"] == 0 and row["engine_learner_logprob_diff_max"] < 1e-3


def test_the_policy_of_the_terminal_example_solves_its_training_tasks_at_times() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM.from_pretrained(MENDER, dtype=torch.float32)
    chat = ChatFormat(AutoTokenizer.from_pretrained(MENDER))
    train = given(Recipe(repositories=ROOT / "examples/tasks/swe", terminal=ROOT / "examples/tasks/terminal"))

    async def rewards() -> list[float]:
        pool = SandboxPool(SandboxConfig(warm=1, max_running=2))
        await pool.start()
        try:
            return await attempt_all(model, chat, train["terminal"][0] * 12, 1.0, pool)
        finally:
            await pool.close()

    found = asyncio.run(rewards())
    assert 0.0 < sum(found) / len(found) < 0.9, found
