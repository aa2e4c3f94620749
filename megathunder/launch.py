"""Processes of a run: torchrun's ranks are the learner; rank 0 also starts the coordinator as a process of its own.

    torchrun --nproc-per-node N tools/train.py ...
      rank 0..N-1   Learner + worker loop                         (this module: `run_rank`)
      coordinator   servers, agents, sandboxes, ledger, schedule  (child of rank 0: `python -m megathunder.coordinator`)

Whoever ends takes the others along: the coordinator dies with rank 0 (parent-death signal), rank 0 stops when the
coordinator has ended, torchrun ends the remaining ranks. Servers and sandboxes die with the coordinator.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megathunder.config import Config
from megathunder.errors import InfrastructureFailure
from megathunder.publish.publisher import Publisher
from megathunder.types import Differentiate, Fold, Hello, Publish, SaveCheckpoint, TakeStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among torchrun's: 0 of 1 when started without torchrun."""

    rank: int
    world: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Ranks:
        get = os.environ.get
        return cls(
            rank=int(get("RANK", "0")), world=int(get("WORLD_SIZE", "1")), local_rank=int(get("LOCAL_RANK", "0"))
        )


class CoordinatorProcess:
    """Rank 0's child. `address` and `token` are read from its first line of output (a pipe, not the terminal)."""

    def __init__(self, config_file: Path, cells: int) -> None:
        self.token = secrets.token_hex(16)
        read_end, write_end = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megathunder.coordinator", str(config_file), str(cells), str(write_end)],
            env={**os.environ, "MEGATHUNDER_TOKEN": self.token},
            pass_fds=(write_end,),
        )
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            self.address = pipe.readline().strip()
        if not self.address:
            raise InfrastructureFailure("the coordinator ended before it listened; its lines above say why")

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float = 30.0) -> int:
        """Wait for the end, asking for it after the learner has none left to give; the exit status."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def forward(self, signum: int) -> None:
        if self.alive():
            self._process.send_signal(signum)


def run_rank(config: Config, folder: Path) -> int:
    """One learner rank from start to end; returns the exit status."""
    from megathunder.learner.link import (
        CellLink,
        Endpoint,
        LeaderLink,
    )  # torch is imported after the checks have passed
    from megathunder.learner.parallel import initialise
    from megathunder.learner.worker import serve

    ranks = Ranks.from_environment()
    _pin(config.learner.cpu_cores, ranks)
    cells = ranks.world // _ranks_of_a_cell(config)
    coordinator = CoordinatorProcess(folder / "config.toml", cells) if ranks.rank == 0 else None
    if coordinator:
        signal.signal(signal.SIGTERM, lambda signum, _: coordinator.forward(signum))
    layout = initialise(config.learner)
    endpoint = _share_endpoint(coordinator, ranks, Endpoint)
    learner = _build_learner(config, layout)
    leader = None
    if layout.is_cell_leader:
        hello = Hello(
            cell=layout.cell,
            ranks=layout.cell_ranks,
            token=endpoint.token,
            host=socket.gethostname(),
            local_parameters=learner.local_parameters,
        )
        leader = LeaderLink(endpoint, hello, coordinator.alive if coordinator else lambda: True)
    publisher = Publisher(
        config.publish,
        export_weights=learner.export_weights,
        rank=ranks.rank,
        backend="nccl" if layout.device.type == "cuda" else "gloo",
        host=socket.gethostname(),
        api_key=config.rollout.api_key,
    )
    handlers = {
        Differentiate: learner.differentiate,
        Fold: learner.fold,
        TakeStep: learner.take_step,
        Publish: publisher.publish,
        SaveCheckpoint: learner.save_checkpoint,
    }
    link = CellLink(leader, layout.cell_group, layout.cell_leader_rank)
    try:
        serve(link, layout.cell, handlers)
    except InfrastructureFailure as error:
        print(f"rank {ranks.rank}: {error}", file=sys.stderr)
        return coordinator.stop(5.0) or 1 if coordinator else 1
    link.close()
    return coordinator.stop() if coordinator else 0
