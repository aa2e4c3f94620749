"""The command `megathunder WORD ...`: one word per thing people do with a run.

    megathunder train --config C.toml          one learner rank; several: torchrun --nproc-per-node N tools/train.py ...
    megathunder WORD --help                    what a word takes

`compare` and `replay` measure and stand in a checkout's benchmarks/; the command says so where there is none.
"""

from __future__ import annotations

import difflib
import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megathunder.process_exit import end_on_signals

CHECKOUT = Path(__file__).resolve().parents[2]


class Word(NamedTuple):
    """`module:function` takes the arguments and returns the exit status; `tool` is a script of a checkout."""

    meaning: str
    target: str = ""
    tool: str = ""


WORDS = {
    "train": Word(
        "train a policy (one learner rank; several: torchrun over tools/train.py)", "megathunder.cli.train:run"
    ),
    "serve": Word("serve a policy on this machine for a run elsewhere", "megathunder.cli.serve:main"),
    "plan": Word("print what a run would do and hold, without a GPU or weights", "megathunder.cli.command:plan"),
    "evaluate": Word(
        "evaluate policies on held-out tasks: pass@k with intervals", "megathunder.evaluation.command:main"
    ),
    "report": Word("rebuild the report of a run", "megathunder.report.html_report:main"),
    "view": Word("look at the trajectories of a run in a browser", "megathunder.report.viewer.server:main"),
    "replay": Word("replay a recorded run under any schedule (needs a checkout)", tool="tools/replay.py"),
    "compare": Word("compare schedules within one run (needs a checkout)", tool="tools/compare.py"),
}


def main(argv: list[str] | None = None) -> int:
    """Run the word that `argv` begins with; 2 for one that is not known."""
    words = sys.argv[1:] if argv is None else argv
    end_on_signals()  # importing what a word needs takes a second or two
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name, *rest = words
    if name not in WORDS:
        near = difflib.get_close_matches(name, WORDS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        print(f"error: megathunder {name}: no such word{hint}\n{usage()}", file=sys.stderr)
        return 2
    word = WORDS[name]
    return run_tool(name, word.tool, rest) if word.tool else resolve(word.target)(rest)


def usage() -> str:
    """The words and what they do."""
    lines = [f"  {name:10}{word.meaning}" for name, word in WORDS.items()]
    return "\n".join(["usage: megathunder WORD [arguments]      (megathunder WORD --help says more)", "", *lines])


def resolve(target: str) -> Callable[[list[str]], int]:
    """The function that `target` names."""
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)


def plan(argv: list[str]) -> int:
    """`megathunder train ... --plan`."""
    from megathunder.cli.train import run

    return run([*argv, "--plan"])


def run_tool(name: str, tool: str, argv: list[str]) -> int:
    """A script of the checkout that this package was imported from."""
    script = CHECKOUT / tool
    if not script.exists():
        print(
            f"error: megathunder {name} needs {tool}, which {CHECKOUT} does not have\n"
            "  expected: a checkout of the project, installed with pip install -e .\n"
            "  remedy:   clone the project and install it from there",
            file=sys.stderr,
        )
        return 2
    sys.argv[1:] = argv
    sys.path.insert(0, str(CHECKOUT))
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
