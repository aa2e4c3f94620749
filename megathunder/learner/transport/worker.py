"""The loop of a learner rank: receive a command, carry it out, answer.

    Differentiate, Score, Fold     the cell alone
    TakeStep                       every rank of the job, at the same time
    Save-, Finish-, LoadCheckpoint every rank of the job, at the same time
    Publish, ExportPolicy          the cell that holds rank 0
    Shutdown                       every rank; the loop ends

A command that fails is answered with `Failed` and ends the rank: a learner whose gradient buffers are in doubt must
not step. A rank that cannot answer prints what failed. Called by `launch.run_rank`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megathunder.cores import CoreBoard
from megathunder.errors import InfrastructureFailure, MegathunderError
from megathunder.learner.transport.link import CellLink, now_s
from megathunder.process_exit import RESUME_HINT, describe_os_error, system_error
from megathunder.types import Command, Done, Failed, Shutdown, TakeStep, WorkStats

Handler = Callable[[Any], WorkStats]


def serve(link: CellLink, cell: int, handlers: Mapping[type, Handler], board: CoreBoard | None = None) -> None:
    """Carry out commands until Shutdown, each on the cores that `board` says are free; InfrastructureFailure once a
    failure has been told, or the link is lost."""
    told = board is None or not link.speaks or cell != 0
    while True:
        command = link.receive()
        if isinstance(command, Shutdown):
            link.send(Done(item=command.item, cell=cell, started_s=now_s(), ended_s=now_s(), stats=WorkStats()))
            return
        if board is not None:
            torch.set_num_threads(board.begin())
        answer = _answer(command, cell, handlers, link)
        if board is not None:
            board.end()
        if isinstance(command, TakeStep) and not told:
            told = True
            print(board.describe(), flush=True)
        link.send(answer)


def _answer(command: Command, cell: int, handlers: Mapping[type, Handler], link: CellLink) -> Done:
    started_s = now_s()
    try:
        stats = handlers[type(command)](command)
    except Exception as error:
        said = _words(error, command)
        link.send(Failed(item=command.item, cell=cell, error=f"{type(command).__name__} failed: {said}"))
        if not link.speaks:
            print(said, file=sys.stderr, flush=True)
        raise InfrastructureFailure(f"{type(command).__name__} failed") from error
    return Done(item=command.item, cell=cell, started_s=started_s, ended_s=now_s(), stats=stats)


def _words(error: Exception, command: Command) -> str:
    """What says itself what to do as it is; with a traceback where nobody foresaw it."""
    if isinstance(error, MegathunderError):
        return str(error)
    if refused := system_error(error):
        return describe_os_error(refused, Path(getattr(command, "folder", ".")), RESUME_HINT)
    return f"{error}\n{''.join(traceback.format_exception(error))}"
