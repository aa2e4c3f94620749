"""Processes of a run: torchrun's ranks are the learner; rank 0 also starts the coordinator as a process of its own.

    torchrun [--nnodes M ...] --nproc-per-node N tools/train.py ...      (tools/torchrun.py: 0 after SIGTERM)
      rank 0..MN-1  Learner + worker loop                         (this module: `run_rank`)
      coordinator   servers, agents, sandboxes, ledger, schedule  (child of rank 0, `coordinator/process.py`)

The coordinator listens on loopback; of several machines on `run.host`, or the address at which torchrun has them meet.
The run folder must then be one that every machine sees: ranks write checkpoints there. A rank that does not is refused.

Whoever ends takes the others along: ranks end with torchrun, the coordinator with rank 0 (parent-death signal), every
rank stops when its connection to the coordinator closes, torchrun ends what is left. Servers and sandboxes die with the
coordinator. Signals mean what `coordinator/shutdown.py` says: rank 0 passes them on, and the ranks, which may be in the
middle of a collective, end when the coordinator says so.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megathunder.checkpoint.resume import resume_hint
from megathunder.config import Config
from megathunder.cores import VARIABLE, Role, board_path, open_board, remove_board
from megathunder.errors import ConfigError, InfrastructureFailure, UserError
from megathunder.identity import PACKAGE, this_package
from megathunder.metrics.run_folder import RunFolder
from megathunder.process_exit import TORCHRUN_FILE, describe_os_error, print_error, system_error
from megathunder.processes import die_with_parent
from megathunder.rendezvous import Rendezvous
from megathunder.types import (
    Differentiate,
    ExportPolicy,
    FinishCheckpoint,
    Fold,
    Hello,
    LoadCheckpoint,
    Publish,
    SaveCheckpoint,
    Score,
    TakeStep,
)

if TYPE_CHECKING:
    from megathunder.learner.observer import StepObserver
    from megathunder.learner.transport.link import Endpoint

COORDINATOR = ("-m", "megathunder.coordinator.process")
STOP_S = 45.0
ADDRESS_S = 120.0  # until the coordinator listens
FIRST_WORD_S = 10.0
GRACE_S = 30.0
TORCHRUN = frozenset(
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among torchrun's: 0 of 1 when started without torchrun."""

    rank: int
    world: int
    local_rank: int
    local_world: int = 1
    machines: int = 1
    machine: int = 0
    master: str = ""

    @classmethod
    def from_environment(cls) -> Ranks:
        get = os.environ.get
        return cls(
            rank=int(get("RANK", "0")),
            world=int(get("WORLD_SIZE", "1")),
            local_rank=int(get("LOCAL_RANK", "0")),
            local_world=int(get("LOCAL_WORLD_SIZE", get("WORLD_SIZE", "1"))),
            machines=int(get("GROUP_WORLD_SIZE", "1")),
            machine=int(get("GROUP_RANK", "0")),
            master=get("MASTER_ADDR", ""),
        )

    def listening_address(self, config: Config) -> str:
        """Numeric address on rank 0's machine at which other ranks reach the coordinator."""
        if self.machines == 1 and not config.run.host:
            return "127.0.0.1"
        name = config.run.host or self.master
        try:
            return socket.gethostbyname(name)
        except OSError as error:
            raise ConfigError(
                f"rank 0's machine is called {name!r}, which has no address here ({error.strerror})",
                expected="a name or an address that the learner's machines can resolve",
                remedy="set run.host to one, and --rdzv-endpoint likewise",
            ) from None

    def reachable_name(self, config: Config) -> str:
        """Under which rollout servers on other machines find rank 0's machine."""
        return config.run.host or (self.master if self.machines > 1 else socket.gethostname())


