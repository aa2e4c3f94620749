"""Multi-turn shell tasks with real commands, drawn from a random generator.

    read   print the number in kiwi                cat kiwi; submit 417
    count  count the lines of kiwi                 wc -l kiwi; submit 23
    sum    add the numbers in kiwi and plum        expr $(cat kiwi) + $(cat plum); submit 98
    chase  follow the links from kiwi              cat kiwi -> "go plum"; cat plum -> 55; submit 55
    find   find the file that has moon             grep -l moon *; submit kiwi
    job    run job kiwi and report the result      job kiwi -> busy; job kiwi -> 63; submit 63
    fix    fix kiwi so that it adds 47             cat kiwi; sed -i s/74/47/ kiwi; submit done

A job sleeps min(2, lognormal(-3, 1.4)) s times the latency scale (median .05 s, p99 1.3 s) at every call: the long
tail of real tools. Its result is computed by the tool from a stored seed, so it lies in no file.
Called by tasks.source and tasks.demonstrations.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megathunder.config import tasks
from megathunder.tasks.task import ExactAnswer, Grading, ProgramCheck, Task, TaskFile

KINDS = tasks.KINDS["shell"]
NAMES = (
    "kiwi", "plum", "fig", "lime", "pear", "date", "nut", "corn", "bean", "rice", "leek", "kale", "beet", "okra",
    "mint", "sage", "salt", "milk", "tea", "soup", "cake", "pie", "jam", "oat", "rye", "yam", "pea", "dill", "egg",
    "ham", "fish", "tofu",
)  # fmt: skip
WORDS = (
    "moon", "star", "lake", "wind", "fire", "rock", "tree", "bird", "wolf", "deer", "frog", "crab", "bell", "drum",
    "ship", "road", "hill", "sand", "snow", "gold", "iron", "lamp", "door",
)  # fmt: skip
FILES = 5  # in the work folder of a task
FIX_INPUTS = (4, 58, 407)  # what a fixed program is tried on
JOB_TOOL = TaskFile(
    path=".bin/job",
    mode=0o755,
    content="""#!/bin/bash
# job NAME: a slow queue; prints "busy" a few times, then the result
[ -f /work/.queue/"$1" ] || { echo no such job; exit 1; }
read -r seconds busy seed < /work/.queue/"$1"
[ "$seconds" = 0 ] || sleep "$seconds"
if [ "$busy" -gt 0 ]; then
  echo "$seconds $((busy - 1)) $seed" > /work/.queue/"$1"
  echo busy
else
  echo $(((seed * 1103515245 + 12345) / 65536 % 990 + 10))
fi
""",
)


def job_result(seed: int) -> int:
    """What the job tool prints for `seed`: 10..999."""
    return (seed * 1103515245 + 12345) // 65536 % 990 + 10


def job_latency_s(rng: random.Random) -> float:
    """Seconds one call of a job takes at scale 1."""
    return min(2.0, rng.lognormvariate(-3.0, 1.4))


def number(rng: random.Random) -> str:
    """10..99 half of the time, 100..999 otherwise."""
    return str(rng.randint(10, 99) if rng.random() < 0.5 else rng.randint(100, 999))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What a builder draws a task from: `names` are FILES different file names."""

    rng: random.Random
    names: list[str]
    latency_scale: float
    max_turns: int

    def numbers(self) -> dict[str, str]:
        """A number for every file name."""
        return {name: number(self.rng) for name in self.names}


Built = tuple[str, list[TaskFile], Grading]


def shell_task(rng: random.Random, task_id: str, kinds: Sequence[str], latency_scale: float, max_turns: int) -> Task:
    """One task of a kind drawn uniformly from `kinds`, solvable within `max_turns`."""
    kind = rng.choice(list(kinds))
    draw = Draw(rng=rng, names=rng.sample(NAMES, FILES), latency_scale=latency_scale, max_turns=max_turns)
    prompt, files, grading = BUILDERS[kind](draw)
    return Task(id=task_id, kind=kind, prompt=prompt, files=tuple(files), grading=grading, max_turns=max_turns)


def written(contents: dict[str, str]) -> list[TaskFile]:
    return [TaskFile(path=name, content=content + "\n") for name, content in contents.items()]


def read(draw: Draw) -> Built:
    values = draw.numbers()
    return f"print the number in {draw.names[0]}", written(values), ExactAnswer(answer=values[draw.names[0]])


def count(draw: Draw) -> Built:
    lines = {name: [draw.rng.choice(WORDS) for _ in range(draw.rng.randint(2, 40))] for name in draw.names}
    files = written({name: "\n".join(words) for name, words in lines.items()})
    return f"count the lines of {draw.names[0]}", files, ExactAnswer(answer=str(len(lines[draw.names[0]])))


def add(draw: Draw) -> Built:
    values, (first, second) = draw.numbers(), draw.names[:2]
    total = int(values[first]) + int(values[second])
    return f"add the numbers in {first} and {second}", written(values), ExactAnswer(answer=str(total))


def chase(draw: Draw) -> Built:
    names, length = draw.names, draw.rng.randint(1, min(4, draw.max_turns - 1))
    contents = draw.numbers()
    answer = contents[names[length - 1]]
    contents |= {here: f"go {there}" for here, there in pairwise(names[:length])}
    return f"follow the links from {names[0]}", written(contents), ExactAnswer(answer=answer)


def find(draw: Draw) -> Built:
    contents = dict(zip(draw.names, draw.rng.sample(WORDS, FILES), strict=True))
    wanted = draw.names[0]
    return f"find the file that has {contents[wanted]}", written(contents), ExactAnswer(answer=wanted)


def job(draw: Draw) -> Built:
    name, seed = draw.names[0], draw.rng.randrange(1, 2**31)
    busy = min(draw.rng.choice((0, 0, 1, 1, 2, 3)), draw.max_turns - 2)
    seconds = job_latency_s(draw.rng) * draw.latency_scale
    entry = f"{seconds:.3f} {busy} {seed}\n" if seconds else f"0 {busy} {seed}\n"
    files = [JOB_TOOL, TaskFile(path=f".queue/{name}", content=entry, mode=0o666)]
    return f"run job {name} and report the result", files, ExactAnswer(answer=str(job_result(seed)))


def fix(draw: Draw) -> Built:
    name = draw.names[0]
    wrong, right = draw.rng.sample(range(10, 100), 2)
    check = ProgramCheck(
        taken=(name,),
        command="; ".join(f"sh {name} {x}" for x in FIX_INPUTS),
        expected="\n".join(str(x + right) for x in FIX_INPUTS),
    )
    return f"fix {name} so that it adds {right}", written(draw.numbers() | {name: f"expr $1 + {wrong}"}), check


BUILDERS = {"read": read, "count": count, "sum": add, "chase": chase, "find": find, "job": job, "fix": fix}
