"""Functions of the user's, run off the event loop, with a time limit, and reported with their traceback.

    coroutine functions    on an event loop of a thread of their own: one that blocks delays other user code alone
    all others             in a daemon thread each, at most `threads` at once; one that hangs keeps no process alive

What a function raises, and a call that takes too long, becomes UserCodeFailure: a fault of the machinery, which is
tried again and then ends the run; never a result. `sys.exit` in it is such a fault and ends nothing by itself.
Called by rewards/, environments/ and rollout/.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from megathunder.errors import InfrastructureFailure, UserError

PACKAGE = Path(__file__).parent
FRAMES = 8  # of the user's traceback that are shown


class UserCodeFailure(InfrastructureFailure):
    """`what` (a reward, an environment, an agent) raised or took too long; `details` is the traceback or the limit."""

    def __init__(self, what: str, summary: str, details: str, remedy: str) -> None:
        super().__init__(f"{what} {summary}")
        self.what, self.summary, self.details, self.remedy = what, summary, details, remedy

    def final(self, attempts: int) -> UserError:
        """The error that ends the run."""
        times = f" ({attempts} times)" if attempts > 1 else ""
        return UserError(
            f"{self.what} {self.summary}{times}\n{self.details}".rstrip(),
            expected="a result; a fault of your own code is no reward of 0",
            remedy=self.remedy,
        )


def failure_of(what: str, error: BaseException) -> UserCodeFailure:
    """The failure for an exception of the user's code; frames of this package say nothing to
    them."""
    found = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in found if PACKAGE not in Path(frame.filename).parents][-FRAMES:]
    text = "".join(traceback.format_list(frames)).rstrip()
    summary = f"raised {type(error).__name__}: {error}"
    return UserCodeFailure(what, summary, text, "correct the code at the last line of the traceback")


def too_slow(what: str, limit_s: float, setting: str) -> UserCodeFailure:
    """The failure for a call that did not end in time."""
    return UserCodeFailure(what, f"did not end within {limit_s:g} s", "", f"make it faster, or raise {setting}")


class UserCode:
    """Runs the user's functions; use one per event loop and `close` it."""

    def __init__(self, *, threads: int = 16) -> None:
        self._free = asyncio.Semaphore(threads)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def call(
        self, what: str, function: Callable[..., Any], *arguments: object, limit_s: float, setting: str
    ) -> Any:
        """What `function(*arguments)` gives, awaited where it is awaitable. `setting` names the limit in errors. Raises
        UserCodeFailure."""
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
                    return await self._await(function(*arguments))
                async with self._free:
                    result = await in_thread(function, *arguments)
                return await self._await(result) if inspect.isawaitable(result) else result
        except TimeoutError as error:
            if limit.expired():
                raise too_slow(what, limit_s, setting) from None
            raise failure_of(what, error) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise failure_of(what, raised_to_end(error)) from error  # the user's code cancelled its own task
        except (UserError, InfrastructureFailure):
            raise
        except Exception as error:
            raise failure_of(what, error) from error

    async def _await(self, awaitable: Awaitable[Any]) -> Any:
        """The result of `awaitable`, on the loop of the user's coroutines."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="user-coroutines", daemon=True).start()

        async def run() -> Any:
            try:
                return await awaitable
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                raise raised_to_end(error) from error
            except (SystemExit, KeyboardInterrupt) as error:
                raise raised_to_end(error) from error

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), self._loop))

    def close(self) -> None:
        """Stop the loop of the user's coroutines; what still runs in threads is left behind."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


async def in_thread(function: Callable[..., Any], *arguments: object) -> Any:
    """`function(*arguments)` in a daemon thread, which never keeps this process from ending."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_it(value)

    def run() -> None:
        try:
            outcome = (future.set_result, function(*arguments))
        except Exception as error:
            outcome = (future.set_exception, raised_to_end(error) if isinstance(error, StopIteration) else error)
        except BaseException as error:
            outcome = (future.set_exception, raised_to_end(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="user-code", daemon=True).start()
    return await future


def raised_to_end(error: BaseException) -> RuntimeError:
    """`error` (SystemExit, KeyboardInterrupt, CancelledError, StopIteration) as one that ends a call alone: as it is
    it would end an event loop or cancel the task that waits, and no future can hold the last."""
    instead = RuntimeError(f"{type(error).__name__}: {error}".removesuffix(": "))
    return instead.with_traceback(error.__traceback__)
