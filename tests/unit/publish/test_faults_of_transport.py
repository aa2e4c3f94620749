"""A fault ends in an error within its limit: a full or forbidden folder, a server that refuses or never answers."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megathunder.errors import InfrastructureFailure, UserError
from megathunder.publish.group import Pairs
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports import disk
from megathunder.publish.transports.carriers import FolderCarrier
from megathunder.publish.transports.disk import DiskTransport
from megathunder.types import ServerAddress

SERVER = ServerAddress(name="rollout-0", url="http://127.0.0.1:9")
WEIGHTS = {"a.weight": torch.ones(3, 4)}


def test_a_full_disk_is_named_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(disk.HfWriter):
        def write(self, name: str, tensor: Tensor) -> None:
            (tmp_path / "shared" / ".writing-3" / "piece").write_bytes(b"x")
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "HfWriter", Full)
    transport = DiskTransport(tmp_path / "shared", tmp_path)
    with (
        PublishSession((SERVER,), api_key="", timeout_s=1.0) as round,
        pytest.raises(UserError, match=r"(?s)shared.*No space"),
    ):
        transport.send(round, (SERVER,), 3, WEIGHTS.items())
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("kind", ["transport", "carrier"])
def test_a_folder_that_cannot_be_made_is_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "shared"
    with (
        PublishSession((SERVER,), api_key="", timeout_s=1.0) as round,
        pytest.raises(UserError, match="publish.folder"),
    ):
        if kind == "transport":
            DiskTransport(folder, tmp_path).send(round, (SERVER,), 3, WEIGHTS.items())
        else:
            round.each(lambda server: FolderCarrier(folder).carry(round, server, b"x"), (SERVER,))


def test_a_server_that_refuses_to_receive_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = Pairs(backend="gloo", timeout_s=30.0, host="127.0.0.1")
    pairs._pairs[SERVER] = SimpleNamespace(group=SimpleNamespace(), name="x")
    monkeypatch.setattr(Pairs, "_broadcast", lambda self, group, data: time.sleep(2.0))

    async def refuse() -> None:
        raise InfrastructureFailure("no such group")

    async def one(server: ServerAddress) -> None:
        await pairs.exchange(server, refuse(), torch.ones(3))

    started = time.monotonic()
    with PublishSession((SERVER,), api_key="", timeout_s=30.0) as round:
        round.each(one, (SERVER,))
    assert "no such group" in round.failed["rollout-0"] and SERVER not in pairs._pairs
    assert time.monotonic() - started < 1.5


def test_a_server_that_accepts_and_never_answers_fails_within_the_limit() -> None:
    async def scenario() -> None:
        hanging = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
        port = hanging.sockets[0].getsockname()[1]
        server = ServerAddress(name="rollout-0", url=f"http://127.0.0.1:{port}")

        def publish() -> PublishSession:
            with PublishSession((server,), api_key="", timeout_s=0.5) as round:
                round.each(round.open_update, (server,))
            return round

        started = time.monotonic()
        found = await asyncio.to_thread(publish)
        assert found.failed and time.monotonic() - started < 5.0

    asyncio.run(scenario())
