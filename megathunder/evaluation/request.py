"""What is to be evaluated, from the words of the command line, and its attempts.

Called by tools/evaluate.py and `runs.py`. Raises UserError before an engine starts.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megathunder.config import Config, sandbox_checks
from megathunder.config.machine_checks import check_ports, check_server_urls, check_task_files
from megathunder.config.model_checks import check_model_folder
from megathunder.config.ranges import check_ranges
from megathunder.errors import ConfigError
from megathunder.evaluation import AttemptLog, Score, score
from megathunder.evaluation.comparable import SAMPLING_SETTINGS, setting_of
from megathunder.evaluation.session import missing, open_session, plan_of
from megathunder.metrics.run_folder import RunFolder
from megathunder.tasks import Task, heldout_tasks

GENERATED = ("shell", "math")
CHECKS = (check_ranges, check_server_urls, *sandbox_checks.ALL, check_task_files, check_ports)
LEAST_SAMPLING = 1e-3  # below this temperature attempts are copies of each other


def prepared(config: Config, options: argparse.Namespace) -> Config:
    """`config` with the tasks that --tasks names, checked."""
    config = with_tasks(config, options.tasks)
    check_independence(config, options.attempts)
    for validate in CHECKS:
        validate(config)
    return config


def with_tasks(config: Config, named: str) -> Config:
    """`config` with the task source that --tasks names."""
    path = Path(named)
    if named in GENERATED:
        source, named = named, config.tasks.path if named == "math" else ""
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


def heldout(config: Config, named: str) -> list[Task]:
    """The tasks to evaluate on."""
    tasks = heldout_tasks(config.tasks, config.tasks.heldout)
    if not tasks:
        raise ConfigError(
            f"{named} has no held-out tasks",
            expected="at least one (dev.jsonl, dev/, or several repositories)",
            remedy="split them with tools/prepare_data.py",
        )
    return tasks


def policy_folder(checkpoint: Path) -> Path:
    """The model folder of a checkpoint."""
    for folder in (checkpoint, checkpoint / "policy"):
        if (folder / "config.json").is_file():
            check_model_folder(str(folder), "--checkpoint")
            return folder.absolute()
    raise ConfigError(
        f"--checkpoint {checkpoint} holds neither config.json nor policy/config.json",
        expected="a Hugging Face model folder, or the folder of a finished run",
        remedy="name examples/policies/student, or convert with tools/convert.py",
    )


def sampling_settings(checkpoint: Path, settings: Sequence[str]) -> list[str]:
    """Words that give the sampling settings of the run in the folder `checkpoint`, and say so; none for a model folder,
    where --config names a file, and of settings that are given."""
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in settings}
    run = RunFolder(checkpoint)
    if not run.config.is_file() or "config" in given:
        return []
    trained, plain = run.read_config(), Config()
    names = [name for name in SAMPLING_SETTINGS if name not in given]
    values = {name: (setting_of(trained, name), setting_of(plain, name)) for name in names}
    changed = {name: value for name, (value, default) in values.items() if value != default}
    words = ", ".join(f"{name} = {value!r}" for name, value in changed.items()) or "the defaults"
    print(f"note: attempts are sampled as {checkpoint} sampled: {words}", flush=True)
    return [part for name, value in changed.items() for part in (f"--{name}", str(value))]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What is to be evaluated: model folders of one architecture, on tasks, with settings."""

    config: Config
    tasks: list[Task]
    policies: tuple[Path, ...]


def attempt_logs(request: EvaluationRequest, outs: Sequence[Path]) -> list[AttemptLog]:
    """The attempts at each policy, kept beside `outs`; raises UserError where they are those of another evaluation."""
    return [
        AttemptLog(out.with_name(f"{out.name}.attempts.jsonl"), plan_of(request.config, folder, request.tasks))
        for folder, out in zip(request.policies, outs)
    ]


async def scores(
    request: EvaluationRequest, logs: Sequence[AttemptLog], attempts: int, ks: list[int], server_logs: Path
) -> list[Score]:
    """The score of each policy; they share the servers."""
    tasks = request.tasks
    left = [missing(tasks, attempts, log) for log in logs]
    for folder, count in zip(request.policies, left):
        kept = len(tasks) * attempts - count
        print(f"{folder}: {len(tasks)} tasks, {attempts} attempts each: {count} to make, {kept} kept", flush=True)
    todo = [(folder, log) for folder, log, count in zip(request.policies, logs, left) if count]
    if todo:
        async with open_session(request.config, todo[0][0], server_logs) as session:
            for number, (folder, log) in enumerate(todo):
                if number:
                    await session.load(folder, number)
                await session.make(tasks, attempts, log)
    wanted = {(task.id, number) for task in tasks for number in range(attempts)}
    return [score([a for a in log.attempts if (a.task_id, a.number) in wanted], ks) for log in logs]
