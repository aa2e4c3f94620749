#!/usr/bin/env python
"""Evaluate a policy on tasks it was not trained on: pass@k with confidence intervals, from independent attempts.

    python tools/evaluate.py --checkpoint examples/policies/student --tasks shell --attempts 5 --json out.json
    python tools/evaluate.py --checkpoint runs/mine --tasks examples/tasks/swe --config examples/swe_cpu.toml ...

--checkpoint  a Hugging Face model folder, or a run folder that holds `policy/`
--tasks       shell, math, or a file or folder of tasks (SWE-smith, SWE-bench, Harbor, Terminal-Bench 1, SETA)
--attempts    attempts a task (default 5);  --k 1,3,5: for which k
--json        the result; finished attempts are kept beside it in OUT.attempts.jsonl and are not made again
Everything else is a setting as in tools/train.py: --config FILE, --tasks.heldout N, --rollout.urls URL, ...
Exit status: 0 done, 1 failed, 2 a setting must be mended.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from megathunder.config import Config
from megathunder.config.bounds import numbers_are_in_range
from megathunder.config.load import load_config
from megathunder.config.machine import ports_are_free, the_sandbox_is_installed
from megathunder.errors import ConfigError, MegathunderError, UserError
from megathunder.evaluation import Attempt, AttemptLog, Plan, Score, run_attempts, score
from megathunder.evaluation.estimate import Estimate
from megathunder.rollout import Collector, ServerControl, ServerPool
from megathunder.sandbox import SandboxPool, grade
from megathunder.tasks import ChatFormat, Task, build_source

GENERATED = ("shell", "math")
LAWS = (numbers_are_in_range, the_sandbox_is_installed, ports_are_free)
EVERY = 10  # attempts between two lines of progress
LEAST_SAMPLING = 1e-3  # below this temperature attempts are copies of each other


def main(argv: list[str]) -> int:
    """Run, print the table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--tasks", default="shell")
    parser.add_argument("--attempts", type=int, default=5)
    parser.add_argument("--k", default="1,3,5")
    parser.add_argument("--json", required=True)
    options, settings = parser.parse_known_args(argv)
    try:
        config = with_tasks(load_config(settings, prog="evaluate.py"), options.tasks)
        folder = policy_folder(Path(options.checkpoint))
        config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, model=str(folder)))
        check_independence(config, options.attempts)
        for law in LAWS:
            law(config)
        ks = read_ks(options.k, options.attempts)
        out = Path(options.json)
        out.parent.mkdir(parents=True, exist_ok=True)
        tasks = build_source(config.tasks).heldout(config.tasks.heldout)
        if not tasks:
            raise ConfigError(
                f"{options.tasks} has no held-out tasks",
                expected="at least one (dev.jsonl, dev/, or several repositories)",
                remedy="split them with tools/prepare_data.py",
            )
        log = AttemptLog(out.with_name(out.name + ".attempts.jsonl"), plan_of(config, folder, tasks))
        asyncio.run(evaluate(config, folder, tasks, options.attempts, log, out.parent / "logs"))
        wanted = {(task.id, number) for task in tasks for number in range(options.attempts)}
        result = score([a for a in log.attempts if (a.task_id, a.number) in wanted], ks)
        out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
        show(result)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MegathunderError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def with_tasks(config: Config, named: str) -> Config:
    """`config` with the task source that --tasks names."""
    path = Path(named)
    if named in GENERATED:
        source, named = named, ""
    elif not path.exists():
        raise ConfigError(
            f"--tasks {named}: no such file or folder",
            expected=f"{', '.join(GENERATED)}, or a path",
            remedy="name examples/tasks/swe or examples/tasks/terminal, for example",
        )
    else:
        source = "terminal" if any(path.glob("**/task.toml")) or any(path.glob("**/task.yaml")) else "swe"
        named = str(path.absolute())
    return dataclasses.replace(config, tasks=dataclasses.replace(config.tasks, source=source, path=named))


def policy_folder(checkpoint: Path) -> Path:
    """The model folder of a checkpoint."""
    for folder in (checkpoint, checkpoint / "policy"):
        if (folder / "config.json").is_file():
            return folder.absolute()
    raise ConfigError(
        f"--checkpoint {checkpoint} holds neither config.json nor policy/config.json",
        expected="a Hugging Face model folder, or the folder of a finished run",
        remedy="name examples/policies/student, or convert with tools/convert.py",
    )


