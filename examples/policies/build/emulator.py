"""The few commands of scripted demonstrations, in Python: what the real tools print, a thousand times faster.

Called by tasks.demonstrations and examples/policies/build/make_policies.py, never by training: rollouts run
real commands in a sandbox.
A test runs every demonstration command in both and compares. A command it does not know gets bash's complaint.
"""

from __future__ import annotations

import re

from megathunder.tasks.shell import FIX_INPUTS, job_result
from megathunder.tasks.task import ExactAnswer, Task

EXPR = re.compile(r"expr \$\(cat (\w+)\) ([+-]) \$\(cat (\w+)\)")
SED = re.compile(r"sed -i s/(\w+)/(\w+)/ (\w+)")
ADDER = re.compile(r"expr \$1 \+ (\d+)\n")


class EmulatedShell:
    """The work folder of one task."""

    def __init__(self, task: Task) -> None:
        self.files = {f.path: f.content for f in task.files if not f.path.startswith(".")}
        self._queue = {f.path.removeprefix(".queue/"): f.content for f in task.files if f.path.startswith(".queue/")}

    def run(self, command: str) -> str:
        """What the command prints, standard error included."""
        if match := EXPR.fullmatch(command):
            return self._expr(*match.groups())
        if match := SED.fullmatch(command):
            return self._sed(*match.groups())
        word, *arguments = command.split() or [""]
        match (word, arguments):
            case ("ls", []):
                return "".join(f"{name}\n" for name in sorted(self.files))
            case ("cat", [_, *_]):
                return "".join(self._cat(name) for name in arguments)
            case ("wc", ["-l" | "-c" as flag, name]):
                return self._wc(flag, name)
            case ("grep", ["-l", text, "*"]):
                return "".join(f"{name}\n" for name in sorted(self.files) if text in self.files[name])
            case ("job", [name]):
                return self._job(name)
        return f"bash: line 1: {word}: command not found\n"

    def _cat(self, name: str) -> str:
        return self.files.get(name, f"cat: {name}: No such file or directory\n")

    def _wc(self, flag: str, name: str) -> str:
        if name not in self.files:
            return f"wc: {name}: No such file or directory\n"
        content = self.files[name]
        return f"{content.count(chr(10)) if flag == '-l' else len(content.encode())} {name}\n"

    def _expr(self, first: str, sign: str, second: str) -> str:
        missing = "".join(self._cat(name) for name in (first, second) if name not in self.files)
        left, right = (self.files.get(name, "").strip() for name in (first, second))
        if missing or not (left.isdigit() and right.isdigit()):
            return missing + "expr: syntax error\n"
        return f"{int(left) + int(right) if sign == '+' else int(left) - int(right)}\n"

    def _sed(self, old: str, new: str, name: str) -> str:
        if name not in self.files:
            return f"sed: can't read {name}: No such file or directory\n"
        self.files[name] = "".join(line.replace(old, new, 1) for line in self.files[name].splitlines(keepends=True))
        return ""

    def _job(self, name: str) -> str:
        if name not in self._queue:
            return "no such job\n"
        seconds, busy, seed = self._queue[name].split()
        if int(busy) > 0:
            self._queue[name] = f"{seconds} {int(busy) - 1} {seed}\n"
            return "busy\n"
        return f"{job_result(int(seed))}\n"


def emulated_reward(task: Task, shell: EmulatedShell, answer: str) -> float:
    """The reward of `answer` after what was done in `shell`; only commands of demonstrations are understood."""
    if isinstance(task.grading, ExactAnswer):
        return float(answer.strip() == task.grading.answer)
    match = ADDER.fullmatch(shell.files[task.grading.taken[0]])
    printed = [str(x + int(match.group(1))) for x in FIX_INPUTS] if match else []
    return float("\n".join(printed) == task.grading.expected)