class CoordinatorProcess:
    """Rank 0's child. `address` and `token` are read from its first line of output (a pipe, not the terminal)."""

    def __init__(self, config_file: Path, cells: int, host: str, program: Sequence[str]) -> None:
        self.token, self._folder = secrets.token_hex(16), RunFolder(config_file.parent)
        read_end, write_end = os.pipe()
        arguments = [str(config_file), str(cells), host, str(write_end)]
        self._process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            env=_of_this_package(_without_torchrun(os.environ)) | {"MEGATHUNDER_TOKEN": self.token},
            pass_fds=(write_end,),
            preexec_fn=_begin_as_child,
        )
        os.close(write_end)
        with os.fdopen(read_end) as pipe:
            ready, _, _ = select.select([pipe], [], [], ADDRESS_S)
            self.address = pipe.readline().strip() if ready else ""
        if not self.address:
            raise InfrastructureFailure("the coordinator ended before it listened; its lines above say why")
        threading.Thread(target=self._outlive_nothing, daemon=True).start()

    def _outlive_nothing(self) -> None:
        """A rank that waits for another one inside a library hears of nothing: end it when the run has ended."""
        status = self._process.wait()
        time.sleep(GRACE_S)
        print_error(
            f"learner rank 0 (in a collective?) did not end within {GRACE_S:.0f} s of the coordinator; ended it"
        )
        os._exit(status if status >= 0 else 1)

    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout_s: float) -> int:
        """Wait for it to end by itself, kill it after `timeout_s`; its exit status, 1 when a signal ended it."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            print_error(f"the coordinator did not end within {timeout_s:.0f} s and was killed")
            return self._process.wait() and 1
        if status < 0:
            print_error(killed(signal.Signals(-status), self._folder))
        return status if status >= 0 else 1

    def forward(self, signum: int) -> None:
        if self.alive():
            self._process.send_signal(signum)


def killed(by: signal.Signals, folder: RunFolder) -> str:
    """What ended the coordinator, what was likely the reason and what to do."""
    said = f"the coordinator was ended by {by.name}"
    remedy = resume_hint(folder.checkpoints)
    if by == signal.SIGKILL:
        said += ", which nothing here sends: most likely the kernel's, for want of memory (its log, `dmesg`, says so)"
        less = "lower rollout.max_concurrent, rollout.servers, rollout.max_total_tokens or sandbox.max_open"
        remedy = f"{less} (memory_peaks in {folder.metrics}: who held how much); {remedy}"
    return f"{said}; nothing of the run is left running\n  remedy:   {remedy}"


def run_rank(
    config: Config,
    folder: Path,
    *,
    meeting: Rendezvous | None = None,
    coordinator_program: Sequence[str] = COORDINATOR,
    observer: StepObserver | None = None,
) -> int:
    """One learner rank from start to end; returns the exit status. `meeting` is where the ranks have met. A measurement
    passes a coordinator of its own, as words for Python, and sees every step through `observer`."""
    ranks = Ranks.from_environment()
    cells = ranks.world // config.learner.ranks_of_a_cell
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)  # torchrun, which may be killed itself
    if shares_cores(config):
        os.environ[VARIABLE] = str(board_path(folder))  # the coordinator hands it on to the servers
    coordinator = None
    try:
        if ranks.rank == 0:
            address = ranks.listening_address(config)
            coordinator = CoordinatorProcess(folder / "config.toml", cells, address, coordinator_program)
    except InfrastructureFailure as error:
        print_error(str(error))
        return 1
    if coordinator:
        _on_signals(lambda number, _: coordinator.forward(number))
    else:
        _on_signals(signal.SIG_DFL)  # a handler would not run while this rank waits for the others inside a library
    try:
        _learn(config, folder, coordinator, meeting, observer)
    except InfrastructureFailure:  # the coordinator is gone, or was told what failed here: it says why
        return coordinator.stop(STOP_S) if coordinator else wait_for_rank_0_error()
    except BaseException as error:
        if coordinator:
            coordinator.forward(signal.SIGTERM)
            coordinator.stop(STOP_S)
        if isinstance(error, UserError):
            raise
        refused = system_error(error)
        if refused is None:
            traceback.print_exception(error)
        if coordinator is None:
            return wait_for_rank_0_error()
        print_error(f"learner rank 0: {_refusal(refused, folder) if refused else error}")
        return 1
    return coordinator.stop(STOP_S) if coordinator else 0


def shares_cores(config: Config) -> bool:
    """Whether threads follow the work: with a share that depends on the moment, sums are equal to rounding only."""
    pinned = config.learner.cpu_cores or config.rollout.cpu_cores
    return config.run.share_cores and not pinned and config.learner.accumulator != "exact"


def _refusal(error: OSError, folder: Path) -> str:
    return describe_os_error(error, folder, resume_hint(RunFolder(folder).checkpoints))


def wait_for_rank_0_error() -> int:
    """Other ranks fail for the same reason as rank 0, which says it once and ends: then torchrun ends this one. It
    reports the rank that ends first, so wait. Returns 1 where rank 0 is well."""
    _on_signals(signal.SIG_DFL)
    time.sleep(FIRST_WORD_S)
    return 1


def _on_signals(handler: Callable[[int, object], None] | signal.Handlers) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, handler)


def _without_torchrun(environment: Mapping[str, str]) -> dict[str, str]:
    """A server that inherits torchrun's variables would wait for this job's ranks in its own process groups."""
    kept = {k: v for k, v in environment.items() if k not in TORCHRUN and not k.startswith("TORCHELASTIC_")}
    return kept | {k: v for k, v in environment.items() if k == TORCHRUN_FILE}


def _of_this_package(environment: Mapping[str, str]) -> dict[str, str]:
    """`python -m megathunder...` takes the package from here, and not from the working folder or an installation."""
    further = environment.get("PYTHONPATH", "")
    return {
        **environment,
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE.parent), further])),
    }


def _begin_as_child() -> None:
    """Until the coordinator has handlers of its own, Ctrl-C is rank 0's to answer: it ends, and takes this along."""
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _learn(
    config: Config,
    folder: Path,
    coordinator: CoordinatorProcess | None,
    meeting: Rendezvous | None,
    observer: StepObserver | None,
) -> None:
    """Join the job, build this rank's learner and serve the coordinator until it says Shutdown."""
    from megathunder.learner import cpu  # torch and Megatron are imported after the checks have passed

    cpu.import_megatron()
    import torch

    from megathunder.learner.learner import Learner
    from megathunder.learner.parallel import initialize, shutdown
    from megathunder.learner.transport.link import CellLink, LeaderLink
    from megathunder.learner.transport.worker import serve
    from megathunder.publish.publisher import Publisher

    ranks = Ranks.from_environment()
    layout = initialize(config.learner, seed=config.run.seed, store=meeting and meeting.store)
    _check_shared_folder(config, ranks)
    endpoint = _share_endpoint(coordinator)
    learner = Learner(config, layout, observer=observer)
    alone = config.publish.lora == "adapter"
    publisher = Publisher(
        config,
        export_weights=learner.export_adapter if alone else learner.export_weights,
        export_base=learner.export_base if alone else None,
        rank=layout.rank,
        device=layout.device,
        host=ranks.reachable_name(config),
        folder=folder,
    )
    leader = None
    if layout.leads_cell:
        hello = Hello(
            cell=layout.cell,
            ranks=len(layout.cell_ranks),
            token=endpoint.token,
            host=socket.gethostname(),
            package=this_package(),
            device=torch.cuda.get_device_name(layout.device) if layout.device.type == "cuda" else "",
            local_parameters=learner.local_parameters,
        )
        leader = LeaderLink(endpoint, hello, coordinator.alive if coordinator else lambda: True)
    link = CellLink(leader, layout.cell_group, layout.cell_leader)
    if coordinator is None:
        _on_signals(lambda *_: None)
    handlers = {
        Differentiate: learner.differentiate,
        Fold: learner.fold,
        Score: learner.score,
        TakeStep: learner.take_step,
        Publish: publisher.publish,
        SaveCheckpoint: learner.save_checkpoint,
        FinishCheckpoint: learner.finish_checkpoint,
        LoadCheckpoint: learner.load_checkpoint,
        ExportPolicy: learner.export_policy,
    }
    board = open_board(os.environ.get(VARIABLE, ""), Role.LEARNER) if layout.device.type == "cpu" else None
    try:
        serve(link, layout.cell, handlers, board)
    finally:
        link.close()
        if layout.rank == 0:
            remove_board(board_path(folder))
    shutdown()


def _check_shared_folder(config: Config, ranks: Ranks) -> None:
    """Several machines write into one run folder, or a checkpoint would be scattered; every rank raises, or none."""
    import torch.distributed as dist

    if ranks.machines == 1:
        return
    file = Path(config.run.folder) / config.run.name / "config.toml"
    found: list[tuple[str, bool]] = [("", True)] * ranks.world
    dist.all_gather_object(found, (socket.gethostname(), file.is_file()))
    if missing := sorted({host for host, seen in found if not seen}):
        raise ConfigError(
            f"run.folder = {config.run.folder!r}: {', '.join(missing)} does not see {file}, which rank 0 has written",
            expected="a folder that every machine of the learner shares",
            remedy="set run.folder to one on a shared file system",
        )


def _share_endpoint(coordinator: CoordinatorProcess | None) -> Endpoint:
    """Rank 0 knows where the coordinator listens and tells the other ranks."""
    import torch.distributed as dist

    from megathunder.learner.transport.link import Endpoint

    known = [(coordinator.address, coordinator.token) if coordinator else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(known, 0)  # among this job's own ranks
    address, token = known[0]
    return Endpoint(address=address, token=token)
