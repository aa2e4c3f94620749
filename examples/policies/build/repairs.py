"""The shell commands by which a solver that knows the fix would mend a task: a look, then the change.

    repository   grep -nA6 'def NAME' FILE,  sed -i 'Ns/FAULTY/SOUND/' FILE      from a SWE-smith instance's own patch
    terminal     ls -R,                      the reference solution, whole       from the task's folder

For demonstrations of training tasks, never for a task that an agent works on. Called by
examples/policies/build/make_mender.py.
Faults of more than one line have no script (None).
"""

from __future__ import annotations

import re
from os.path import commonprefix
from pathlib import Path

from megathunder.tasks.patch import apply_patch, parse_patch
from megathunder.tasks.swe import Instance, repository_files
from megathunder.tasks.terminal import reference

Commands = tuple[str, ...]
WORDS = re.compile(r"\w+|\s+|[^\w\s]")
SPECIAL = re.compile(r"[][\\.*^$&/]")
DEFINED = re.compile(r"\s*def (\w+)")


def repository_commands(instance: Instance, folder: Path) -> Commands | None:
    """(look, change) for a SWE-smith instance whose fault is one line of one file."""
    clean = repository_files(folder, instance.repository, instance.base_commit)
    faulty, patches = apply_patch(clean, instance.patch), parse_patch(instance.patch)
    if len(patches) != 1 or patches[0].new not in clean:
        return None
    path = patches[0].new
    wrong, right = faulty[path].splitlines(), clean[path].splitlines()
    changed = [number for number, pair in enumerate(zip(wrong, right)) if pair[0] != pair[1]]
    if len(wrong) != len(right) or len(changed) != 1:
        return None
    (at,) = changed
    names = [match[1] for line in wrong[: at + 1] if (match := DEFINED.match(line))]
    look = f"grep -nA6 'def {names[-1]}' {path}" if names else f"cat {path}"
    return look, f"sed -i '{at + 1}{line_edit(wrong[at], right[at])}' {path}"


def line_edit(wrong: str, right: str) -> str:
    """The shortest sed command of whole words that turns one line into the other, up to the kind of quotes."""
    before, after = (WORDS.findall(line.replace("'", '"')) for line in (wrong, right))
    head = len(commonprefix([before, after]))
    tail = len(commonprefix([before[head:][::-1], after[head:][::-1]]))
    while head >= 0:
        old, new = ("".join(words[head : len(words) - tail]) for words in (before, after))
        first = len("".join(before[:head]))
        if old.strip() and wrong.find(old) == first and "'" not in new:
            return "s/{}/{}/".format(*(SPECIAL.sub(r"\\\g<0>", text) for text in (old, new)))
        head -= 1
    quoted = right.replace("'", '"')
    return f"c\\{quoted}"


def terminal_commands(folder: Path) -> Commands | None:
    """(look, change) for a terminal task that comes with a solution."""
    solution = reference(folder)
    if solution is None:
        return None
    return "ls -R", re.sub(r"\A#!.*\n", "", solution.script).strip()
