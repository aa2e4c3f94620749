"""The coordinator's end of the wire: which cells are free, their commands in order, barriers over all cells.

    cell:  unknown -> (Hello) free -> (submit) busy -> (Done) free          one more may be submitted to a busy cell
                     (Failed, connection closed, silence past the limit) -> the run ends with the cell's own words

An empty message to every cell, once a second, tells it that the run lives; one that cannot be sent tells that the cell
has died.

Streaming work is submitted to a free cell and its `Done` arrives in the inbox that the loop reads; control commands
(`everywhere`, `on_first_cell`) wait until the cells they need are free, keep streaming off them meanwhile, and return
the answers. Called by `loop.py` and `coordinator.py`. No torch here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio

from megathunder import background
from megathunder.errors import InfrastructureFailure
from megathunder.identity import require_same_package
from megathunder.learner.transport.wire import decode_reply, encode
from megathunder.types import Command, Done, Failed, Hello, Reply

log = logging.getLogger(__name__)
Control = TypeVar("Control", bound=Command)
PING_EVERY_S = 1.0
IN_HAND = 2  # commands of a cell: one that it does, one to do next
NAMED_STRAYS = 3
LAST_WORDS_S = 0.5  # what a cell said before it died may still be on its way


class LearnerClient:
    """Speaks with `cells` learner cells. `inbox` receives the Done of streaming work."""

    def __init__(self, cells: int, token: str, inbox: asyncio.Queue | None = None, host: str = "127.0.0.1") -> None:
        self.hellos: dict[int, Hello] = {}
        self._cells, self._token = cells, token
        self._inbox: asyncio.Queue = inbox or asyncio.Queue()
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._peers: dict[int, bytes] = {}
        self._busy: Counter[int] = Counter()  # commands that a cell has not answered
        self._reserved: set[int] = set()
        self._waiting: dict[tuple[int, int], asyncio.Future[Done]] = {}
        self._changed = asyncio.Event()
        self._control = asyncio.Lock()
        self._items = itertools.count(1 << 40)  # control items never collide with the scheduler's
        self._tasks: list[asyncio.Task[None]] = []
        self._error: InfrastructureFailure | None = None
        self.strays = 0  # messages from elsewhere
        self._clocks: dict[int, float] = {}  # of cells on other machines: seconds to add to their clocks, at most

    async def connect(self, timeout_s: float) -> None:
        """Wait for the Hello of every cell, perhaps again; InfrastructureFailure naming those that are missing."""
        self._tasks = self._tasks or [
            background.start(self._receive(), "the receiver of the learner's answers"),
            background.start(self._ping(), "the sender of the learner's pings"),
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: len(self._peers) == self._cells)
        except TimeoutError:
            missing = sorted(set(range(self._cells)) - set(self._peers))
            raise InfrastructureFailure(f"learner cells {missing} did not report within {timeout_s:.0f} s") from None

    @property
    def free_cells(self) -> tuple[int, ...]:
        """Cells that may take streaming work now."""
        return self._having(0)

    @property
    def cells_with_room(self) -> tuple[int, ...]:
        """Cells with one command in hand, that may take the next."""
        return self._having(1)

    def _having(self, commands: int) -> tuple[int, ...]:
        return tuple(c for c in range(self._cells) if self._busy[c] == commands and c not in self._reserved)

    async def submit(self, cell: int, command: Command) -> None:
        """Give a cell one streaming command; at most one besides that in hand."""
        if self._busy[cell] >= IN_HAND:
            raise RuntimeError(f"cell {cell} has {self._busy[cell]} commands; at most {IN_HAND} are given at a time")
        await self._send(cell, command)

    @property
    def cells(self) -> int:
        return self._cells

    @property
    def ranks(self) -> int:
        """Learner processes of all cells; known once connected."""
        return sum(hello.ranks for hello in self.hellos.values())

    async def everywhere(self, make: Callable[[int], Control], timeout_s: float) -> tuple[Control, list[Done]]:
        """A command to every cell, once all are free; the command and the answers in cell order."""
        return await self._run_control(tuple(range(self._cells)), make, timeout_s)

    async def on_first_cell(self, make: Callable[[int], Control], timeout_s: float) -> tuple[Control, Done]:
        """A command to the cell that holds rank 0, once it is free; the command and its answer."""
        command, answers = await self._run_control((0,), make, timeout_s)
        return command, answers[0]

    def direct_to(self, inbox: asyncio.Queue) -> None:
        """Answers of streaming work go to `inbox` from now on (one update at a time is learnt from)."""
        self._inbox = inbox

    def check(self) -> None:
        """Raise the error that ended a cell, if one did."""
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def _run_control(
        self, cells: tuple[int, ...], make: Callable[[int], Control], limit_s: float
    ) -> tuple[Control, list[Done]]:
        async with self._control:
            self._reserved.update(cells)
            try:
                async with asyncio.timeout(limit_s):
                    return await self._exchange(cells, make)
            except TimeoutError:
                self.check()
                raise InfrastructureFailure(
                    f"learner cells {cells} did not answer {type(make(0)).__name__} within {limit_s:.0f} s"
                ) from None
            finally:
                self._reserved.difference_update(cells)
                self._inbox.put_nowait(None)  # the loop may have been refused these cells: let it look again
                self._wake()

    async def _exchange(self, cells: tuple[int, ...], make: Callable[[int], Control]) -> tuple[Control, list[Done]]:
        await self._until(lambda: self._peers.keys() >= set(cells) and not any(self._busy[c] for c in cells))
        command = make(next(self._items))
        answers = []
        for cell in cells:
            future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
            self._waiting[cell, command.item] = future
            answers.append(future)
            await self._send(cell, command)
        return command, list(await asyncio.gather(*answers))

    async def _send(self, cell: int, command: Command) -> None:
        self.check()
        self._busy[cell] += 1
        try:
            await self._socket.send_multipart([self._peers[cell], encode(command)])
        except zmq.ZMQError:
            await self._lost(cell)
            self.check()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_EVERY_S)
            for cell, peer in list(self._peers.items()):
                try:
                    await self._socket.send_multipart([peer, b""], flags=zmq.NOBLOCK)
                except zmq.Again:
                    continue  # alive, and busy for so long that its queue is full
                except zmq.ZMQError:
                    await self._lost(cell)
                    return

    async def _lost(self, cell: int) -> None:
        await asyncio.sleep(LAST_WORDS_S)
        self._fail(
            InfrastructureFailure(
                f"learner cell {cell} has closed its connection: a process of it has died (killed, out of memory?)"
            )
        )
        self._wake()

    async def _receive(self) -> None:
        while True:
            peer, *frames = await self._socket.recv_multipart()
            reply = self._decoded(frames)
            if reply is None:
                continue
            if isinstance(reply, Hello):
                self._greet(peer, reply)
            elif self._peers.get(reply.cell) == peer:
                self._take(reply)
            self._wake()

    def _decoded(self, frames: list[bytes]) -> Reply | None:
        """The reply in `frames`; None, counted and named the first times, for what no cell sends."""
        try:
            if len(frames) == 1:
                return decode_reply(frames[0])
            why = f"{len(frames)} frames, a reply has one"
        except msgspec.DecodeError as error:  # another program, or one that looks for open ports
            why = str(error)
        self.strays += 1
        if self.strays <= NAMED_STRAYS:
            log.warning("ignored a message to the learner's port that is no reply: %s", why)
        return None

    def _greet(self, peer: bytes, hello: Hello) -> None:
        if hello.token == self._token and hello.cell not in self._peers:
            require_same_package(f"learner cell {hello.cell} on {hello.host}", hello.package)
            self._peers[hello.cell], self.hellos[hello.cell] = peer, hello

    def _take(self, reply: Done | Failed) -> None:
        if isinstance(reply, Failed):
            self._fail(InfrastructureFailure(f"learner cell {reply.cell}: {reply.error}"))
            return
        reply = self._in_our_time(reply)
        self._busy[reply.cell] -= 1
        future = self._waiting.pop((reply.cell, reply.item), None)
        if future is None:
            self._inbox.put_nowait(reply)
        elif not future.done():
            future.set_result(reply)

    def _in_our_time(self, done: Done) -> Done:
        """`done` by this machine's clock. A message takes longer than no time to arrive, so the least difference ever
        seen between arrival and dispatch is the closest bound on the difference of two machines' clocks."""
        if self.hellos[done.cell].host == socket.gethostname():
            return done
        seen = time.monotonic() - done.ended_s
        ahead = self._clocks[done.cell] = min(self._clocks.get(done.cell, seen), seen)
        return msgspec.structs.replace(done, started_s=done.started_s + ahead, ended_s=done.ended_s + ahead)

    def _fail(self, error: InfrastructureFailure) -> None:
        self._error = error = self._error or error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: a barrier over several cells reports the first of them
        self._waiting.clear()
        self._inbox.put_nowait(self._error)

    def _wake(self) -> None:
        self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.check()
            self._changed.clear()
            await self._changed.wait()
