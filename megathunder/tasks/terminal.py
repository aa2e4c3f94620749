"""Folders of terminal tasks: Harbor (Terminal-Bench 2), SETA and Terminal-Bench 1.

    Harbor            task.toml, instruction.md, environment/, tests/test.sh, solution/solve.sh
    SETA              the same with weights.json {test: weight}, which add up to 1
    Terminal-Bench 1  task.yaml, Dockerfile, run-tests.sh, tests/, solution.sh

Of a Dockerfile, WORKDIR and COPY make the files; a RUN line other than a package installation, or a target outside the
folders a sandbox has (/app, /data), needs a container and is refused by name. Tests never lie beside the agent. The
time limits of agent and verifier hold where they are shorter than the run's (rollout.deadline_s,
sandbox.grading_budget_s).
Called by tasks.source and tools/prepare_data.py.
"""

from __future__ import annotations

import json
import logging
import math
import posixpath
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import yaml

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError, UserError
from megathunder.tasks.row_files import unicode_error
from megathunder.tasks.task import Task, TaskFile, TerminalTests
from megathunder.tasks.terminal_settings import not_honoured, with_environment, workdir_of

log = logging.getLogger(__name__)
_said: set[str] = set()
ROOTS = ("app", "data")  # folders of / that a sandbox keeps in its work folder
HELDOUT_SHARE = 0.05
AGENT_LIMITS = (("agent", "timeout_sec"), ("max_agent_timeout_sec",))  # Harbor, Terminal-Bench 1
VERIFIER_LIMITS = (("verifier", "timeout_sec"), ("max_test_timeout_sec",))
INSTALL = re.compile(r"\b(apt-get|apt|pip3?|python3? -m pip|uv pip)\b")
HARMLESS = re.compile(r"^(mkdir|chmod|rm -rf /var/lib/apt|set |true$)")
PROMPT = (
    "{instruction}\n\nReply with one shell command at a time; its output follows. When it is done, reply: submit done"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A solution that must earn full reward; for validation only."""

    script: str


def read_terminal_tasks(config: TasksConfig) -> tuple[list[Task], list[Task]]:
    """(train, held-out) tasks: those of train/ and dev/ where there are such folders, else by a digest of the name."""
    path = Path(config.path)
    if (path / "train").is_dir() or (path / "dev").is_dir():
        train, dev = (task_folders(path / p) if any((path / p).glob("*")) else [] for p in ("train", "dev"))
    else:
        train, dev = split_folders(task_folders(path))
    parts = [[read_folder(folder, config.max_turns) for folder in part] for part in (train[: config.size], dev)]
    return parts[0], parts[1]


def split_folders(folders: list[Path]) -> tuple[list[Path], list[Path]]:
    """(train, held-out): whole families, one in twenty and at least one where there are several, chosen by a digest of
    the name; tasks whose names differ in a number at the end are one family."""
    families = sorted({_family(f) for f in folders}, key=lambda n: blake2b(n.encode(), digest_size=8).digest())
    count = max(1, round(HELDOUT_SHARE * len(families))) if len(families) > 1 else 0
    heldout = set(families[:count])
    return [f for f in folders if _family(f) not in heldout], [f for f in folders if _family(f) in heldout]


def task_folders(path: Path) -> list[Path]:
    """`path` itself if it is a task, else the tasks in it."""
    found = [path, *sorted(p for p in path.glob("*") if p.is_dir())]
    folders = [p for p in found if (p / "task.toml").is_file() or (p / "task.yaml").is_file()]
    if not folders:
        raise ConfigError(
            f"{path} holds no folder with task.toml or task.yaml",
            expected="a Harbor, SETA or Terminal-Bench 1 task, or a folder of such tasks",
            remedy="name one, for example examples/tasks/terminal",
        )
    return folders


def read_folder(folder: Path, max_turns: int) -> Task:
    """One task; raises UserError that says what of it cannot be used."""
    classic = (folder / "task.yaml").is_file()
    settings = _settings(folder, "task.yaml" if classic else "task.toml")
    instruction = settings.get("instruction", "") if classic else _read(folder, "instruction.md")
    if not isinstance(instruction, str) or not instruction.strip():
        raise _unusable(folder, "the instruction is empty", "what is to be done, in words")
    build = folder if classic else folder / "environment"
    workdir, files = container_files(build)

    def refuse(seen: str, expected: str) -> UserError:
        return _unusable(folder, seen, expected)

    if not classic:
        workdir = workdir_of(settings, refuse) or workdir
        _check_below_roots(workdir, build)
        _say_not_honoured(folder, [*not_honoured(settings, refuse)])
    tests = tuple(_folder_files(folder / "tests", "tests"))
    command, weights = "", tuple[tuple[str, float], ...]()
    if (folder / "weights.json").is_file():
        weights = read_weights(folder / "weights.json")
    elif not classic:
        command = with_environment("bash /tests/test.sh", settings, refuse)
    if not tests:
        raise _unusable(folder, "tests/ is missing or empty", "tests")
    return Task(
        id=folder.name,
        kind="terminal_bench_1" if classic else "seta" if weights else "harbor",
        prompt=PROMPT.format(instruction=instruction.strip()),
        files=tuple(files),
        grading=TerminalTests(folder=workdir.lstrip("/"), files=tests, command=command, weights=weights),
        max_turns=max_turns,
        request=instruction.strip(),
        image=_image(folder, settings),
        folder=workdir,
        setup=f"mkdir -p {' '.join(f'/work/{root}' for root in ROOTS)}",
        agent_limit_s=_limit_s(folder, settings, *AGENT_LIMITS[classic]),
        verifier_limit_s=_limit_s(folder, settings, *VERIFIER_LIMITS[classic]),
    )


def _image(folder: Path, settings: dict[str, object]) -> str:
    environment = settings.get("environment") or {}
    image = environment.get("docker_image", "") if isinstance(environment, dict) else environment
    if not isinstance(environment, dict) or not isinstance(image, str):
        raise _unusable(folder, f"environment is {environment!r}", "a table, its docker_image a text")
    return image


def _limit_s(folder: Path, settings: dict[str, object], *path: str) -> float:
    """The seconds that a task's settings hold under the keys of `path`; 0 where they say nothing."""
    found: object = settings
    for key in path:
        found = found.get(key, 0) if isinstance(found, dict) else 0
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise _unusable(folder, f"{'.'.join(path)} is {found!r}", "a number of seconds, not negative")
    return float(found)


def reference(folder: Path) -> Reference | None:
    """The solution that comes with a task, if one does."""
    for path in (folder / "solution" / "solve.sh", folder / "solution.sh"):
        if path.is_file():
            return Reference(script=_read(path.parent, path.name))
    return None


def read_weights(path: Path) -> tuple[tuple[str, float], ...]:
    """SETA's weights; they are positive and add up to 1."""
    weights = _settings(path.parent, path.name)
    if (
        not weights
        or not all(isinstance(weight, int | float) for weight in weights.values())
        or min(weights.values()) <= 0
        or not math.isclose(sum(weights.values()), 1.0, abs_tol=1e-6)
    ):
        raise _unusable(path.parent, f"weights.json is {weights}", "positive weights that add up to 1")
    return tuple(sorted((name, float(weight)) for name, weight in weights.items()))


def container_files(build: Path) -> tuple[str, list[TaskFile]]:
    """(working folder, files relative to /) that a Dockerfile would make."""
    workdir, files = "/app", dict[str, TaskFile]()
    for instruction, rest in _dockerfile(build / "Dockerfile") if (build / "Dockerfile").is_file() else ():
        if instruction == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir, rest.strip()))
        elif instruction in ("COPY", "ADD"):
            *sources, target = _words(build, rest)
            for source in sources:
                files.update((f.path, f) for f in _copied(build, source, posixpath.join(workdir, target)))
        elif instruction == "RUN":
            for step in re.split(r"&&|;|\n", rest):
                if step.strip() and not INSTALL.search(step) and not HARMLESS.match(step.strip()):
                    raise _unusable(build, f"its Dockerfile runs {step.strip()!r}", "COPY, WORKDIR and installations")
    for path in (*files, workdir.lstrip("/")):
        _check_below_roots(path, build)
    return workdir, list(files.values())


