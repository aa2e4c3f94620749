"""Trajectories for a reward function that takes batches: those that wait while a call runs are the next one.

    wait(1)                 -> call [1]           the first does not wait for others
    wait(2) wait(3)         -> call [2, 3]        at most `size` at once

Called by scorer.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from megathunder.errors import UserError
from megathunder.rewards.episode import FinishedEpisode

Row = dict[str, Any]


class Batches:
    """`call(completions, rows, episodes)` gives a list with a result for each."""

    def __init__(self, call: Callable[..., Awaitable[Any]], size: int) -> None:
        self._call, self._size = call, size
        self._waiting: list[tuple[str, Row, FinishedEpisode, asyncio.Future[Any]]] = []
        self._worker: asyncio.Task[None] | None = None

    async def result(self, completion: str, row: Row, episode: FinishedEpisode) -> Any:
        """The result for one trajectory. Raises what the call raises."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((completion, row, episode, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
            completions, rows, episodes, futures = (list(column) for column in zip(*batch, strict=True))
            try:
                results = _one_each(await self._call(completions, rows, episodes), len(batch))
            except Exception as error:
                for future in (future for future in futures if not future.done()):
                    future.set_exception(error)
                continue
            for future, result in zip(futures, results, strict=True):
                if not future.done():
                    future.set_result(result)


def _one_each(results: Any, count: int) -> list[Any]:
    given = results.tolist() if hasattr(results, "tolist") else results
    if not isinstance(given, list | tuple) or len(given) != count:
        raise UserError(
            f"a reward function was asked for {count} trajectories and gave {type(given).__name__}"
            f"{f' of {len(given)}' if isinstance(given, list | tuple) else ''}",
            expected=f"a list of {count}",
            remedy="return a result for each completion, in their order",
        )
    return list(given)
