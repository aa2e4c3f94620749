"""Adapters alone reach real servers, which merge them into the frozen weights they keep, to the learner's own bits; and
every transport reaches a server whose ranks share the weights. A server of tensor parallelism 2; adapters on servers of
one rank, experts included, are in test_publication_families."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from adapted import Adapted
from publication import POLICY, PROMPT, Policy, Servers, running

from megathunder.learner.model.weights.hf_files import HfReader
from megathunder.types import WorkStats

TOLERANCE = 1e-4
TRANSPORTS = [
    {"transport": "distributed"},
    {"transport": "disk"},
    {"transport": "delta", "delta_through": "group"},
    {"transport": "delta", "delta_through": "http"},
    {"transport": "delta", "delta_through": "folder"},
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running(tmp_path_factory.mktemp("servers"), POLICY, tensor_parallel=(2,)) as found:
        yield found


@pytest.fixture
def adapted(servers: Servers, tmp_path: Path) -> Adapted:
    return Adapted(servers, tmp_path, base(), delta_through="http", transport="delta")


def base(seed: int | None = None) -> dict[str, torch.Tensor]:
    """The frozen weights; with a seed, others."""
    reader = HfReader(POLICY)
    generator = torch.Generator().manual_seed(seed or 0)
    noise = 0.0 if seed is None else 0.05
    found = {name: reader.read(name) for name in reader.names}
    return {name: w + noise * torch.randn(w.shape, generator=generator) for name, w in found.items()}


def holds(servers: Servers, policy: Policy, version: int) -> None:
    """Every server has the version, and serves the policy's weights without stale keys and values."""
    for server in servers.addresses:
        assert servers.version(server) == version
        tokens, sampled = servers.continuation(server)
        recomputed = policy.logprobs((*PROMPT, *tokens))
        assert (sampled - recomputed[len(PROMPT) - 1 :]).abs().max() < TOLERANCE
        assert (servers.logprobs(server) - policy.logprobs()).abs().max() < TOLERANCE


def check(adapted: Adapted, published: tuple[int, WorkStats]) -> int:
    """The bytes sent to each server, once all of them hold the merged weights."""
    version, stats = published
    assert stats.failed_servers == ()
    holds(adapted.servers, adapted.recomputed(), version)
    return stats.payload_bytes


@pytest.mark.parametrize("settings", TRANSPORTS, ids=lambda settings: "-".join(settings.values()))
def test_ranks_that_share_the_weights_hold_them_after_updates_by_each_transport(
    servers: Servers, settings: dict[str, str], tmp_path: Path
) -> None:
    policy = Policy(servers, tmp_path, bucket_mb=1, **settings)
    for _ in range(2):
        policy.step()
        version, stats = policy.publish()
        assert stats.failed_servers == ()
        holds(servers, policy, version)


@pytest.mark.parametrize("settings", [TRANSPORTS[0], TRANSPORTS[1], TRANSPORTS[3]], ids=lambda s: "-".join(s.values()))
def test_servers_that_merge_adapters_equal_a_full_recompute(
    servers: Servers, settings: dict[str, str], tmp_path: Path
) -> None:
    adapted = Adapted(servers, tmp_path, base(), **settings)
    for number in range(2):
        before = adapted.recomputed().logprobs()
        adapted.step()
        assert (adapted.recomputed().logprobs() - before).abs().max() > 100 * TOLERANCE, "the step must be visible"
        for server in servers.addresses:
            servers.fill_cache(server)
        sent = check(adapted, adapted.publish())
        if number:
            assert adapted.factor_bytes <= sent < adapted.factor_bytes + 4000 < adapted.base_bytes / 2


def test_servers_with_another_base_are_sent_it_once(servers: Servers, tmp_path: Path) -> None:
    for seed in (1, 2):
        adapted = Adapted(servers, tmp_path, base(seed))
        adapted.step()
        assert check(adapted, adapted.publish()) > adapted.base_bytes
        adapted.step()
        assert check(adapted, adapted.publish()) < adapted.base_bytes / 2
    resumed = Adapted(servers, tmp_path, base(2))
    resumed.step()
    assert check(resumed, resumed.publish()) < adapted.base_bytes / 2, "the servers outlived the learner, with the base"


def test_a_server_that_died_gets_the_adapters_only_since_it_starts_from_the_base(
    servers: Servers, adapted: Adapted
) -> None:
    adapted.publish()
    adapted.step()
    servers.run(servers.processes[0].kill())
    _, stats = adapted.publish()
    assert stats.failed_servers == ("rollout-0",)
    back = servers.restart(0)
    version, stats = adapted.publish((back,))
    assert stats.failed_servers == () and stats.payload_bytes < adapted.base_bytes / 2
    assert servers.version(back) == version
    adapted.step()
    check(adapted, adapted.publish())


def test_a_server_that_lost_its_base_behind_the_learners_back_is_asked_and_sent_it_again(
    servers: Servers, adapted: Adapted, tmp_path: Path
) -> None:
    check(adapted, adapted.publish())
    other = Adapted(servers, tmp_path, base(3))
    other.publish(servers.addresses[:1])
    adapted.step()
    assert check(adapted, adapted.publish()) > adapted.base_bytes
    adapted.step()
    assert check(adapted, adapted.publish()) < adapted.base_bytes / 2