def read_ks(text: str, attempts: int) -> list[int]:
    """The k of pass@k that `attempts` allow."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if attempts < 1 or not words or not all(word.isdigit() and int(word) > 0 for word in words):
        raise ConfigError(
            f"--attempts {attempts} --k {text}",
            expected="at least one attempt, and a comma list of whole numbers above 0",
            remedy="for example --attempts 5 --k 1,3,5",
        )
    return [k for k in map(int, words) if k <= attempts]


def check_independence(config: Config, attempts: int) -> None:
    """Attempts must be draws."""
    if attempts > 1 and config.rollout.temperature < LEAST_SAMPLING:
        raise ConfigError(
            f"--attempts {attempts} with rollout.temperature = {config.rollout.temperature}",
            expected="a temperature at which attempts differ: pass@k is about independent draws",
            remedy="set --rollout.temperature 1.0, or --attempts 1",
        )


def plan_of(config: Config, folder: Path, tasks: list[Task]) -> Plan:
    """Digests of what is evaluated, and the settings that an outcome depends on."""
    weights = hashlib.blake2b(digest_size=16)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".jinja")):
        weights.update(path.name.encode() + path.read_bytes())
    rollout = config.rollout
    limits = {
        name: getattr(rollout, name) for name in ("max_new_tokens", "max_tokens", "observation_characters", "top_p")
    }
    return Plan(
        checkpoint=weights.hexdigest(),
        tasks=hashlib.blake2b(msgspec.msgpack.encode(tasks), digest_size=16).hexdigest(),
        seed=config.run.seed,
        temperature=rollout.temperature,
        limits=" ".join(f"{name}={value}" for name, value in limits.items()),
    )


async def evaluate(config: Config, folder: Path, tasks: list[Task], attempts: int, log: AttemptLog, logs: Path) -> None:
    """Make the attempts that `log` does not have."""
    from transformers import AutoTokenizer  # seconds to import

    missing = sum(not log.finished(task.id, n) for task in tasks for n in range(attempts))
    print(f"{len(tasks)} tasks, {attempts} attempts each: {missing} to make, {len(tasks) * attempts - missing} kept")
    if not missing:
        return

    def on_end(attempt: Attempt) -> None:
        nonlocal missing
        log.add(attempt)
        missing -= 1
        if missing % EVERY == 0:
            print(f"  {missing} attempts left", flush=True)

    async with AsyncExitStack() as stack:
        sandboxes = SandboxPool(config.sandbox)
        stack.push_async_callback(sandboxes.close)
        await sandboxes.start()
        servers = ServerPool(config.rollout, folder, folder=logs)
        stack.push_async_callback(servers.close)
        await servers.start()
        collector = Collector(
            config.rollout,
            config.sandbox,
            servers=servers,
            sandboxes=sandboxes,
            grade=grade,
            chat=ChatFormat(AutoTokenizer.from_pretrained(folder)),
            seed=config.run.seed,
        )
        await stack.enter_async_context(collector)
        version = await served_version(config, servers)
        await run_attempts(collector, tasks, attempts, on_end, policy_version=version, finished=log.finished)


async def served_version(config: Config, servers: ServerPool) -> int:
    """The one version that every server holds; servers given by address may hold any."""
    async with ServerControl(timeout_s=config.rollout.request_timeout_s, api_key=config.rollout.api_key) as control:
        versions = {server.name: await control.version(server) for server in servers.ready}
    if len(set(versions.values())) != 1:
        raise ConfigError(
            f"the servers hold different versions: {versions}",
            expected="one policy",
            remedy="give servers of one policy (rollout.urls), or leave the addresses empty to start some",
        )
    return next(iter(versions.values()))


def show(result: Score) -> None:
    """The table that a person reads."""
    console, table = Console(highlight=False), Table(title=f"{result.tasks} tasks, {result.sent} attempts")
    for heading in ("", "over all", "over completed"):
        table.add_column(heading)
    over_completed = result.accuracy_over_completed
    table.add_row(
        "accuracy", f"{result.accuracy_over_all:.1%}", "–" if over_completed is None else f"{over_completed:.1%}"
    )
    for row in result.pass_at:
        table.add_row(f"pass@{row.k}", in_words(row.over_all), in_words(row.over_completed))
    console.print(table)
    lost = result.sent - result.completed
    if lost:
        console.print(f"{lost} attempts were lost by the machinery: wrong on the left, not counted on the right")


def in_words(estimate: Estimate) -> str:
    """`41.2 % [33.0, 50.1] of 64 tasks`"""
    if estimate.value is None or estimate.low is None or estimate.high is None:
        return "–"
    return f"{estimate.value:.1%} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}] of {estimate.tasks} tasks"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
