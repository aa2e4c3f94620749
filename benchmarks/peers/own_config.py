"""Our settings for a workload: the defaults, and what the workload says. Called by `trl_grpo.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from benchmarks.peers.workload import Workload
from megathunder.config import Config

REWARD = Path(__file__).resolve().with_name("rewards.py")
TEMPLATE_TOKENS = 16  # a prompt is a few tokens longer than asked for at most


def own_config(folder: Path, workload: Workload, *, updates: int) -> Config:
    """The settings of our side; its run folder is FOLDER/own."""
    default = Config()
    longest = workload.prompt_tokens + TEMPLATE_TOKENS + workload.max_tokens
    return dataclasses.replace(
        default,
        run=dataclasses.replace(
            default.run,
            name="own",
            folder=str(folder),
            updates=updates,
            groups_per_update=workload.prompts,
            group_size=workload.attempts,
            seed=workload.seed,
            evaluate_every=0,
            overwrite=True,
            progress=False,
        ),
        tasks=dataclasses.replace(default.tasks, source="table", path=str(folder / "prompts.jsonl")),
        reward=dataclasses.replace(default.reward, function=(f"{REWARD}:score",)),
        rollout=dataclasses.replace(
            default.rollout,
            max_new_tokens=workload.max_tokens,
            max_tokens=longest,
            max_total_tokens=longest * workload.prompts * workload.attempts,
        ),
        grpo=dataclasses.replace(default.grpo, advantage="sample_std", epsilon=workload.epsilon),
        learner=dataclasses.replace(
            default.learner,
            model=str(folder / "policy"),
            learning_rate=workload.learning_rate,
            clip_grad=workload.clip_grad,
            adam_beta2=workload.beta2,
            weight_decay=0.0,
        ),
        metrics=dataclasses.replace(default.metrics, report=False, report_every=0),
    )
