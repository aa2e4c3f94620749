"""Every family's tensors lie in the engine where `places.py` says: the engine's checksum is that of the files it read,
and after a change that of the changed weights; so it is for adapters that the engine merges."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from adapted import Adapted
from publication import Servers, running

from examples.policies.build.tiny import TINY, make_tiny
from megathunder.learner.model.weights.hf_files import HfReader
from megathunder.publish.acknowledge import Manifest, adopt_everywhere, deliver
from megathunder.publish.delta.snapshot import Snapshot
from megathunder.publish.envelope import Inline
from megathunder.publish.publish_session import PublishSession

FAMILIES = ("qwen2", "mistral", "qwen3", "llama", "qwen3_moe", "glm4_moe")
SERVED = {
    "qwen3_moe": {"mlp_only_layers": []},  # the engine has experts in every layer; it pads their 48 rows to 64
    "glm4_moe": {"moe_intermediate_size": 64},  # the engine would pad the shared expert as well
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    with pytest.MonkeyPatch.context() as patch:
        for name, changes in SERVED.items():
            patch.setitem(TINY, name, functools.partial(served, TINY[name], changes))
        return {name: make_tiny(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def served(config: Callable[[], object], changes: dict[str, object]) -> object:
    found = config()
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.fixture(scope="module")
def servers(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with running(tmp_path_factory.mktemp("servers"), *folders.values()) as found:
        yield found


def stored(folder: Path) -> dict[str, torch.Tensor]:
    reader = HfReader(folder)
    return {name: reader.read(name) for name in reader.names}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_has_the_checksum_of_what_it_read_and_of_what_it_was_sent(
    servers: Servers, folders: dict[str, Path], family: str
) -> None:
    server = servers.addresses[FAMILIES.index(family)]
    weights = stored(folders[family])
    generator = torch.Generator().manual_seed(3)
    manifest, snapshot = Manifest(), Snapshot()
    for _ in manifest.watch(snapshot.take(1, weights.items())):
        pass
    new = {name: w + 0.01 * (torch.rand(w.shape, generator=generator) < 0.05) for name, w in weights.items()}
    encoded = snapshot.encode(2, new.items())
    with PublishSession((server,), api_key="", timeout_s=20.0) as round:

        async def change(address: object) -> None:
            held = await deliver(round, server, Inline(data=encoded.data))
            assert (held.version, held.checksum) == (2, encoded.header.checksum) and held.changed

        round.each(round.open_update, (server,))
        adopt_everywhere(round, (server,), manifest, 1)
        assert round.failed == {}
        round.each(change, (server,))
        assert round.failed == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_merges_adapters_of_every_linear_layer_to_the_learners_bits(
    servers: Servers, folders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    server = servers.addresses[FAMILIES.index(family)]
    adapted = Adapted(servers, tmp_path, stored(folders[family]), transport="delta", delta_through="http")
    assert any(".experts." in name for name in adapted.factors) == family.endswith("moe")
    adapted.step()
    version, stats = adapted.publish((server,))
    assert stats.failed_servers == () and servers.version(server) == version
