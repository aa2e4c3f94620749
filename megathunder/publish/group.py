"""A process group of two: learner rank 0 and one rollout server.

One group a server, so that a server that dies in a broadcast takes only its own group along. torch.distributed has one
default group per process (the learner's); a second world with other members is made from its own store, as inference
engines do on their side.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world


def open_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """The rendezvous store of one pair, served by the learner. `port` 0 picks a free one (`store.port`)."""
    return dist.TCPStore(
        host, port, world_size=2, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def open_pair(store: dist.TCPStore, *, name: str, backend: str, timeout_s: float) -> dist.ProcessGroup:
    """The group {0: learner, 1: server}; returns when the server has joined, raises after `timeout_s`."""
    group, _ = _new_process_group_helper(
        2,
        0,
        [],
        Backend(backend),
        PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=timedelta(seconds=timeout_s),
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group
