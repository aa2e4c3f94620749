"""Background tasks that cannot die in silence: one that ends by an exception ends the run with it, at once.

    async with supervised():                               the edge: what dies below ends this block with its error
        task = start(self._receive(), "the receiver of the learner's answers")

asyncio keeps the exception of a task that nobody awaits until the task is forgotten; until then the run would wait for
what the task no longer does. Cancelling a task is no death. Outside `supervised` a death is logged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from megathunder.errors import InfrastructureFailure, MegathunderError

log = logging.getLogger(__name__)
_on_death: ContextVar[Callable[[MegathunderError], None] | None] = ContextVar("on_death", default=None)


def start(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run `work` beside everything else; keep the task, and cancel it when its work is no longer needed."""
    on_death = _on_death.get()
    task = asyncio.create_task(work, name=name)

    def ended(done: asyncio.Task[None]) -> None:
        if done.cancelled() or (error := done.exception()) is None:
            return
        death = _death(name, error)
        if on_death is None:
            log.error("%s", death, exc_info=error)
        else:
            on_death(death)

    task.add_done_callback(ended)
    return task


@contextlib.asynccontextmanager
async def supervised() -> AsyncIterator[None]:
    """What is started inside belongs to this block: the first death cancels the block, which raises its error."""
    block, deaths = asyncio.current_task(), []

    def on_death(death: MegathunderError) -> None:
        deaths.append(death)
        if len(deaths) == 1:
            block.cancel()

    token = _on_death.set(on_death)
    try:
        yield
        if deaths:  # it came with the last step of the block, before the cancellation did
            block.uncancel()
            raise deaths[0]
    except asyncio.CancelledError:
        if not deaths:
            raise
        block.uncancel()
        raise deaths[0] from deaths[0].__cause__
    finally:
        _on_death.reset(token)


def _death(name: str, error: BaseException) -> MegathunderError:
    if isinstance(error, MegathunderError):
        return error
    lines = "".join(traceback.format_exception(error)).rstrip().replace("\n", "\n  ")
    death = InfrastructureFailure(f"{name} ended by an error\n  {lines}")
    death.__cause__ = error
    return death
