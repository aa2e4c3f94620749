"""How a process of a run ends, and what it says then: signals, torchrun's error file, refusals of the operating system.

Called at the edges of processes alone: tools, `launch.py`, the coordinator's process, the learner's worker.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path, PurePath

TORCHRUN_FILE = "TORCHELASTIC_ERROR_FILE"
INTERRUPTED = 130
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


def print_error(message: str) -> None:
    """Print `error: ...` on the terminal, and leave it where torchrun's own summary of a failed job, which is printed
    last, quotes it."""
    text = f"error: {message}"
    print(text, file=sys.stderr, flush=True)
    report_to_torchrun(text)


def report_to_torchrun(text: str) -> None:
    """Leave `text` where torchrun looks for the reason of a failed rank; nothing without torchrun."""
    if path := os.environ.get(TORCHRUN_FILE):
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError), open(path, "w") as file:  # the terminal has it
            json.dump(content, file)


RESUME_HINT = "--run.resume goes on from the last checkpoint"
FULL = (errno.ENOSPC, errno.EDQUOT)


def system_error(error: BaseException) -> OSError | None:
    """What the operating system refused, where that is what `error` (of a group: the first) says; a full disk also
    where it is behind it or beside it, since everything that writes fails by it. None: a TimeoutError of this process,
    which has no number, and all else."""
    full = next((one for each in _behind(error) if (one := _refused(each)) and one.errno in FULL), None)
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return full or _refused(error)


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
            yield from _behind(inner)
        error = error.__cause__ or error.__context__


def _refused(error: BaseException) -> OSError | None:
    if isinstance(error, OSError):
        return error if error.errno else None
    if found := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors has errors of its own
        number = int(found[1])
        return OSError(number, os.strerror(number)).with_traceback(error.__traceback__)
    return None


def describe_os_error(error: OSError, folder: Path, hint: str) -> str:
    """What to print for `error`: the file, why it could not be used, and what to do; `folder` is the run's."""
    file = error.filename or (_file_at(error) if error.errno in FULL else "")
    why = error.strerror or str(error)
    if error.errno not in FULL:
        places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
        seen = f"{file}: {why}" if file else why
        return (
            f"{seen}{f' (at {places[-1]})' if places else ''}\n"
            "  expected: files, processes and connections that this machine lets the run use\n"
            f"  remedy:   mend what is named; {hint}"
        )
    there = next((p for p in (Path(file or folder), *Path(file or folder).parents) if p.exists()), folder)
    disk = shutil.disk_usage(there)
    space = f"{disk.free / 2**20:,.1f} MiB free of {disk.total / 2**20:,.1f} MiB"
    return (
        f"{file or f'a file of {folder}'} could not be written: {why} ({space} on its file system)\n"
        "  expected: room for checkpoints (run.checkpoint_every, run.keep_checkpoints), trajectories and events\n"
        f"  remedy:   free space there, or move the run to another place (run.folder); {hint}"
    )


def _file_at(error: OSError) -> str:
    """The file in hand where a write to a full disk failed: a write has no name to tell, and a path is near it."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        own = getattr(frame.f_locals.get("self"), "__dict__", {})
        for value in (*frame.f_locals.values(), *own.values()):
            name = value if isinstance(value, PurePath) else isinstance(value, io.IOBase) and getattr(value, "name", 0)
            if name and isinstance(name, str | PurePath):
                return str(name)
    return ""
