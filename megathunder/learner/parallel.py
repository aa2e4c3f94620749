"""Process groups and the parallel layout: which rank holds what, and which ranks form a cell.

    ranks = data_parallel x pipeline x context x tensor              (dense parameters)
    ranks = expert_data_parallel x pipeline x expert x expert_tensor (expert parameters)

A *cell* is the smallest set of ranks closed under "shares a collective in a forward pass": the tensor, pipeline and
context group of a rank, and its expert group; with `accumulator_shards` also the replicas that share accumulators. A
cell takes one work item at a time, cells never wait for each other before the barrier.
Called once per learner process; refuses layouts that Megatron-Core would run wrongly or not at all.
"""

from __future__ import annotations

import functools
import os
import random
from dataclasses import dataclass
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist

from megathunder.config.layout_checks import check_ranks
from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner import cpu, cpu_kernels

IDLE_LIMIT = timedelta(days=7)
"""Of a cell's commands: ranks wait for work as long as rollouts take; a leader that dies closes the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where this rank stands. Sizes and ranks count from the groups of Megatron's parallel state."""

    rank: int
    world: int
    device: torch.device
    tensor: int
    tensor_rank: int
    pipeline: int
    pipeline_rank: int
    virtual_pipeline: int
    context: int
    context_rank: int
    expert: int
    expert_rank: int
    expert_tensor: int
    expert_tensor_rank: int
    data: int
    data_rank: int
    cell: int
    cells: int
    cell_ranks: tuple[int, ...]
    cell_group: dist.ProcessGroup  # gloo: carries commands and names, also where tensors travel by NCCL
    shard_group: dist.ProcessGroup | None = None  # ranks of the cell with the same dense parameters, where sharded
    expert_shard_group: dist.ProcessGroup | None = None

    @property
    def cell_leader(self) -> int:
        """Global rank of the cell's leader: its smallest."""
        return self.cell_ranks[0]

    @property
    def leads_cell(self) -> bool:
        return self.rank == self.cell_leader

    @property
    def cell_replicas(self) -> int:
        """Data-parallel replicas inside this cell: more than one where experts tie them, or accumulators are shared."""
        return len(self.cell_ranks) // (self.tensor * self.pipeline * self.context)

    @property
    def tied(self) -> bool:
        """Experts are spread over the replicas of this cell: all of them must run the same number of passes."""
        return self.tensor * self.context % (self.expert * self.expert_tensor) != 0

    @property
    def cell_replica(self) -> int:
        """Which of `cell_replicas` this rank belongs to."""
        return self.data_rank % self.cell_replicas

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline - 1


def initialize(config: LearnerConfig, *, seed: int = 0, store: dist.Store | None = None) -> Layout:
    """Join the job (over `store` where the ranks have met already, else by torchrun's environment, or alone as one
    process), build Megatron's groups and seed this rank.

    Raises ConfigError before any group is built if the layout cannot run on the ranks there are.
    """
    device = choose_device(config)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    check_ranks(config, world)
    if device.type == "cpu":
        cpu_kernels.cap_instructions()
        cpu.install()
        _pin(config.cpu_cores)
    else:
        torch.cuda.set_device(device)
    _join(device, rank, world, config.collective_timeout_s, store)
    if device.type == "cpu":
        _choose_kernels(config, rank)
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
            context_parallel_size=config.context_parallel,
            expert_model_parallel_size=config.expert_parallel,
            expert_tensor_parallel_size=config.expert_tensor_parallel or None,
            distributed_timeout_minutes=max(1, round(config.collective_timeout_s / 60)),
            create_gloo_process_groups=True,
        )
    seed_rank(seed)
    return _layout(config, device)


def _choose_kernels(config: LearnerConfig, rank: int) -> None:
    """Rank 0 measures, all compute alike: ranks that share a matrix must round alike. Exact sums promise the same bytes
    in every run, so there nothing is chosen by the clock."""
    own = config.cpu_kernels == "auto"
    taken = [None]
    if rank == 0 and own and config.dtype == "float32" and config.accumulator != "exact":
        choice = _measured_gemm()
        taken = [choice.taken]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(taken, 0)  # among this job's own ranks
    cpu_kernels.use(gemm=taken[0] or "mkl", own=own)


@functools.cache
def _measured_gemm() -> cpu_kernels.GemmChoice:
    choice = cpu_kernels.measure_gemm()
    print(choice.describe(), flush=True)
    return choice


