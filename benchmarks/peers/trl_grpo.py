#!/usr/bin/env python
"""Our trainer beside TRL's GRPOTrainer on equal work, step by step in turn: `benchmarks/peers/trl_grpo.py --json OUT`.

Same policy (11M parameters, random weights), prompts, reward, temperature, optimizer, normalisation and clip; a step is
one update from its first rollout request to the new weights in the engine. TRL runs in an environment of its own, once
as it is and once with oneDNN for its matrix products (two lines in a script). Every side runs with its default
settings and all cores of this process. The first step of each is a warm-up. Order alternates from round to round.

    ratio                  seconds of TRL's step by seconds of ours, per round
    ratio_with_onednn      the same with oneDNN on TRL's side
    ratio_per_token        `ratio` with both divided by the tokens that the step sampled, since lengths are random
    first_step             loss and gradient norm of both for TRL's first batch (`first_step.py`)

Exit status: 0; 1 where the first step differs by more than 1e-4; 2 for what must be corrected.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import tyro

from benchmarks.comparison.alternation import Alternation
from benchmarks.comparison.machine import processor
from benchmarks.peers.environment import trl_python, versions_of
from benchmarks.peers.first_step import compare_first_step
from benchmarks.peers.gate import open_gate, read_steps
from benchmarks.peers.own_config import own_config
from benchmarks.peers.policy import make_policy
from benchmarks.peers.prompts import write_prompts
from benchmarks.peers.workload import WORKLOADS, Workload
from megathunder.config.model_shape import read_model_shape
from megathunder.config.toml import to_toml
from megathunder.errors import UserError
from megathunder.metrics.output_file import output_file
from megathunder.processes import die_with_parent

HERE = Path(__file__).resolve().parent
STEP_S = 600.0  # limit of a step, start of the process included
LATEST_S = 60.0  # for processes to end by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Compare with TRL on equal work."""

    json: Path
    """File that receives every number; workloads that it already holds and are not asked for are kept."""
    workloads: tuple[str, ...] = tuple(WORKLOADS)
    """Of varying and fixed."""
    steps: int = 5
    """Measured steps of each side."""
    trl_rows: int = 8
    """Sequences of one forward and backward pass of TRL."""
    environment: Path = ROOT / "build" / "peers" / "trl"
    """TRL's virtual environment; made where it is missing."""
    work: Path = ROOT / "build" / "peers" / "work"
    """Folder for policies, logs and runs."""


