"""What a terminal task's own settings ask for: honoured, named as not honoured, or refused as nonsense.

    honoured        instruction; timeout_sec of agent and verifier; verifier.env; environment.docker_image and workdir
    no bearing      schema_version, version, task, metadata, solution, environment.build_timeout_sec
    not honoured    every other key: a sandbox has the limits of [sandbox], no GPU and no network; said once per run

Called by tasks.terminal.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator

Table = dict[str, object]
Refuse = Callable[[str, str], Exception]  # (seen, expected)

HONOURED = {
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec", "env"},
    "environment": {"docker_image", "workdir", "build_timeout_sec"},
}
NO_BEARING = {"schema_version", "version", "task", "metadata", "solution", "source"}
SIZE = re.compile(r"\d+(\.\d+)?\s*[KMGT]i?B?", re.IGNORECASE)
NUMBERS = ("cpus", "gpus", "memory_mb", "storage_mb", "build_timeout_sec")
SIZES = ("memory", "storage")
NAME = re.compile(r"[A-Za-z_]\w*")


def not_honoured(settings: Table, refuse: Refuse) -> Iterator[str]:
    """Dotted names of the keys of task.toml that ask for what a sandbox does not give. Raises what `refuse` gives for a
    value that means nothing."""
    for section, table in settings.items():
        if section in NO_BEARING:
            continue
        if section not in HONOURED:
            yield section
            continue
        if section == "environment" and isinstance(table, dict):
            _check_environment(table, refuse)
        for key in table if isinstance(table, dict) else ():
            if key not in HONOURED[section]:
                yield f"{section}.{key}"


def _check_environment(table: Table, refuse: Refuse) -> None:
    for key in NUMBERS:
        value = table.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise refuse(f"environment.{key} is {value!r}", "a number, not negative")
    for key in SIZES:
        value = table.get(key, 0)
        positive = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not positive and not (isinstance(value, str) and SIZE.fullmatch(value.strip())):
            raise refuse(f"environment.{key} is {value!r}", 'a size such as "2G"')
    if not isinstance(table.get("allow_internet", False), bool):
        raise refuse(f"environment.allow_internet is {table['allow_internet']!r}", "true or false")


def workdir_of(settings: Table, refuse: Refuse) -> str:
    """The folder that the task's settings let commands start in; empty where they say none."""
    environment = settings.get("environment")
    folder = environment.get("workdir", "") if isinstance(environment, dict) else ""
    if not isinstance(folder, str) or (folder and not folder.startswith("/")):
        raise refuse(f"environment.workdir is {folder!r}", "an absolute path")
    return folder.rstrip("/")


def with_environment(command: str, settings: Table, refuse: Refuse) -> str:
    """`command` with the variables of [verifier.env]."""
    verifier = settings.get("verifier")
    table = verifier.get("env", {}) if isinstance(verifier, dict) else {}
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise refuse(f"verifier.env is {table!r:.80}", "names with texts")
    for name, value in table.items():
        if not NAME.fullmatch(name) or "${" in value:
            raise refuse(
                f"verifier.env has {name} = {value!r:.40}", "a name and its text; the host has no variables for it"
            )
    assigned = " ".join(f"{name}={shlex.quote(value)}" for name, value in table.items())
    return f"env {assigned} {command}" if assigned else command
