#!/usr/bin/env python
"""TRL's GRPOTrainer on a workload: `python trl_side.py FOLDER --steps N [--onednn]`, in TRL's own environment.

FOLDER holds workload.json, policy/ and prompts.jsonl. Written to FOLDER/NAME/: steps.jsonl (seconds of every step and
of its generation, tokens, loss, gradient norm) and first_step.json (its tokens, rewards and advantages). A step begins
when FOLDER/NAME/gate lets it. Started by `trl_grpo.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if "--onednn" in sys.argv:
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # read at the first product

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.gate import append_step, wait_for_gate
from benchmarks.peers.rewards import trl_score
from benchmarks.peers.workload import Workload, read_workload


class TimedTrainer(GRPOTrainer):
    """Notes what a step generated, and the loss whose gradient is taken as sum(-A log pi) / tokens."""

    def begin(self, out: Path) -> None:
        self.out, self.generation_s, self.step_loss, self.tokens = out, 0.0, 0.0, 0

    def _generate_and_score_completions(self, inputs: list) -> dict:
        started_s = time.monotonic()
        found = super()._generate_and_score_completions(inputs)
        self.generation_s += time.monotonic() - started_s
        self.tokens = int(found["completion_mask"].sum())
        if self.state.global_step == 0:
            self._keep(found)
        return found

    def _keep(self, found: dict) -> None:
        """The tokens of every completion with its prompt's, its reward and its advantage."""
        texts = self.processing_class.batch_decode(found["completion_ids"], skip_special_tokens=True)
        names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
        kept = [
            {
                "prompt": prompt[prompt_mask.bool()].tolist(),
                "completion": completion[completion_mask.bool()].tolist(),
                "reward": reward,
                "advantage": float(advantage),
            }
            for prompt, prompt_mask, completion, completion_mask, advantage, reward in zip(
                *(found[name] for name in names), trl_score(texts), strict=True
            )
        ]
        (self.out / "first_step.json").write_text(json.dumps(kept))

    def _compute_loss(self, model: torch.nn.Module, inputs: dict) -> torch.Tensor:
        mask, advantages = inputs["completion_mask"], inputs["advantages"]

        def noted(*arguments: object, **options: object) -> tuple:
            logprobs, *rest = GRPOTrainer._get_per_token_logps_and_entropies(self, *arguments, **options)
            weighted = -(advantages[:, None] * logprobs.detach().double() * mask).sum()
            self.step_loss += float(weighted / inputs["num_items_in_batch"])
            return logprobs, *rest

        self._get_per_token_logps_and_entropies = noted
        try:
            return super()._compute_loss(model, inputs)
        finally:
            del self._get_per_token_logps_and_entropies


class Steps(TrainerCallback):
    """Waits for the gate before each step and writes a line after it."""

    def __init__(self, out: Path) -> None:
        self._out, self._started_s, self.trainer = out, 0.0, None
        self._pending: dict[str, object] = {}

    def on_step_begin(self, args: object, state: object, control: object, **_: object) -> None:
        wait_for_gate(self._out / "gate", state.global_step)
        self.trainer.begin(self._out)
        self._started_s = time.monotonic()

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        trainer = self.trainer
        self._pending = {
            "step_s": time.monotonic() - self._started_s,
            "generation_s": trainer.generation_s,
            "tokens": trainer.tokens,
            "loss": trainer.step_loss,
        }

    def on_log(self, args: object, state: object, control: object, logs: dict, **_: object) -> None:
        if self._pending:
            kept = {"grad_norm": logs["grad_norm"], "trl_loss": logs["loss"], "reward": logs["reward"]}
            append_step(self._out / "steps.jsonl", self._pending | kept)
            self._pending = {}


def trainer_of(folder: Path, out: Path, workload: Workload, *, steps: int, rows: int) -> TimedTrainer:
    """A trainer whose every step is one update of the workload; `rows` sequences per forward and backward pass."""
    sequences = workload.prompts * workload.attempts
    config = GRPOConfig(
        output_dir=str(out / "run"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=sequences // rows,
        num_generations=workload.attempts,
        max_completion_length=workload.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=workload.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta2=workload.beta2,
        weight_decay=0.0,
        max_grad_norm=workload.clip_grad,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        seed=workload.seed,
        disable_tqdm=True,
    )
    callback = Steps(out)
    trainer = TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "policy"),
        reward_funcs=trl_score,
        args=config,
        train_dataset=load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train"),
        callbacks=[callback],
    )
    callback.trainer = trainer
    return trainer


def main() -> None:
    """See the module docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="trl")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--onednn", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if options.onednn:
        torch.set_float32_matmul_precision("medium")
    out = options.folder / options.name
    out.mkdir(exist_ok=True)
    workload = read_workload(options.folder / "workload.json")
    trainer_of(options.folder, out, workload, steps=options.steps, rows=options.rows).train()


if __name__ == "__main__":
    main()