def shutdown() -> None:
    """Leave the job; a later `initialize` in the same process starts anew."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def seed_rank(seed: int) -> None:
    """Seed every generator; tensor-parallel ranks draw different numbers only inside Megatron's tracker."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def choose_device(config: LearnerConfig) -> torch.device:
    """The device of this rank: `auto` takes CUDA where there is one."""
    if config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if config.device in ("auto", "cuda"):
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        raise ConfigError(
            "learner.device is cuda and torch sees no CUDA device",
            expected="a CUDA build of torch on a machine with a GPU",
            remedy="set learner.device=cpu, or install the gpu extra on a GPU machine",
        )
    raise ConfigError(
        f"learner.device is {config.device!r}", expected="auto, cpu or cuda", remedy="name one of the three"
    )


def _pin(cores: tuple[int, ...]) -> None:
    if not cores:
        return
    os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", "0")) % len(cores)]})
    torch.set_num_threads(1)


def _join(device: torch.device, rank: int, world: int, timeout_s: float, store: dist.Store | None) -> None:
    if dist.is_initialized():
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if store is not None:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    elif world == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout)


def _layout(config: LearnerConfig, device: torch.device) -> Layout:
    from megatron.core import parallel_state as state

    rank, world = dist.get_rank(), dist.get_world_size()
    coupled = [state.get_tensor_model_parallel_group(), state.get_pipeline_model_parallel_group()]
    coupled += [state.get_context_parallel_group(), state.get_expert_tensor_and_model_parallel_group()]
    mine = sorted({r for group in coupled for r in dist.get_process_group_ranks(group)} | _sharing(config))
    everyone: list[list[int]] = [[] for _ in range(world)]
    dist.all_gather_object(everyone, mine)
    cells = join_coupled(everyone)
    groups = [dist.new_group(list(ranks), timeout=IDLE_LIMIT, backend="gloo") for ranks in cells]
    cell = next(i for i, ranks in enumerate(cells) if rank in ranks)
    shard_groups = _shard_groups(cells[cell]) if config.accumulator_shards > 1 else (None, None)
    return Layout(
        rank=rank,
        world=world,
        device=device,
        tensor=config.tensor_parallel,
        tensor_rank=state.get_tensor_model_parallel_rank(),
        pipeline=config.pipeline_parallel,
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        virtual_pipeline=config.virtual_pipeline,
        context=config.context_parallel,
        context_rank=state.get_context_parallel_rank(),
        expert=config.expert_parallel,
        expert_rank=state.get_expert_model_parallel_rank(),
        expert_tensor=config.expert_tensor_parallel or config.tensor_parallel,
        expert_tensor_rank=state.get_expert_tensor_parallel_rank(),
        data=state.get_data_parallel_world_size(),
        data_rank=state.get_data_parallel_rank(),
        cell=cell,
        cells=len(cells),
        cell_ranks=cells[cell],
        cell_group=groups[cell],
        shard_group=shard_groups[0],
        expert_shard_group=shard_groups[1],
    )


def _sharing(config: LearnerConfig) -> set[int]:
    """Ranks that hold the same dense parameters as this one and share its accumulators: a run of Megatron's
    data-parallel (and context-parallel) group."""
    from megatron.core import parallel_state as state

    ranks = dist.get_process_group_ranks(state.get_data_parallel_group(with_context_parallel=True))
    first = ranks.index(dist.get_rank()) // config.accumulator_shards * config.accumulator_shards
    return set(ranks[first : first + config.accumulator_shards])


def _shard_groups(cell: tuple[int, ...]) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Ranks of this cell that hold the same dense parameters, and the same experts; every rank of the job calls."""
    from megatron.core import parallel_state as state

    dense = dist.get_process_group_ranks(state.get_data_parallel_group(with_context_parallel=True))
    expert = dist.get_process_group_ranks(state.get_expert_data_parallel_group())
    mine = [tuple(r for r in ranks if r in cell) for ranks in (dense, expert)]
    everyone: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    made = {ranks: dist.new_group(list(ranks)) for ranks in sorted({ranks for one in everyone for ranks in one})}
    return made[mine[0]], made[mine[1]]


def join_coupled(groups: list[list[int]]) -> list[tuple[int, ...]]:
    """Connected components of ranks that share a group, each sorted, ordered by smallest rank.

    join_coupled([[0, 1], [0, 1], [2, 3], [2, 3]]) == [(0, 1), (2, 3)]
    """
    cells: list[set[int]] = []
    for ranks in groups:
        joined = set(ranks)
        apart = []
        for cell in cells:
            if cell & joined:
                joined |= cell
            else:
                apart.append(cell)
        cells = [*apart, joined]
    return sorted(tuple(sorted(cell)) for cell in cells)
