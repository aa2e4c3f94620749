"""Process of one reward function: `python -m megathunder.rewards.worker REFERENCE PARENT`, started by processes.py.

What the function prints goes to standard error; it dies with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import struct
import sys
import traceback
from typing import Any

import msgspec

from megathunder.registry import REWARDS
from megathunder.rewards import frames
from megathunder.rewards.episode import FinishedEpisode

HEADER = struct.Struct(">I")
PR_SET_PDEATHSIG = 1


def main(reference: str, parent: str) -> None:
    """Serve until standard input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        return
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    function, own = REWARDS.get(reference), os.getpid()
    while header := sys.stdin.buffer.read(HEADER.size):
        completion, row, episode = frames.decode(sys.stdin.buffer.read(HEADER.unpack(header)[0]))
        answer = _answer(function, completion, row, _episodes(episode))
        if os.getpid() != own:  # the function forked: one answer per question
            os._exit(0)
        data = _encoded(answer)
        answers.write(HEADER.pack(len(data)) + data)
        answers.flush()


def _episodes(given: Any) -> Any:
    return msgspec.convert(given, list[FinishedEpisode] if isinstance(given, list) else FinishedEpisode)


def _answer(function: Any, *arguments: object) -> dict[str, Any]:
    try:
        value = function(*arguments)
        return {"value": asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value}
    except (Exception, SystemExit) as error:
        text = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[1:])).rstrip()
        return {"error": f"raised {type(error).__name__}: {error}", "traceback": text}


async def _awaited(value: Any) -> Any:
    return await value


def _encoded(answer: dict[str, Any]) -> bytes:
    """Numbers of NumPy and PyTorch are plain numbers; what else has no form is its own repr, which is no score."""
    try:
        return msgspec.msgpack.encode(answer, enc_hook=_plain)
    except (OverflowError, UnicodeEncodeError, RecursionError) as error:
        return msgspec.msgpack.encode({"error": f"gave what cannot be sent: {error}", "traceback": ""})


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else repr(value)


if __name__ == "__main__":
    main(*sys.argv[1:])