def _check_below_roots(path: str, folder: Path) -> None:
    if path.lstrip("/").split("/")[0] not in ROOTS:
        raise _unusable(folder, f"it uses /{path.lstrip('/')}", f"files below /{', /'.join(ROOTS)}")


def _say_not_honoured(folder: Path, names: list[str]) -> None:
    """Once per set of names and process: a thousand tasks of one author ask for the same."""
    if names and (asked := ", ".join(sorted(names))) not in _said:
        _said.add(asked)
        log.warning("task %s (and others like it): %s not honoured; [sandbox] has the limits", folder.name, asked)


def _words(build: Path, rest: str) -> list[str]:
    """Sources and target of a COPY or ADD line. Sources are relative to the folder of the Dockerfile, as for a daemon,
    and lie in it."""
    try:
        *sources, target = [part for part in shlex.split(rest) if not part.startswith("--")]
    except ValueError as error:
        raise _unusable(build, f"its Dockerfile copies {rest.strip()!r} ({error})", "sources and a target") from None
    sources = [posixpath.normpath(source).lstrip("/") for source in sources]
    if not sources or any(source.split("/")[0] == ".." for source in sources):
        raise _unusable(build, f"its Dockerfile copies {rest.strip()!r}", "files beside it, and a target")
    return [*sources, target]


