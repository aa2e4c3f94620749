"""Scripted demonstrations of the shell tasks: sound ones for a teacher, mostly unsound ones for a student.

A sloppy demonstrator is sound with probability `soundness`, else it follows a wrong habit: it counts lines where it
should read, stops at the first link, reports "busy" as a result, says "done" without editing. A policy that imitates
it is wrong when greedy and right sometimes when sampled, so that reinforcement learning has to change the mode.
Called by examples/policies/build/make_policies.py.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass

from examples.policies.build.emulator import EmulatedShell, emulated_reward
from megathunder.tasks.chat import observation_text
from megathunder.tasks.task import Task

Script = Generator[str, str, str]  # yields commands, is sent observations, returns the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Commands with their observations, then the answer, and what it earns."""

    prompt: str
    turns: tuple[tuple[str, str], ...]
    answer: str
    reward: float


def demonstrate(task: Task, rng: random.Random, soundness: float, characters: int) -> Demonstration:
    """One scripted attempt; observations are cut to `characters`."""
    sound = rng.random() < soundness
    script = (SOUND if sound else HABITS)[task.kind](Scene(task, rng))
    shell, turns, answer = EmulatedShell(task), list[tuple[str, str]](), ""
    try:
        command = next(script)
        while True:
            seen = observation_text(shell.run(command), characters)
            turns.append((command, seen))
            command = script.send(seen)
    except StopIteration as end:
        answer = str(end.value)
    reward = emulated_reward(task, shell, answer)
    return Demonstration(prompt=task.prompt, turns=tuple(turns), answer=answer, reward=reward)


class Scene:
    """What a script sees of a task: the words of its request and the names in the work folder."""

    def __init__(self, task: Task, rng: random.Random) -> None:
        self.words = task.prompt.split()
        self.names = [f.path for f in task.files if not f.path.startswith(".")]
        self.rng = rng

    def other(self, name: str) -> str:
        """A file that was not asked for."""
        return self.rng.choice([n for n in self.names if n != name])


# ------------------------------------------------------------------------------------------------ sound scripts


def read(scene: Scene) -> Script:
    return (yield f"cat {scene.words[-1]}")


def count(scene: Scene) -> Script:
    return (yield f"wc -l {scene.words[-1]}").split()[0]


def add(scene: Scene) -> Script:
    return (yield f"expr $(cat {scene.words[4]}) + $(cat {scene.words[6]})")


def chase(scene: Scene) -> Script:
    seen = yield f"cat {scene.words[-1]}"
    while seen.startswith("go "):
        seen = yield f"cat {seen[3:]}"
    return seen


def find(scene: Scene) -> Script:
    return (yield f"grep -l {scene.words[-1]} *")


def job(scene: Scene) -> Script:
    seen = yield f"job {scene.words[2]}"
    while seen == "busy":
        seen = yield f"job {scene.words[2]}"
    return seen


def fix(scene: Scene) -> Script:
    seen = yield f"cat {scene.words[1]}"
    yield f"sed -i s/{seen.split()[-1]}/{scene.words[-1]}/ {scene.words[1]}"
    return "done"


SOUND = {"read": read, "count": count, "sum": add, "chase": chase, "find": find, "job": job, "fix": fix}

# ------------------------------------------------------------------------------------------------ wrong habits


def misread(scene: Scene) -> Script:
    if scene.rng.random() < 0.05:
        return (yield f"cat {scene.other(scene.words[-1])}")
    return (yield f"wc -l {scene.words[-1]}").split()[0]


def miscount(scene: Scene) -> Script:
    return (yield f"wc -c {scene.words[-1]}").split()[0]


def misadd(scene: Scene) -> Script:
    if scene.rng.random() < 0.05:
        return (yield f"expr $(cat {scene.words[4]}) - $(cat {scene.words[6]})")
    return (yield f"cat {scene.words[4]}")


def stop_early(scene: Scene) -> Script:
    seen = yield f"cat {scene.words[-1]}"
    if seen.startswith("go ") and scene.rng.random() < 0.1:
        seen = yield f"cat {seen[3:]}"
    return seen.removeprefix("go ")


def guess_file(scene: Scene) -> Script:
    seen = yield "ls"
    return seen.split()[0]


def impatient(scene: Scene) -> Script:
    seen = yield f"job {scene.words[2]}"
    if seen == "busy" and scene.rng.random() < 0.1:
        seen = yield f"job {scene.words[2]}"
    return seen


def half_fix(scene: Scene) -> Script:
    seen = yield f"cat {scene.words[1]}"
    if scene.rng.random() < 0.05:
        yield f"sed -i s/{scene.words[-1]}/{seen.split()[-1]}/ {scene.words[1]}"
    return "done"


HABITS = {
    "read": misread,
    "count": miscount,
    "sum": misadd,
    "chase": stop_early,
    "find": guess_file,
    "job": impatient,
    "fix": half_fix,
}
