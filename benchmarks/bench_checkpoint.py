"""Measure how long a checkpoint keeps the learner: saved before the next update, and beside it from a copy.

    python benchmarks/bench_checkpoint.py --model smollm2 --repeats 5 --json out.json

`--model` is a folder with a config.json (weights are random; bytes and seconds do not depend on them), or smollm2: the
shape of SmolLM2-135M. fp32, AdamW, one rank. Each repeat takes three updates of `--tokens` tokens: a plain one; one
after a save that is waited for; one beside a save in the background. Rows: seconds until the learner may go on
(`stall`), of the update, and from the request until the folder can be loaded (`whole`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megathunder.accumulator_keys import BATCH
from megathunder.config.learner import LearnerConfig
from megathunder.config.root import Config
from megathunder.learner.learner import Learner
from megathunder.learner.model.build_model import build_model
from megathunder.learner.parallel import initialize
from megathunder.types import ContributionId, Differentiate, FinishCheckpoint, SaveCheckpoint, TakeStep, TrainRow

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
COLUMNS = ("plain_update_s", "waited_stall_s", "waited_update_s", "beside_stall_s", "beside_update_s", "beside_whole_s")


class Bench:
    """A learner with random weights and the updates it takes."""

    def __init__(self, model: Path, tokens: int) -> None:
        settings = LearnerConfig(model=str(model), device="cpu")
        layout = initialize(settings)
        self.learner = Learner(Config(learner=settings), layout, build_model(settings, layout, load=False))
        self._tokens, self._version = tokens, 0

    def update(self) -> None:
        """One row forward and backward, and a step."""
        rng = random.Random(self._version)
        row = TrainRow(
            source=ContributionId(update=self._version, group=0, trajectory=0),
            token_ids=tuple(rng.randrange(self.learner.bundle.vocab_size) for _ in range(self._tokens)),
            loss_mask=(0,) + (1,) * (self._tokens - 1),
            engine_logprobs=(0.0,) * self._tokens,
        )
        fields = {"item": 0, "update": self._version}
        self.learner.differentiate(Differentiate(**fields, policy_version=self._version, target=BATCH, rows=(row,)))
        self.learner.take_step(TakeStep(**fields, normaliser=float(self._tokens)))
        self._version += 1

    def repeat(self, folder: Path) -> dict[str, float]:
        """Seconds of one repeat, by column."""
        found = {"plain_update_s": timed(self.update)}
        found["waited_stall_s"] = timed(lambda: self.learner.save(folder / "waited"))
        found["waited_update_s"] = timed(self.update)
        started_s = time.perf_counter()
        save = SaveCheckpoint(item=0, folder=str(folder / "beside"), background=True)
        found["beside_stall_s"] = timed(lambda: self.learner.save_checkpoint(save))
        found["beside_update_s"] = timed(self.update)
        self.learner.finish_checkpoint(FinishCheckpoint(item=1))
        found["beside_whole_s"] = time.perf_counter() - started_s
        return found


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.disk or None) as scratch:
        folder = Path(scratch)
        model = Path(arguments.model)
        if arguments.model == "smollm2":
            model = folder / "model"
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SMOLLM2))
        bench = Bench(model, arguments.tokens)
        bench.update()  # warm-up; moments are there from now on
        rows = []
        for _ in range(arguments.repeats):
            rows.append(bench.repeat(folder))
            size = sum(file.stat().st_size for file in (folder / "beside").rglob("*"))
            for name in ("waited", "beside"):
                shutil.rmtree(folder / name)
            print("  ".join(f"{name} {rows[-1][name]:.3f}" for name in COLUMNS), flush=True)
    medians = {name: statistics.median(row[name] for row in rows) for name in COLUMNS}
    print(f"{size / 1e6:.0f} MB; medians of {len(rows)}: " + "  ".join(f"{n} {v:.3f}" for n, v in medians.items()))
    machine = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0)), "bytes": size}
    document = machine | {"model": arguments.model, "tokens": arguments.tokens, "repeats": rows, "medians": medians}
    Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a folder with a config.json, or smollm2")
    parser.add_argument("--tokens", type=int, default=512, help="of one update")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--disk", default="", help="folder to write in; default: the temporary one")
    parser.add_argument("--json", default="bench_checkpoint.json", help="where the numbers go")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
