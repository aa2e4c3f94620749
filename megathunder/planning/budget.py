"""Refuses, before anything starts, a run whose accumulators do not fit: `check_memory_fits(plan)`.

Compared are the sums of the plan without its estimates (activations and logits), with the servers' weights and cache
where they share a host, so that nothing is refused that could run.

    where the accumulators lie          limit
    on a GPU                            its memory
    in host memory of a GPU machine     hardware.host_memory_gib, or what this host lets the process have
    on a machine without a GPU          the same

Called by `tools/train.py` once the plan is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megathunder.errors import ConfigError
from megathunder.planning.footprint import accumulators_held, accumulators_of_a_group, make_memory
from megathunder.planning.plan import Plan, in_bytes
from megathunder.schedule.schedules import find_rule

LORA_RANK = 16  # of the remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPool:
    """Memory that `ranks` learner ranks share: what they need without accumulators, each one's accumulators, and the
    limit, in bytes."""

    name: str
    ranks: int
    others: int
    accumulators: int
    limit: int

    @property
    def need(self) -> int:
        return self.others + self.ranks * self.accumulators

    @property
    def room(self) -> int:
        """What is left for the accumulators of one rank."""
        return max(self.limit - self.others, 0) // self.ranks


def check_memory_fits(plan: Plan) -> None:
    """Raise ConfigError that names the bytes needed, the limit, and what would fit."""
    for pool in memory_pools(plan):
        if not pool.limit or pool.need <= pool.limit or not pool.accumulators:
            continue
        held = sum(accumulators_held(plan.config))
        shared = f" of {pool.ranks} ranks" if pool.ranks > 1 else ""
        raise ConfigError(
            f"{held} accumulators take {in_bytes(pool.accumulators)} a learner rank; with "
            f"{in_bytes(pool.others)} of weights, optimizer and what else lies there that is {in_bytes(pool.need)}"
            f"{shared} in {pool.name}, which has {in_bytes(pool.limit)}",
            expected=f"accumulators of at most {in_bytes(pool.room)} a rank",
            remedy="; or ".join(remedies(plan, pool)),
        )


def memory_pools(plan: Plan) -> list[MemoryPool]:
    """Where accumulators lie, most confined first."""
    memory = plan.memory
    fixed = memory.device - memory.activations - memory.logits  # without the estimates
    if memory.accumulators_on_host:
        ranks, others = plan.ranks_of_a_machine, memory.host - memory.accumulators
        limit = plan.node_limit_bytes
        return [_pool("the host memory of one machine", ranks, others * ranks, memory.accumulators, limit)]
    fixed -= memory.accumulators
    if plan.on_gpu:
        return [_pool("one learner GPU", 1, fixed, memory.accumulators, plan.device_limit_bytes)]
    elsewhere = plan.config.rollout.urls or not plan.samples
    servers = 0 if elsewhere else memory.server * plan.config.rollout.servers
    others = fixed * plan.ranks_here + servers
    return [_pool("this host", plan.ranks_here, others, memory.accumulators, plan.host_limit_bytes)]


def remedies(plan: Plan, pool: MemoryPool) -> Iterator[str]:
    """What would make it fit, cheapest first; at least one."""
    config, memory = plan.config, plan.memory
    streaming, learner = config.streaming, config.learner
    groups, own = accumulators_held(config)
    each = memory.accumulators // (groups + own)
    fitting = int(pool.room // each - own) // accumulators_of_a_group(config) if groups else 0
    if fitting >= 1:
        yield f"set streaming.max_open_groups = {fitting}"
    if own:
        yield "set streaming.content_ready = false (rewards by class instead of an accumulator a trajectory)"
    if plan.on_gpu and not memory.accumulators_on_host:
        yield "set learner.accumulator_placement = 'host'"
    ways = plan.ranks // (learner.tensor_parallel * learner.pipeline_parallel)
    if ways > learner.accumulator_shards and not config.salt.active:
        sharded = replace(config, learner=replace(learner, accumulator_shards=ways))
        smaller = make_memory(sharded, plan.shape, ranks=plan.ranks, on_gpu=plan.on_gpu)
        if smaller.accumulators + smaller.scratch < memory.accumulators + memory.scratch:
            yield f"set learner.accumulator_shards = {ways}"
    if not learner.lora_rank:
        yield f"set learner.lora_rank = {LORA_RANK} (adapters alone have accumulators)"
    if streaming.max_open_groups > 1 and fitting < 1:
        yield "take a smaller policy or a larger machine: not even one open group fits"
    if config.salt.active:
        yield "set salt.amplification = 0 and measure = false (plain GRPO: an accumulator a reward, not a trajectory)"
    elif find_rule(config.schedule).opens_groups and learner.accumulator == "fp32":
        yield "set schedule = 'sync' (no accumulators, no overlap)"


def _pool(name: str, ranks: int, others: int, accumulators: int, limit: int) -> MemoryPool:
    return MemoryPool(name=name, ranks=ranks, others=others, accumulators=accumulators, limit=limit)
