"""Policy versions only grow, and a version counts when enough servers say that they hold it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from types import SimpleNamespace

import pytest

from megathunder.config import Config
from megathunder.config.publish import PublishConfig
from megathunder.config.rollout import RolloutConfig
from megathunder.coordinator import weight_sync
from megathunder.coordinator.coordinator import Coordinator
from megathunder.errors import InfrastructureFailure
from megathunder.types import Done, Publish, ServerAddress, WorkStats

A, B = (ServerAddress(name=name, url=f"http://{name}") for name in "ab")


class World:
    """Servers that hold versions, and a learner that sends them: what `Parts` is to the code under test."""

    publishes = True

    def __init__(self, held: dict[ServerAddress, int], urls: tuple[str, ...] = ("http://a",)) -> None:
        self.held, self.deaf, self.sent = held, set(), []
        self.config = Config(rollout=RolloutConfig(urls=urls))
        self.servers = SimpleNamespace(ready=tuple(held), servers=tuple(held), probe_now=self.probe_now)
        self.persistence, self.learner = SimpleNamespace(folder=None), self

    def probe_now(self, server: ServerAddress) -> None:
        """Looked at, it is well again."""
        self.deaf.discard(server)

    @contextlib.asynccontextmanager
    async def control(self):
        yield SimpleNamespace(version=self.version)

    async def version(self, server: ServerAddress) -> int:
        return self.held[server]

    async def on_first_cell(self, make, limit_s: float) -> tuple[Publish, Done]:
        command = make(1)
        failed = tuple(server.name for server in command.servers if server in self.deaf)
        self.held |= {server: command.version for server in command.servers if server not in self.deaf}
        self.sent.append((command.version, tuple(server.name for server in command.servers)))
        stats = WorkStats(failed_servers=failed)
        return command, Done(item=1, cell=0, started_s=0.0, ended_s=0.0, stats=stats)


def begin(world: World, version: int = 0) -> int:
    coordinator = Coordinator(config=world.config, parts=world, version=version)
    asyncio.run(coordinator.begin())
    return coordinator.version


@pytest.mark.parametrize(("own", "held", "then"), [(0, 57, 58), (60, 57, 60), (0, 0, 1), (0, -1, 0)])
def test_a_run_begins_above_every_version_that_its_servers_ever_held(own: int, held: int, then: int) -> None:
    world = World({A: held})
    assert begin(world, own) == then
    assert world.held[A] == then and world.sent == [(then, ("a",))]


def test_servers_that_this_run_started_hold_its_first_version_already() -> None:
    world = World({A: 0}, urls=())
    assert begin(world) == 0 and world.sent == []


def reach(world: World, version: int) -> None:
    async def send(servers: tuple[ServerAddress, ...]) -> tuple[Publish, Done]:
        return await world.on_first_cell(lambda item: Publish(item=item, version=version, servers=servers), 1.0)

    asyncio.run(weight_sync.sync_weights(world, version, send))


def test_a_server_that_missed_a_version_is_sent_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "AGAIN_S", 0.0)
    world = World({A: 3, B: 3})
    world.deaf = {B}
    reach(world, 4)
    assert world.held == {A: 4, B: 4} and world.sent == [(4, ("a", "b")), (4, ("b",))]


def test_a_version_that_no_server_can_take_ends_the_run() -> None:
    world = World({A: 3})
    world.servers.ready = world.servers.servers = ()
    with pytest.raises(InfrastructureFailure, match="every rollout server is lost"):
        reach(world, 4)


def test_a_server_that_is_being_restarted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "AGAIN_S", 0.01)
    world = World({A: 3})
    world.servers.ready = ()

    async def scenario() -> None:
        async def back() -> None:
            await asyncio.sleep(0.05)
            world.held[A], world.servers.ready = 4, (A,)  # its pool sent it the weights

        returning = asyncio.create_task(back())
        assert await weight_sync.sync_weights(world, 4, None) == []
        await returning

    asyncio.run(scenario())


def test_a_server_that_did_not_acknowledge_does_not_count_whatever_version_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_sync, "AGAIN_S", 0.0)
    world = World({A: 3, B: 4})  # another learner gave B the same number
    world.deaf = {B}
    reach(world, 4)
    assert world.sent == [(4, ("a", "b")), (4, ("b",))]


def test_fewer_servers_left_than_a_publication_needs_end_the_run_at_once() -> None:
    world = World({A: 3}, urls=("http://a", "http://b"))
    world.config = dataclasses.replace(world.config, publish=PublishConfig(min_servers=2))
    with pytest.raises(InfrastructureFailure, match=r"min_servers\), 1 left: a holds 4"):
        reach(world, 4)
