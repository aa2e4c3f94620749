"""What a run is going to do and what it will hold, before anything starts: `plan_table(make_plan(...))`.

The bytes of a rank are `footprint.py`'s; here they are put beside the memory there is: of a GPU and of a machine where
learner and servers have GPUs, else of this host. Every total printed is the sum of the parts printed before it.
Pure: numbers in, a table out. Called by `tools/train.py`, before a run and for `--plan`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.table import Table

from megathunder.config import Config
from megathunder.config.model_shape import ModelShape
from megathunder.hardware import gpu_named
from megathunder.objectives.build_objective import build_objective, needs_teacher
from megathunder.planning.footprint import (
    SIZES,
    Memory,
    Parameters,
    accumulators_held,
    make_memory,
    rank_parameters,
    trained_parameters,
)
from megathunder.schedule.schedules import find_rule

NEAR = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything the table says. Limits are bytes of this host, of one GPU and of one machine; 0: unknown."""

    config: Config
    shape: ModelShape
    ranks: int
    on_gpu: bool
    parameters: Parameters
    trained: Parameters
    memory: Memory
    ranks_here: int = 1
    host_limit_bytes: int = 0
    device_limit_bytes: int = 0
    node_limit_bytes: int = 0
    samples: bool = True  # False where trajectories come from a recording: no server holds anything

    @property
    def cells(self) -> int:
        return max(self.ranks // self.config.learner.ranks_of_a_cell, 1)

    @property
    def servers(self) -> int:
        return len(self.config.rollout.urls) or self.config.rollout.servers

    @property
    def host_bytes(self) -> int:
        """Everything, on one host without a GPU."""
        elsewhere = self.config.rollout.urls or not self.samples
        servers = 0 if elsewhere else self.config.rollout.servers
        held = self.memory.device * self.ranks_here + self.memory.server * servers
        return held + self.copy_bytes + self.base_bytes * servers

    @property
    def copy_bytes(self) -> int:
        """Rank 0's copy of what servers hold, in host memory: changes are taken from it, adapters merged into it."""
        publish = self.config.publish
        kept = publish.transport in ("delta", "auto") or publish.lora == "adapter"
        return self._published_bytes if kept and self.samples else 0

    @property
    def base_bytes(self) -> int:
        """At most: what a server keeps in host memory of the weights that adapters sit on."""
        return self._published_bytes if self.config.publish.lora == "adapter" else 0

    @property
    def _published_bytes(self) -> int:
        return self.shape.parameters * SIZES.get(self.config.rollout.dtype, 2)

    @property
    def full_memory(self) -> Memory:
        """What the same run would hold if it trained every parameter."""
        full = replace(self.config, learner=replace(self.config.learner, lora_rank=0))
        return make_memory(full, self.shape, ranks=self.ranks, on_gpu=self.on_gpu)

    @property
    def saved_bytes(self) -> int:
        """Of one rank, by training adapters alone; the adapters' own weights are taken off."""
        full = self.full_memory
        return full.device + full.host - self.memory.device - self.memory.host

    @property
    def sandbox_bytes(self) -> int:
        """Most that commands and work folders of sandboxes may take, on the machine of rank 0."""
        sandbox = self.config.sandbox
        return (sandbox.max_running * sandbox.memory_mb + sandbox.max_open * sandbox.disk_mb) << 20

    @property
    def node_bytes(self) -> int:
        """Host memory of the machine of rank 0."""
        return self.memory.host * self.ranks_of_a_machine + self.sandbox_bytes + self.copy_bytes

    @property
    def ranks_of_a_machine(self) -> int:
        """Learner ranks whose host memory is one machine's."""
        return min(self.ranks, self.config.hardware.gpus_per_node) if self.on_gpu else self.ranks_here


def make_plan(
    config: Config,
    shape: ModelShape,
    *,
    ranks: int = 1,
    ranks_here: int = 0,
    host_limit_bytes: int = 0,
    gpu_bytes: int = 0,
    samples: bool = True,
) -> Plan:
    """Compute the plan. `host_limit_bytes`: memory of this host; `gpu_bytes`: of its GPU, 0 where it has none;
    `ranks_here`: of the `ranks`, those on this machine (0: all). `samples`: the run has servers."""
    hardware = config.hardware
    named = hardware.gpu_memory_gib or (gpu_named(hardware.gpu).memory_gib if hardware.gpu else 0.0)
    on_gpu = config.learner.device == "cuda" or (config.learner.device == "auto" and bool(named or gpu_bytes))
    here = 0 if named else host_limit_bytes  # a named GPU is another machine's
    meant = round(hardware.host_memory_gib * 2**30)
    return Plan(
        config=config,
        shape=shape,
        ranks=ranks,
        on_gpu=on_gpu,
        parameters=rank_parameters(shape, config.learner),
        trained=trained_parameters(shape, config.learner),
        memory=make_memory(config, shape, ranks=ranks, on_gpu=on_gpu),
        ranks_here=ranks_here or ranks,
        host_limit_bytes=0 if on_gpu else meant or host_limit_bytes,
        device_limit_bytes=(round(named * 2**30) or gpu_bytes) if on_gpu else 0,
        node_limit_bytes=(meant or here) if on_gpu else 0,
        samples=samples,
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
    per_update = config.trajectories_at_most * rollout.max_tokens
    active = f", {count(shape.active_parameters)} active a token" if shape.experts else ""
    adapters = f", adapters of rank {learner.lora_rank} alone are trained" if learner.lora_rank else ""
    server = _sum({"weights": memory.server_weights, "keys and values": memory.server_cache})
    return [
        ("objective, schedule", f"{config.objective}, {config.schedule}, release {config.streaming.release}"),
        ("updates", _updates(config)),
        ("tokens", f"at most {count(per_update)} an update, {count(run.updates * per_update)} in all"),
        ("policy", f"{_exact(shape.parameters)} parameters{active}, {learner.dtype}, {learner.model}{adapters}"),
        ("processes", _processes(plan)),
        ("layout", _layout(plan)),
        ("parameters of a rank", _rank_parameters(plan)),
        ("a learner rank", _sum(memory.device_parts)),
        ("accumulators", _accumulators(plan)),
        *([("beyond them", text)] if (text := _beyond_classes(config)) else []),
        *([("sharding them", text)] if (text := _sharding(plan)) else []),
        *([("adapters save", _savings(plan))] if learner.lora_rank else []),
        *([("its host memory", _sum(memory.host_parts))] if plan.on_gpu else []),
        ("a server" if rollout.gpus_per_server == 1 else "a GPU of a server", f"{server}: {_cache(plan)}"),
        *([("publication", _copies(plan))] if plan.copy_bytes else []),
        *_limits(plan),
    ]


def count(number: float) -> str:
    """Three digits: 30.5B, 152k, 12."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"


def in_bytes(number: float) -> str:
    """Two decimals, so that a printed sum is that of its printed parts up to the last one."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= scale:
            return f"{number / scale:,.2f} {unit}"
    return f"{number:.0f} B"


# ---------------------------------------------------------------------------------------------- private


def _copies(plan: Plan) -> str:
    base = f"; a server's copy of what adapters sit on, at most {in_bytes(plan.base_bytes)}" if plan.base_bytes else ""
    return f"rank 0's copy of what servers hold, in host memory, {in_bytes(plan.copy_bytes)}{base}"


def _updates(config: Config) -> str:
    run, target = config.run, config.trajectory_target
    sizes = " or ".join(str(size) for size in config.group_sizes)
    text = f"{run.updates} of {run.groups_per_update} groups x {sizes}"
    if run.group_control == "fixed":
        return f"{text} = {config.trajectories_at_most} trajectories"
    text = f"{text} (sagc)"
    return f"{run.updates} of about {target} trajectories in groups of {sizes} (sagc)" if target else text


def _processes(plan: Plan) -> str:
    config = plan.config
    started = "already running" if config.rollout.urls else "started here"
    teacher = " + 1 teacher" if needs_teacher(config) and not config.opd.teacher_urls else ""
    text = f"{plan.ranks} learner rank(s) in {plan.cells} cell(s), 1 coordinator"
    if not plan.samples:
        return f"{text}, no server: recorded trajectories"
    text += f", {plan.servers} server(s) {started}{teacher}, at most {config.sandbox.max_running} commands at once"
    if not plan.on_gpu:
        return text
    serving = (plan.servers + bool(teacher)) * config.rollout.gpus_per_server
    total = plan.ranks + serving
    nodes = -(-total // config.hardware.gpus_per_node)
    return f"{text}; GPUs {plan.ranks} + {serving} = {total} on {nodes} machine(s)"


def _layout(plan: Plan) -> str:
    learner, ranks = plan.config.learner, plan.ranks
    tensor, pipeline, context = learner.tensor_parallel, learner.pipeline_parallel, learner.context_parallel
    data = ranks // (tensor * pipeline * context)
    text = f"data {data} x tensor {tensor} x pipeline {pipeline} x context {context}"
    if plan.shape.experts:
        ways = learner.expert_tensor_parallel or tensor
        copies = ranks // (learner.expert_parallel * ways * pipeline)
        text += f"; experts: data {copies} x expert {learner.expert_parallel} x tensor {ways} x pipeline {pipeline}"
    return f"{text} = {ranks}"


def _rank_parameters(plan: Plan) -> str:
    held = plan.parameters
    parts = f" = dense {_exact(held.dense)} + expert {_exact(held.expert)}" if held.expert else ""
    trained = "" if plan.trained == held else f"; trained {_exact(plan.trained.total)}"
    return f"{_exact(held.total)}{parts}{trained}"


def _accumulators(plan: Plan) -> str:
    groups, own = accumulators_held(plan.config)
    if not groups + own:
        return "none: all work is direct"
    placed = "in host memory" if plan.memory.accumulators_on_host else "beside the gradient buffer"
    kinds = f"{groups} of open groups" + (f" + {own} of single trajectories" if own else "")
    each = plan.memory.accumulators // (groups + own)
    shards = plan.config.learner.accumulator_shards
    whole = f", 1/{shards} of each on a rank" if shards > 1 else ""
    return f"{in_bytes(plan.memory.accumulators)} = {groups + own} x {in_bytes(each)} {placed} ({kinds}{whole})"


def _beyond_classes(config: Config) -> str:
    """Where rewards go that have neither a class nor moments; empty where there is no such reward."""
    objective = build_objective(config)
    opens = objective.waits_for_closure and find_rule(config.schedule).opens_groups
    if objective.affine or not opens or objective.keeps_each_gradient or config.learner.accumulator == "exact":
        return ""
    return (
        f"grpo.advantage = {config.grpo.advantage!r} is not affine in the reward: of a group, what has more than "
        f"{objective.reward_values} different rewards takes an accumulator per trajectory "
        f"(at most {config.streaming.max_per_trajectory_accumulators} per cell) or waits until the group closes"
    )


def _sharding(plan: Plan) -> str:
    """What `accumulator_shards` saves a rank, or would save; empty where no two ranks hold the same parameters."""
    learner, held = plan.config.learner, sum(accumulators_held(plan.config))
    ways = plan.ranks // (learner.tensor_parallel * learner.pipeline_parallel)
    shards = learner.accumulator_shards
    if not held or ways < 2:
        return ""

    def bytes_with(count: int) -> int:
        config = replace(plan.config, learner=replace(learner, accumulator_shards=count))
        memory = make_memory(config, plan.shape, ranks=plan.ranks, on_gpu=plan.on_gpu)
        return memory.accumulators + memory.scratch

    saved = bytes_with(1) - bytes_with(shards if shards > 1 else ways)
    worth = f"saves {in_bytes(saved)}" if saved > 0 else f"saves nothing (it costs {in_bytes(-saved)})"
    traffic = f"a reduce-scatter of {in_bytes(plan.memory.gradient)} a micro-batch"
    if shards > 1:
        return f"{worth} a rank, scratch included, for {traffic}; {shards} replicas take work together"
    return f"learner.accumulator_shards = {ways} {worth} a rank, for {traffic} and cells of {ways} replicas"


def _savings(plan: Plan) -> str:
    full, memory = plan.full_memory, plan.memory
    trained = f"{plan.trained.total / plan.parameters.total:.2%} of a rank's parameters"
    states = {
        "gradient buffer": full.gradient - memory.gradient,
        "optimizer": full.optimizer - memory.optimizer,
        "accumulators": full.accumulators - memory.accumulators,
        "scratch": full.scratch - memory.scratch,
    }
    return f"{_sum(states)} of full fine-tuning, for {in_bytes(memory.weights - full.weights)} of weights ({trained})"


def _cache(plan: Plan) -> str:
    rollout = plan.config.rollout
    long = rollout.max_total_tokens // rollout.max_tokens
    return f"{count(rollout.max_total_tokens)} tokens of keys and values, {long} of the longest trajectories"


def _limits(plan: Plan) -> list[tuple[str, str]]:
    fraction = float(plan.config.rollout.sglang.get("mem_fraction_static", "0.85"))
    compared = [("this host", plan.host_bytes, plan.host_limit_bytes, "programs not counted")]
    if plan.on_gpu:
        serving = round(plan.device_limit_bytes * fraction)
        ranks = min(plan.ranks, plan.config.hardware.gpus_per_node)
        copy = f" + what is published {in_bytes(plan.copy_bytes)}" if plan.copy_bytes else ""
        parts = f"{ranks} ranks + sandboxes {in_bytes(plan.sandbox_bytes)}{copy}"
        compared = [
            ("one learner GPU", plan.memory.device, plan.device_limit_bytes, "all parts above"),
            ("one server GPU", plan.memory.server, serving, f"{fraction:.0%} of the GPU, SGLang's share"),
            ("one machine's host", plan.node_bytes, plan.node_limit_bytes, parts),
        ]
    lines = []
    for name, need, limit, remark in compared:
        if limit:
            share = need / limit
            state = "EXCEEDED" if share > 1 else "near" if share > NEAR else "ample"
            lines.append((name, f"{in_bytes(need)} of {in_bytes(limit)} ({share:.0%}), {remark}: {state}"))
    return lines


def _sum(parts: dict[str, int]) -> str:
    held = {name: size for name, size in parts.items() if size}
    return f"{in_bytes(sum(held.values()))} = " + " + ".join(f"{name} {in_bytes(v)}" for name, v in held.items())


def _exact(number: int) -> str:
    return f"{number:,} ({count(number)})" if number >= 1e6 else f"{number:,}"