class Side:
    """One trainer in a process of its own, which takes a step when it is let."""

    def __init__(self, name: str, command: Sequence[str], out: Path, steps_file: Path) -> None:
        self.name, self._gate, self._file = name, out / "gate", steps_file
        self._taken, self._log = 0, out.with_suffix(".log")
        out.mkdir(parents=True, exist_ok=True)
        for old in (self._gate, self._file):
            old.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=lambda: die_with_parent(signal.SIGTERM),
            )

    def take_step(self) -> dict:
        """Let it take one; its own line about it, with `wall_s` from here to there."""
        started_s, deadline_s = time.monotonic(), time.monotonic() + STEP_S
        open_gate(self._gate, self._taken + 1)
        while len(lines := read_steps(self._file)) <= self._taken:
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise UserError(
                    f"{self.name} did not end step {self._taken} (exit status {self._process.poll()}): "
                    + " | ".join(self._log.read_text().splitlines()[-3:]),
                    expected=f"a step within {STEP_S:.0f} s",
                    remedy=f"read {self._log}",
                )
            time.sleep(0.005)
        self._taken += 1
        return lines[self._taken - 1] | {"wall_s": time.monotonic() - started_s}

    def end(self, *, at_once: bool) -> None:
        """Wait for the process, which has taken all its steps; `at_once`: it has not."""
        if at_once:
            self._process.terminate()
        try:
            self._process.wait(LATEST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(argv: list[str]) -> int:
    """Measure, write, show; the exit status."""
    arguments = tyro.cli(Arguments, args=argv, description=__doc__)
    try:
        unknown = sorted(set(arguments.workloads) - set(WORKLOADS))
        if unknown or arguments.steps < 1:
            raise UserError(
                f"--workloads {' '.join(arguments.workloads)} --steps {arguments.steps}",
                expected=f"some of {', '.join(WORKLOADS)}, and at least one step",
                remedy="correct the options",
            )
        output_file(arguments.json)
        python = trl_python(arguments.environment)
        text = arguments.json.read_text() if arguments.json.exists() else ""
        found = json.loads(text or "{}") | {"machine": machine(), "versions": versions_of(python)}
        for name in arguments.workloads:
            found[name] = measure(WORKLOADS[name], python, arguments)
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
            show(name, found[name])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if all(found[name]["first_step"]["agrees"] for name in arguments.workloads) else 1


def machine() -> dict[str, object]:
    return {"processor": processor(), "cores": len(os.sched_getaffinity(0))}


def measure(workload: Workload, python: Path, arguments: Arguments) -> dict[str, object]:
    """All sides in turn, and the first step."""
    folder, rounds = (arguments.work / workload.name).absolute(), arguments.steps + 1
    (folder / "policy").mkdir(parents=True, exist_ok=True)
    make_policy(folder / "policy", workload)
    write_prompts(folder / "prompts.jsonl", folder / "policy", workload)
    workload.write(folder / "workload.json")
    sides = start(folder, workload, python, rounds, arguments.trl_rows)
    taken: dict[str, list[dict]] = {side.name: [] for side in sides}
    done = False
    try:
        for number in range(rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                taken[side.name].append(side.take_step())
        done = True
    finally:
        for side in sides:
            side.end(at_once=not done)
    vocabulary = read_model_shape(str(folder / "policy")).vocabulary
    first = compare_first_step(folder / "trl", own_config(folder, workload, updates=1), taken["trl"][0], vocabulary)
    return summarise(taken) | {"first_step": first.as_table() | {"agrees": first.agrees}, "steps": taken}


def start(folder: Path, workload: Workload, python: Path, rounds: int, rows: int) -> list[Side]:
    """The three sides, waiting for their first step."""
    (folder / "own.toml").write_text(to_toml(own_config(folder, workload, updates=rounds)))
    Alternation(learn=True).write(folder / "alternation.json")
    own = [sys.executable, str(HERE / "own_side.py"), "--alternation", str(folder / "alternation.json")]
    trl = [str(python), str(HERE / "trl_side.py"), str(folder), "--steps", str(rounds), "--rows", str(rows)]
    sides = [
        Side("own", [*own, "--config", str(folder / "own.toml")], folder / "own", folder / "own" / "metrics.jsonl")
    ]
    for name, more in (("trl", []), ("trl_onednn", ["--onednn"])):
        out = folder / name
        sides.append(Side(name, [*trl, "--name", name, *more], out, out / "steps.jsonl"))
    return sides


def tokens_of(step: dict) -> float:
    """Sampled tokens of a step of either side."""
    return step["tokens"] if "tokens" in step else step["response_tokens_mean"] * step["trajectories"]


def summarise(taken: dict[str, list[dict]]) -> dict[str, object]:
    """Ratios per round, the warm-up left out, and the seconds they are made of."""
    own, trl, onednn = (taken[name][1:] for name in ("own", "trl", "trl_onednn"))
    best = [min(a["wall_s"], b["wall_s"]) for a, b in zip(trl, onednn, strict=True)]
    return {
        "ratio": summary([b["wall_s"] / a["wall_s"] for a, b in zip(own, trl, strict=True)]),
        "ratio_with_onednn": summary([b["wall_s"] / a["wall_s"] for a, b in zip(own, onednn, strict=True)]),
        "ratio_to_best": summary([b / a["wall_s"] for a, b in zip(own, best, strict=True)]),
        "ratio_per_token": summary(
            [b["wall_s"] / tokens_of(b) / (a["wall_s"] / tokens_of(a)) for a, b in zip(own, trl, strict=True)]
        ),
        "step_s": {name: summary([step["wall_s"] for step in steps[1:]]) for name, steps in taken.items()},
        "tokens": {name: summary([tokens_of(step) for step in steps[1:]]) for name, steps in taken.items()},
    }


def summary(values: list[float]) -> dict[str, object]:
    return {"median": statistics.median(values), "runs": values}


def show(name: str, found: dict) -> None:
    """What a person reads."""
    seconds = ", ".join(f"{side} {times['median']:.2f} s" for side, times in found["step_s"].items())
    print(f"{name}: {seconds} per step")
    for key in ("ratio", "ratio_with_onednn", "ratio_to_best", "ratio_per_token"):
        print(f"  {key} {found[key]['median']:.2f} ({', '.join(f'{value:.2f}' for value in found[key]['runs'])})")
    apart = found["first_step"]["relative_difference"]
    print(f"  first step: loss differs by {apart['loss']:.1e}, gradient norm by {apart['grad_norm']:.1e}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
