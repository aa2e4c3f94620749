"""New weights reach real servers exactly, by every transport, and a fault never leaves a server half changed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from publication import POLICY, PROMPT, Policy, Servers, running

from megathunder.publish.acknowledge import RefusedPayload, ask, deliver
from megathunder.publish.envelope import Inline, ServerWeights
from megathunder.publish.group import Pairs
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.carriers import HttpCarrier
from megathunder.publish.transports.delta import DeltaTransport
from megathunder.publish.transports.distributed import DistributedTransport
from megathunder.types import ServerAddress

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running(tmp_path_factory.mktemp("servers"), POLICY, POLICY) as found:
        yield found


def holds(servers: Servers, policy: Policy, version: int) -> None:
    """Every server has the version, and serves the policy's weights without stale keys and values."""
    for server in servers.addresses:
        assert servers.version(server) == version
        tokens, sampled = servers.continuation(server)
        recomputed = policy.logprobs((*PROMPT, *tokens))
        assert (sampled - recomputed[len(PROMPT) - 1 :]).abs().max() < TOLERANCE
        assert (servers.logprobs(server) - policy.logprobs()).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [
        {"transport": "distributed"},
        {"transport": "disk"},
        {"transport": "delta", "delta_through": "group"},
        {"transport": "delta", "delta_through": "http"},
        {"transport": "delta", "delta_through": "folder"},
        {"transport": "auto"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_after_each_of_three_updates_servers_equal_a_full_recompute(
    servers: Servers, settings: dict[str, str], tmp_path: Path
) -> None:
    policy = Policy(servers, tmp_path, **settings)
    for _ in range(3):
        before = policy.logprobs()
        policy.step()
        assert (policy.logprobs() - before).abs().max() > 100 * TOLERANCE, "the step must be visible"
        for server in servers.addresses:
            servers.fill_cache(server)
        version, stats = policy.publish()
        assert stats.failed_servers == () and stats.payload_bytes > 0
        holds(servers, policy, version)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_any_number_of_buckets_gives_the_same_weights(servers: Servers, count: int, tmp_path: Path) -> None:
    policy = Policy(servers, tmp_path)
    total = sum(tensor.nbytes for _, tensor in policy.export())
    pairs = Pairs(backend="gloo", timeout_s=20.0, host="127.0.0.1")
    policy = Policy(servers, tmp_path, DistributedTransport(pairs, bucket_bytes=-(-total // count)))
    policy.step()
    version, stats = policy.publish()
    assert stats.failed_servers == ()  # the acknowledged checksum is that of the weights
    holds(servers, policy, version)


class Damaging(HttpCarrier):
    """Alters what one server receives."""

    def __init__(self, victim: str, damage: object) -> None:
        self.victim, self.damage = victim, damage
        self.refusals: list[ServerWeights] = []

    async def carry(self, round: PublishSession, server: ServerAddress, data: bytes) -> ServerWeights:
        if server.name != self.victim:
            return await super().carry(round, server, data)
        try:
            return await deliver(round, server, Inline(data=self.damage(data)))
        except RefusedPayload as refusal:
            self.refusals.append(refusal.held)
            raise


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-1], id="truncated"),
        pytest.param(lambda data: data[:1000], id="cut_in_the_header"),
        pytest.param(lambda data: data[:-50] + bytes([data[-50] ^ 1]) + data[-49:], id="one_bit_of_the_body"),
        pytest.param(lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], id="one_bit_of_the_header"),
        pytest.param(lambda data: b"", id="empty"),
    ],
)
def test_a_damaged_payload_changes_nothing_and_is_made_good(servers: Servers, damage: object, tmp_path: Path) -> None:
    pairs = Pairs(backend="gloo", timeout_s=20.0, host="127.0.0.1")
    carrier = Damaging("rollout-1", damage)
    policy = Policy(servers, tmp_path, DeltaTransport(DistributedTransport(pairs, bucket_bytes=1 << 20), carrier))
    first, _ = policy.publish()
    policy.step()
    version, stats = policy.publish()
    (refusal,) = carrier.refusals
    assert not refusal.changed and refusal.version == first and refusal.error
    assert stats.failed_servers == ()
    holds(servers, policy, version)


def test_a_refused_payload_leaves_the_weights_as_they_were(servers: Servers, tmp_path: Path) -> None:
    policy = Policy(servers, tmp_path, transport="delta", delta_through="http")
    policy.publish()
    before = [servers.logprobs(server) for server in servers.addresses]
    with PublishSession(servers.addresses, api_key="", timeout_s=20.0) as round:

        async def garbage(server: ServerAddress) -> None:
            await round.open_update(server)
            with pytest.raises(RefusedPayload):
                await deliver(round, server, Inline(data=os.urandom(5000)))
            assert (await ask(round, server)).error

        round.each(garbage, servers.addresses)
        assert round.failed == {}
    for server, old in zip(servers.addresses, before, strict=True):
        assert torch.equal(servers.logprobs(server), old)


def test_a_server_at_another_base_gets_the_full_weights(servers: Servers, tmp_path: Path) -> None:
    policy = Policy(servers, tmp_path, transport="delta", delta_through="group")
    policy.publish()
    other = Policy(servers, tmp_path, transport="distributed")
    other.step()
    other.publish(servers.addresses[1:])  # behind the back of the first
    policy.step()
    version, stats = policy.publish()
    assert stats.failed_servers == ()
    assert stats.payload_bytes == sum(tensor.nbytes for _, tensor in policy.export())
    holds(servers, policy, version)
    policy.step(fraction=0.001)
    version, stats = policy.publish()
    assert stats.payload_bytes < sum(tensor.nbytes for _, tensor in policy.export()) / 10
    holds(servers, policy, version)


@pytest.mark.parametrize(
    ("transport", "what"), [("distributed", signal.SIGSTOP), ("delta", signal.SIGKILL)], ids=["hangs", "killed"]
)
def test_a_receiver_that_hangs_or_dies_in_a_publication_is_reported_and_the_other_goes_on(
    servers: Servers, transport: str, what: signal.Signals, tmp_path: Path
) -> None:
    policy = Policy(servers, tmp_path, bucket_mb=1, transport=transport, timeout_s=5.0)
    policy.publish()
    export, process = policy.export, servers.processes[1]

    def killing() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(export()):
            if number == 20:
                os.killpg(process.pid, what)
            yield item

    policy.publisher._export = killing
    policy.step()
    started = time.monotonic()
    version, stats = policy.publish()
    assert stats.failed_servers == ("rollout-1",) and time.monotonic() - started < 15.0
    everyone, servers.addresses = servers.addresses, servers.addresses[:1]
    holds(servers, policy, version)
    servers.addresses = everyone
    policy.publisher._export = export
    back = servers.restart(1)
    again, stats = policy.publish((back,))
    assert stats.failed_servers == () and servers.version(back) == again
    policy.step()
    version, stats = policy.publish()
    assert stats.failed_servers == ()
    holds(servers, policy, version)
