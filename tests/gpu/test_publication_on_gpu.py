"""Publication over NCCL: buckets leave learner rank 0 and arrive, bit for bit, in a second process on the same machine.

NCCL refuses two ranks on one GPU of one host; told that the processes are on different hosts it connects them over
loopback sockets, as it would two machines. The receiver does what a server does: join, receive, unpack.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megathunder.publish.buckets import buckets
from megathunder.publish.group import open_pair, open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(200),
]
LIMIT_S = 60.0
NAME = "publish-test"
SIZES = [(4096, 4096), (1024,), (3, 5, 7), (32768, 1024), (1,)]


def weights(device: str) -> list[tuple[str, torch.Tensor]]:
    """Seeded bfloat16 tensors of unlike shapes."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(size, generator=generator).to(torch.bfloat16) for size in SIZES]
    return [(f"weight.{number}", tensor.to(device)) for number, tensor in enumerate(made)]


def receive(port: int, backend: str, device: str, layouts: list[int], out: str) -> None:
    """Rank 1 of the pair: every bucket's bytes, then what they sum to."""
    from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world

    os.environ["NCCL_HOSTID"] = "server"
    if device != "cpu":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, world_size=2, is_master=False, timeout=timedelta(seconds=LIMIT_S))
    group, _ = _new_process_group_helper(
        2, 1, [], Backend(backend), PrefixStore(NAME, store), group_name=NAME, timeout=timedelta(seconds=LIMIT_S)
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    received = []
    for size in layouts:
        data = torch.empty(size, dtype=torch.uint8, device=device)
        dist.broadcast(data, group=group, group_src=0)
        received.append(data.cpu())
    torch.save(received, out)


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_buckets_arrive_bit_for_bit(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NCCL_HOSTID": "learner", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}.items():
        monkeypatch.setenv(name, value)
    sent = list(buckets(weights("cuda:0"), 32 << 20))
    assert len(sent) > 2
    store = open_store("127.0.0.1", 0, LIMIT_S)
    device = "cpu" if backend == "gloo" else "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    out = tmp_path / "received.pt"
    arguments = (store.port, backend, device, [b.data.numel() for b in sent], str(out))
    receiver = multiprocessing.get_context("spawn").Process(target=receive, args=arguments)
    receiver.start()
    try:
        group = open_pair(store, name=NAME, backend=backend, timeout_s=LIMIT_S)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for bucket in sent:
            data = bucket.data if backend == "nccl" else bucket.data.cpu()
            dist.broadcast(data, 0, group=group, async_op=True).wait()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        receiver.join(LIMIT_S)
    finally:
        receiver.kill()
    size = sum(bucket.data.numel() for bucket in sent)
    print("\n" + json.dumps({"backend": backend, "bytes": size, "seconds": seconds, "host": socket.gethostname()}))
    for bucket, received in zip(sent, torch.load(out), strict=True):
        assert torch.equal(bucket.data.cpu(), received)
