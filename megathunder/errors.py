"""Errors a person can act on: each says what was seen, what was expected and the remedy.

`UserError` is printed without a traceback by the tools. `InfrastructureFailure` is a fault of the
machinery (a dead server, a hung sandbox): the trajectory is lost, it is never a reward of zero.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
INTERRUPTED = 130


class MegathunderError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(MegathunderError):
    """Something a person can mend: `seen` is what was found, `expected` what is legal, `remedy` what to do."""

    def __init__(self, seen: str, *, expected: str, remedy: str) -> None:
        super().__init__(f"{seen}\n  expected: {expected}\n  remedy:   {remedy}")
        self.seen, self.expected, self.remedy = seen, expected, remedy


class ConfigError(UserError):
    """A setting, or a combination of settings, that cannot work; raised before anything expensive starts."""


class IsolationError(UserError):
    """The sandbox does not isolate on this machine; the run refuses to start."""


class InfrastructureFailure(MegathunderError):
    """A fault outside the policy (server, sandbox, grader). The trajectory is DROPPED or retried, never scored."""


class StalePolicyError(MegathunderError):
    """A token of another policy version reached an update that allows none."""


class IllegalMove(MegathunderError):
    """A contribution was asked to make a move that its lifecycle does not have."""


NOTHING_TRAINED = "stopped before the first update of this start: nothing was trained"


def end_on_signals(folder: object = None) -> None:
    """From now on Ctrl-C ends this process with one line and status 130, also in the middle of an import, SIGTERM with
    0; `folder` is the run's, once there is one. Only for the time in which nothing needs to be taken down; whoever
    starts something installs a handler of its own."""

    def end(number: int, _: object) -> None:
        if os.environ.get("RANK", "0") == "0":
            began = f"; run folder: {folder}" if folder else ""
            said = (
                f"{NOTHING_TRAINED}{began}" if number == signal.SIGTERM else "error: interrupted before the run began"
            )
            print(said, file=sys.stderr, flush=True)
        # Other ranks wait for this one, and torchrun ends them for a failure alone.
        alone = os.environ.get("WORLD_SIZE", "1") == "1"
        os._exit(INTERRUPTED if number == signal.SIGINT else 0 if alone else 128 + number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)


def complain(message: str) -> None:
    """Print `error: ...` on the terminal, and leave it where torchrun's own summary of a failed job, which is printed
    last, quotes it."""
    text = f"error: {message}"
    print(text, file=sys.stderr, flush=True)
    tell_torchrun(text)


def tell_torchrun(text: str) -> None:
    """Leave `text` where torchrun looks for the reason of a failed rank; nothing without torchrun."""
    if path := os.environ.get(TORCHRUN_FILE):
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with open(path, "w") as file:
            json.dump(content, file)