def _dockerfile(path: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", _read(path.parent, path.name))
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word and not word.startswith("#"):
            yield word.upper(), rest


def _copied(build: Path, source: str, target: str) -> Iterator[TaskFile]:
    origin = build / source
    if origin.is_dir():
        yield from _folder_files(origin, target.strip("/"))
    else:
        try:
            found = sorted(build.glob(source))
        except ValueError as error:
            raise _unusable(build, f"its Dockerfile copies {source!r} ({error})", "a pattern of names") from None
        for path in found:
            name = posixpath.join(target, path.name) if target.endswith(("/", "/.")) else target
            yield _file(path, posixpath.normpath(name).lstrip("/"))


def _folder_files(folder: Path, target: str) -> Iterator[TaskFile]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield _file(path, posixpath.normpath(posixpath.join(target, path.relative_to(folder).as_posix())))


def _file(path: Path, target: str) -> TaskFile:
    try:
        return TaskFile(path=target, content=path.read_text(), mode=0o755 if path.stat().st_mode & 0o111 else 0o644)
    except UnicodeDecodeError:
        raise _unusable(path.parent, f"{path.name} is not UTF-8 text", "text files") from None


def _settings(folder: Path, name: str) -> dict[str, object]:
    """The table that a TOML, YAML or JSON file of a task holds."""
    readers = {".toml": tomllib.loads, ".yaml": yaml.safe_load, ".json": json.loads}
    try:
        table = readers[Path(name).suffix](_read(folder, name))
    except (ValueError, yaml.YAMLError) as error:
        raise _unusable(folder, f"{name} cannot be read: {str(error).splitlines()[0]}", "a well-formed file") from None
    if not isinstance(table, dict):
        raise _unusable(folder, f"{name} holds no table", "names with values")
    if error := unicode_error(table, f"task {folder}: {name}"):
        raise error
    return table


def _read(folder: Path, name: str) -> str:
    path = folder / name
    if not path.is_file():
        raise _unusable(folder, f"{name} is missing", name)
    try:
        return path.read_text()
    except UnicodeDecodeError:
        raise _unusable(folder, f"{name} is not UTF-8 text", "text") from None


def _family(folder: Path) -> str:
    return folder.name.rstrip("0123456789").rstrip("-_")


def _unusable(folder: Path, seen: str, expected: str) -> UserError:
    return UserError(
        f"task {folder}: {seen}",
        expected=expected,
        remedy="leave the task out (tools/prepare_data.py terminal does), or run it with a container backend",
    )
