"""What a run is going to do and what it will hold, before anything starts: `plan_table(Plan(...))`.

Memory of one learner rank, in bytes, with p parameters on it:
    weights p * size;  gradient 4 p;  optimizer 8 p (two moments), 12 p below float32 (and float32 masters);
    accumulators 4 p * (reward values * open groups + own) beside the gradient buffer (8 p each in exact mode);
    activations of one micro-batch, an estimate: tokens * (layers * (9 hidden + 3 ffn) * size + 4 vocabulary), with one
    layer's share kept under full recomputation.
A server holds weights and its key-value cache. Pure: numbers in, a table out; the limits are given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.table import Table

from megathunder.config import Config
from megathunder.config.model_shape import ModelShape

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
NEAR = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one learner rank (or, `server`, of one rollout server)."""

    weights: int
    gradient: int
    optimizer: int
    accumulators: int
    activations: int
    server: int

    @property
    def rank(self) -> int:
        return self.weights + self.gradient + self.optimizer + self.accumulators + self.activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything the table says. `limit_bytes`: what one rank and, on a CPU, the whole host may use; 0: unknown."""

    config: Config
    shape: ModelShape
    ranks: int
    local_parameters: int
    classes: int
    memory: Memory
    host_limit_bytes: int = 0
    device_limit_bytes: int = 0

    @property
    def cells(self) -> int:
        learner = self.config.learner
        coupled = learner.tensor_parallel * learner.pipeline_parallel * learner.context_parallel
        return max(self.ranks // coupled, 1)

    @property
    def host_bytes(self) -> int:
        """Everything, on one host without a GPU."""
        servers = 0 if self.config.rollout.urls else self.config.rollout.servers
        return self.memory.rank * self.ranks + self.memory.server * servers


def make_plan(
    config: Config,
    shape: ModelShape,
    *,
    ranks: int = 1,
    local_parameters: int = 0,
    host_limit_bytes: int = 0,
    device_limit_bytes: int = 0,
) -> Plan:
    """Reckon the plan. `local_parameters` of one rank; 0: all parameters divided by the layout."""
    learner = config.learner
    local = local_parameters or _local_parameters(config, shape)
    layout = learner.tensor_parallel * learner.pipeline_parallel * learner.context_parallel
    shards = max(ranks // layout, 1) if learner.distributed_optimizer else 1
    classes = _accumulators_a_group(config)
    return Plan(
        config=config,
        shape=shape,
        ranks=ranks,
        local_parameters=local,
        classes=classes,
        memory=_memory(config, shape, local, classes, shards),
        host_limit_bytes=host_limit_bytes,
        device_limit_bytes=device_limit_bytes,
    )


def plan_table(plan: Plan) -> Table:
    """The table a person reads before the run starts; the last lines name a limit that is near."""
    table = Table(title=f"plan of {plan.config.run.name}", show_header=False, title_justify="left", min_width=72)
    table.add_column(style="bold")
    table.add_column()
    for name, value in plan_lines(plan):
        table.add_row(name, value)
    return table


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """The same as pairs of a name and a sentence."""
    config, shape, memory = plan.config, plan.shape, plan.memory
    run, rollout, learner = config.run, config.rollout, config.learner
    attempts = run.groups_per_update * run.group_size
    started = "already running" if rollout.urls else "started here"
    servers = len(rollout.urls) or rollout.servers
    teacher = " + 1 teacher" if config.objective == "opd" and not config.opd.teacher_urls else ""
    active = f", {_count(shape.active_parameters)} active a token" if shape.experts else ""
    open_groups = min(config.streaming.max_open_groups, run.groups_per_update)
    own = config.streaming.max_own_accumulators if plan.classes and config.streaming.content_ready else 0
    held = plan.classes * open_groups + own
    per_update = attempts * rollout.max_tokens
    processes = f"{plan.ranks} learner rank(s) in {plan.cells} cell(s), 1 coordinator, {servers} server(s) {started}"
    parts = {
        "weights": memory.weights,
        "gradient": memory.gradient,
        "optimizer": memory.optimizer,
        "activations (estimate)": memory.activations,
    }
    each = f"{held} of {_bytes(memory.accumulators // max(held, 1))}, on the {learner.accumulator_placement}"
    lines = [
        ("objective, schedule", f"{config.objective}, {config.schedule}, release {config.streaming.release}"),
        ("updates", f"{run.updates} of {run.groups_per_update} groups x {run.group_size} = {attempts} trajectories"),
        ("tokens", f"at most {_count(per_update)} an update, {_count(run.updates * per_update)} in all"),
        ("policy", f"{_count(shape.parameters)} parameters{active}, {learner.dtype}, {learner.model}"),
        ("processes", f"{processes}{teacher}, at most {config.sandbox.max_running} commands at once"),
        ("a learner rank", f"{_bytes(memory.rank)}: {', '.join(f'{k} {_bytes(v)}' for k, v in parts.items())}"),
        ("accumulators", f"{_bytes(memory.accumulators)} of them: {each}" if held else "none: all work is direct"),
        ("a server", f"{_bytes(memory.server)}: weights, {_count(rollout.max_total_tokens)} tokens of keys and values"),
    ]
    return lines + _limits(plan)


def _limits(plan: Plan) -> list[tuple[str, str]]:
    lines = []
    for name, need, limit in (
        ("this host", plan.host_bytes, plan.host_limit_bytes),
        ("one GPU", plan.memory.rank, plan.device_limit_bytes),
    ):
        if limit:
            share = need / limit
            state = "EXCEEDED" if share > 1 else "near" if share > NEAR else "ample"
            lines.append((name, f"{_bytes(need)} of {_bytes(limit)} ({share:.0%}), programs not counted: {state}"))
    return lines


def _accumulators_a_group(config: Config) -> int:
    """Accumulators an open group holds: one a reward value (a binary verifier has two); none for direct work."""
    if config.objective == "opd" or config.schedule in ("sync", "one_step_off", "periodic_async"):
        return 0
    return config.streaming.reward_values


def _local_parameters(config: Config, shape: ModelShape) -> int:
    """Parameters of the fullest rank: experts divided by expert parallelism, the rest by tensor parallelism."""
    learner = config.learner
    experts = shape.moe_layers * 3 * shape.hidden * shape.expert_ffn * shape.experts
    expert_ways = learner.expert_parallel * (learner.expert_tensor_parallel or learner.tensor_parallel)
    rest = (shape.parameters - experts) / learner.tensor_parallel
    return math.ceil((rest + experts / expert_ways) / learner.pipeline_parallel)


def _memory(config: Config, shape: ModelShape, local: int, classes: int, shards: int) -> Memory:
    learner, rollout = config.learner, config.rollout
    size = SIZES[learner.dtype]
    open_groups = min(config.streaming.max_open_groups, config.run.groups_per_update)
    accumulator = local * (8 if learner.accumulator == "exact" else max(4, size))
    own = config.streaming.max_own_accumulators if classes and config.streaming.content_ready else 0
    width = 9 * shape.hidden + 3 * max(shape.ffn, shape.expert_ffn * max(shape.experts_per_token, 1))
    kept = shape.layers if learner.recompute != "full" else 1
    layout = learner.tensor_parallel * learner.pipeline_parallel * learner.context_parallel
    activations = config.streaming.pack_tokens * (kept * width * size + 4 * shape.vocabulary) // layout
    server_size = SIZES.get(rollout.dtype, 2)
    cache = rollout.max_total_tokens * 2 * shape.layers * shape.kv_heads * shape.head_size * server_size
    return Memory(
        weights=local * size,
        gradient=local * max(4, size),
        optimizer=local * (8 if size >= 4 else 12) * (2 if size == 8 else 1) // shards,
        accumulators=accumulator * (classes * open_groups + own),
        activations=activations,
        server=shape.parameters * server_size + cache,
    )


def _count(number: float) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"


def _bytes(number: float) -> str:
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
