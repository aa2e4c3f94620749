"""A cell's end of the wire: its leader asks the coordinator for work and shares each command with the cell's ranks.

Commands reach every rank of a cell in the same order, so that collectives inside a command always meet. The leader
receives over zmq; the others receive the same bytes by a broadcast over the cell's process group.

The coordinator sends an empty message every second: nothing to do, the run lives. Called by `worker.serve`. Raises
InfrastructureFailure when the coordinator's process has ended, its connection is closed, or it has been silent for
SILENCE_S.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import zmq

from megathunder.errors import InfrastructureFailure
from megathunder.learner.transport.wire import decode_command, encode
from megathunder.types import Command, Hello, Reply

POLL_S = 1.0
SILENCE_S = 120.0
FIRST_WORD_S = 900.0  # the servers start meanwhile


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the coordinator listens, and the token that proves a cell belongs to this run."""

    address: str
    token: str


class LeaderLink:
    """The leader's socket. `alive` tells whether the coordinator still runs (rank 0 watches its process)."""

    def __init__(self, endpoint: Endpoint, hello: Hello, alive: Callable[[], bool]) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._events = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint.address)
        self._alive = alive
        self._poller = zmq.Poller()
        for socket in (self._socket, self._events):
            self._poller.register(socket, zmq.POLLIN)
        self.send(hello)

    def send(self, reply: Reply) -> None:
        self._socket.send(encode(reply))

    def receive(self) -> bytes:
        """The next command's bytes; InfrastructureFailure when the coordinator is gone."""
        limit_s, heard_s = FIRST_WORD_S, now_s()
        while True:
            ready = dict(self._poller.poll(int(POLL_S * 1000)))
            if self._socket in ready:  # before all else: its last word may be Shutdown
                if data := self._socket.recv():
                    return data
                limit_s, heard_s = SILENCE_S, now_s()
            elif self._events in ready:
                raise InfrastructureFailure("the coordinator has closed its connection; its last lines say why")
            elif not self._alive():
                raise InfrastructureFailure("the coordinator process has ended; its last lines say why")
            elif now_s() - heard_s > limit_s:
                raise InfrastructureFailure(f"the coordinator has been silent for {limit_s:.0f} s")

    def close(self) -> None:
        """What was sent still leaves, for two seconds."""
        self._socket.disable_monitor()
        self._socket.close()


class CellLink:
    """What every rank of a cell holds: `receive` gives all of them the same command, `send` speaks for the leader."""

    def __init__(self, leader: LeaderLink | None, group: dist.ProcessGroup | None, leader_rank: int) -> None:
        self._leader, self._group, self._leader_rank = leader, group, leader_rank

    def receive(self) -> Command:
        data = self._leader.receive() if self._leader else b""
        if self._group is not None and dist.get_world_size(self._group) > 1:
            try:
                data = self._broadcast(data)
            except RuntimeError as error:  # the edge to other processes
                raise InfrastructureFailure(f"another rank of this cell is gone: {error}") from error
        return decode_command(data)

    @property
    def speaks(self) -> bool:
        """Whether this rank's answers reach the coordinator."""
        return self._leader is not None

    def send(self, reply: Reply) -> None:
        if self._leader:
            self._leader.send(reply)

    def close(self) -> None:
        if self._leader:
            self._leader.close()

    def _broadcast(self, data: bytes) -> bytes:
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, self._leader_rank, group=self._group)
        payload = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(payload, self._leader_rank, group=self._group)
        return payload.numpy().tobytes()


def now_s() -> float:
    """The clock of `Done.started_s` and `Done.ended_s`."""
    return time.monotonic()
