"""Evaluate policies on tasks they were not trained on: pass@k with confidence intervals, from independent attempts.

    python tools/evaluate.py --checkpoint examples/policies/student --tasks shell --attempts 5 --json out.json
    python tools/evaluate.py --checkpoint runs/mine --tasks examples/tasks/swe --config examples/swe_cpu.toml ...
    python tools/evaluate.py --runs runs/a runs/b --tasks shell --attempts 5 --json out.json       schedules by cost
    python tools/evaluate.py --runs runs/a runs/b --json out.json                                  the same, no engine

--checkpoint  a Hugging Face model folder, or a run folder that holds `policy/`: then attempts are sampled as that run
              sampled (temperature, top_p, limits, agent), but for what --config or a setting says
--tasks       shell, math, or a file or folder of tasks (SWE-smith, SWE-bench, Harbor, Terminal-Bench 1, SETA)
--attempts    attempts a task (default 5);  --k 1,3,5: for which k
--json        the result; finished attempts are kept beside it in OUT.attempts.jsonl and are not made again
--runs        runs to compare: what each policy at a fixed cadence (run.export_every, and the one they began with)
              scores against GPU-hours or machine-hours of training; a figure is written beside OUT. Without --tasks
              the evaluations that the runs made themselves are compared (run.evaluate_every). Runs that are scored on
              different tasks, or under different sampling settings, are refused
--target      the pass@k to be reached (default: the highest that every run reaches);  --budget-hours: to score at
              (default: the hours of the shortest run)
Everything else is a setting as in tools/train.py: --config FILE, --tasks.heldout N, --rollout.urls URL, ...
Exit status: 0 done, 1 failed, 2 the configuration is invalid, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import msgspec

from megathunder.config.load import load_config
from megathunder.errors import MegathunderError, UserError
from megathunder.evaluation.compare_runs import compare_runs
from megathunder.evaluation.request import (
    EvaluationRequest,
    attempt_logs,
    heldout,
    policy_folder,
    prepared,
    read_ks,
    sampling_settings,
    scores,
)
from megathunder.evaluation.score_tables import show
from megathunder.evaluation.session import plan_of
from megathunder.metrics.output_file import output_file
from megathunder.process_exit import INTERRUPTED


def main(argv: list[str]) -> int:
    """Run, print the table and write the JSON file."""
    options, settings = read_arguments(argv)
    out = Path(options.json)
    try:
        ks = read_ks(options.k, options.attempts)
        output_file(out)
        if options.runs:
            compare_runs(options, settings, ks, out)
        else:
            sampling = sampling_settings(Path(options.checkpoint), settings)
            config = prepared(load_config([*settings, *sampling], prog="evaluate.py"), options)
            folder = policy_folder(Path(options.checkpoint))
            request = EvaluationRequest(config=config, tasks=heldout(config, options.tasks), policies=(folder,))
            logs = attempt_logs(request, [out])
            (result,) = asyncio.run(scores(request, logs, options.attempts, ks, out.parent / "logs"))
            plan = {"policy": str(folder), "named": options.tasks, "plan": plan_of(config, folder, request.tasks)}
            content = plan | msgspec.to_builtins(result)
            out.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
            show(result)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MegathunderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"interrupted: finished attempts are kept beside {out}; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    return 0


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options of this tool, settings)"""
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--checkpoint")
    what.add_argument("--runs", nargs="+", type=Path)
    parser.add_argument("--tasks", default="")
    parser.add_argument("--attempts", type=int, default=5)
    parser.add_argument("--k", default="1,3,5")
    parser.add_argument("--target", type=float)
    parser.add_argument("--budget-hours", type=float)
    parser.add_argument("--json", required=True)
    options, settings = parser.parse_known_args(argv)
    if options.checkpoint and not options.tasks:
        options.tasks = "shell"
    return options, settings
