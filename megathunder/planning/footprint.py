"""Parameters and bytes of one learner rank, the fullest, from the shape of the model and the layout; nothing is built.

    ranks = data x pipeline p x context c x tensor t = expert-data x pipeline x expert e x expert-tensor x
    dense    embedding, attention, norms, router, shared experts: matrices / t, vectors whole
    expert   experts / (e x)

With n trained parameters on the rank (all of them, or the adapters), of type size s:

    weights s (all);  gradient buffer 4 n;  optimizer 8 n (two moments), 12 n below float32 (and float32 masters),
    sharded over ranks / (t p) for dense and ranks / (e x p) for expert parameters with `distributed_optimizer`;
    accumulators 4 n each (8 n in exact mode), in host memory if they are placed there; of dense parameters 1 / shards
    of that with `accumulator_shards`, of experts 1 / (ranks of the cell that hold the same ones);
    scratch where a backward pass cannot add to the accumulator directly: host or shards 4 n, for host memory of a GPU
    two of them and the copies' buffers; exact 8 n, the integer batch;
    checkpoint: a copy in host memory of the trained weights and the optimizer, while one is written beside an update;
    activations of one micro-batch of `pack_tokens` / c tokens (estimate), its logits (estimate).

Called by `plan.py`; pure. Sizes are exact up to Megatron's padding of buffers; estimates are named so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megathunder.config import Config
from megathunder.config.learner import LearnerConfig
from megathunder.config.model_shape import ModelShape
from megathunder.learner.model.pipeline_split import uneven_stages
from megathunder.objectives.build_objective import build_objective
from megathunder.schedule.schedules import find_rule

SIZES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
GPU_PROGRAM_BYTES = 4 << 30
"""Of a GPU rank: CUDA context, NCCL's buffers, what the allocator cannot use."""
HOST_PROGRAM_BYTES = 6 << 30
"""Of a GPU rank, in host memory: interpreter, libraries, the driver's own."""
COPY_BUFFER_BYTES = 3 * 64 << 20
"""Between a GPU and accumulators in host memory (`learner/accumulators/host.py`)."""
LOGIT_COPIES_BYTES = 14
"""Of one logit below float32 at the peak: the projection's output, three float32 arrays (logits, shares, gradient)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters by how they are shared out."""

    dense: int = 0
    expert: int = 0

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(dense=self.dense + other.dense, expert=self.expert + other.expert)

    @property
    def total(self) -> int:
        return self.dense + self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one learner rank, and of one GPU of a rollout server."""

    weights: int
    gradient: int
    optimizer: int
    accumulators: int
    scratch: int
    activations: int
    logits: int
    publication: int
    program: int
    accumulators_on_host: bool
    host_program: int
    checkpoint: int
    server_weights: int
    server_cache: int

    @property
    def device_parts(self) -> dict[str, int]:
        """What lies where the rank computes; on a CPU that is the host."""
        held = 0 if self.accumulators_on_host else self.accumulators
        return {
            "weights": self.weights,
            "gradient buffer": self.gradient,
            "optimizer": self.optimizer,
            "accumulators": held,
            "scratch": self.scratch,
            "activations (estimate)": self.activations,
            "logits (estimate)": self.logits,
            "publication": self.publication,
            "CUDA, NCCL": self.program,
            "checkpoint": 0 if self.program else self.checkpoint,
        }

    @property
    def host_parts(self) -> dict[str, int]:
        """What lies in host memory beside it."""
        held = self.accumulators if self.accumulators_on_host else 0
        return {
            "accumulators": held,
            "program": self.host_program,
            "checkpoint": self.checkpoint if self.program else 0,
        }

    @property
    def device(self) -> int:
        return sum(self.device_parts.values())

    @property
    def host(self) -> int:
        return sum(self.host_parts.values())

    @property
    def server(self) -> int:
        return self.server_weights + self.server_cache


def rank_parameters(shape: ModelShape, learner: LearnerConfig, stage: int | None = None) -> Parameters:
    """Parameters of a rank of pipeline stage `stage`; None: of the stage that has most."""
    if stage is None:
        stages = [rank_parameters(shape, learner, s) for s in range(learner.pipeline_parallel)]
        return max(stages, key=lambda parameters: parameters.total)
    held = Parameters()
    for layer in _layers_of(shape, learner, stage):
        held += _layer_parameters(shape, learner, sparse=_is_sparse(shape, layer))
    last = stage == learner.pipeline_parallel - 1
    padded = math.ceil(shape.vocabulary / learner.tensor_parallel)
    matrices = int(stage == 0) + int(last and not (shape.tied and stage == 0))
    return held + Parameters(dense=matrices * padded * shape.hidden + (shape.hidden if last else 0))


def adapter_parameters(shape: ModelShape, learner: LearnerConfig) -> Parameters:
    """The same of the low-rank adapters, of the first stage: r (in + out) a target, sharded as its layer is."""
    total = Parameters()
    for layer in _layers_of(shape, learner, 0):
        total += _layer_adapters(shape, learner, sparse=_is_sparse(shape, layer))
    return total


def trained_parameters(shape: ModelShape, learner: LearnerConfig) -> Parameters:
    """What the gradient buffer, the optimizer and the accumulators hold."""
    return adapter_parameters(shape, learner) if learner.lora_rank else rank_parameters(shape, learner)


def accumulators_held(config: Config) -> tuple[int, int]:
    """(of open groups, of trajectories without a reward) a cell may hold, none for direct work. A cell holds no more
    groups than `max_open_groups`, and no more than an update has; SALT holds them under every schedule."""
    streaming, objective, rule = config.streaming, build_objective(config), find_rule(config.schedule)
    apart = config.learner.accumulator == "exact" or objective.keeps_each_gradient
    if not objective.waits_for_closure or not (rule.opens_groups or apart):
        return 0, 0
    groups = min(streaming.max_open_groups, config.prompts_at_most)
    # Without a reward, or with one that has neither a class nor, as a table of advantages, moments.
    early = objective.starts_before_reward and rule.opens_groups
    overflow = not objective.affine and _distinct_rewards(config) > objective.reward_values
    alone = (early or overflow) and not objective.keeps_each_gradient
    return accumulators_of_a_group(config) * groups, streaming.max_per_trajectory_accumulators if alone else 0


def accumulators_of_a_group(config: Config) -> int:
    """One per trajectory under SALT, else one per distinct reward: two of a verifier that says right or wrong; beyond
    `reward_values`, the moments for all others (1 + the number of rewards; a table of advantages has none)."""
    objective, distinct = build_objective(config), _distinct_rewards(config)
    if objective.keeps_each_gradient:
        return config.group_sizes[-1]
    if distinct <= objective.reward_values:
        return distinct
    return objective.reward_values + (objective.moments if objective.affine else 0)


def _distinct_rewards(config: Config) -> int:
    """Distinct rewards that a group may have."""
    grpo, size = config.grpo, config.group_sizes[-1]
    of_tasks = config.tasks.source == "terminal" or config.reward.function
    graded = of_tasks or grpo.overlong_buffer_tokens or grpo.kl_in_reward
    return size if graded else min(2, size)


def sharded(trained: Parameters, learner: LearnerConfig) -> int:
    """Elements of one accumulator on one rank."""
    if learner.accumulator_shards == 1:
        return trained.total
    experts = learner.ranks_of_a_cell // (learner.pipeline_parallel * learner.expert_parallel * _expert_tensor(learner))
    return math.ceil(trained.dense / learner.accumulator_shards) + math.ceil(trained.expert / max(experts, 1))


def make_memory(config: Config, shape: ModelShape, *, ranks: int, on_gpu: bool) -> Memory:
    """Compute the bytes; `on_gpu`: the learner and the servers compute on GPUs."""
    learner = config.learner
    size, trained = SIZES[learner.dtype], trained_parameters(shape, learner)
    held = rank_parameters(shape, learner).total + (trained.total if learner.lora_rank else 0)
    element, exact, host = max(4, size), learner.accumulator == "exact", learner.accumulator_placement == "host"
    accumulators = sum(accumulators_held(config))
    server_size = SIZES.get(config.rollout.dtype, 2)
    shares = config.rollout.gpus_per_server
    cache = 2 * shape.layers * shape.kv_heads * shape.head_size * server_size // min(shares, shape.kv_heads)
    through = (2 * element * trained.total + COPY_BUFFER_BYTES) if on_gpu else element * trained.total
    scratched = accumulators and (host or learner.accumulator_shards > 1)
    through = through if host else element * trained.total
    scratch = 8 * trained.total if exact else through if scratched else 0
    optimizer = _optimizer_bytes(learner, trained, ranks, size)
    copied = config.run.checkpoint_background and 0 < config.run.checkpoint_every < config.run.updates
    return Memory(
        weights=held * size,
        gradient=trained.total * element,
        optimizer=optimizer,
        accumulators=accumulators * sharded(trained, learner) * (8 if exact else element),
        scratch=scratch,
        activations=_activation_bytes(config, shape, size),
        logits=_logit_bytes(config, shape, size),
        publication=2 * (config.publish.bucket_mb << 20) if on_gpu else 0,
        program=GPU_PROGRAM_BYTES if on_gpu else 0,
        accumulators_on_host=host and on_gpu,
        host_program=HOST_PROGRAM_BYTES if on_gpu else 0,
        checkpoint=trained.total * size + optimizer if copied else 0,
        server_weights=shape.parameters * server_size // shares,
        server_cache=config.rollout.max_total_tokens * cache,
    )


# ---------------------------------------------------------------------------------------------- private


def _expert_tensor(learner: LearnerConfig) -> int:
    return learner.expert_tensor_parallel or learner.tensor_parallel


def _layers_of(shape: ModelShape, learner: LearnerConfig, stage: int) -> list[int]:
    """Layers of a stage: one run of them for each virtual stage, dealt out in turn; ends may differ without those."""
    stages, chunks = learner.pipeline_parallel, learner.virtual_pipeline
    if shape.layers % stages:
        first, last = uneven_stages(shape.layers, stages)
        middle = (shape.layers - first - last) // (stages - 2) if stages > 2 else 0
        sizes = [first, *[middle] * (stages - 2), last]
        return list(range(sum(sizes[:stage]), sum(sizes[: stage + 1])))
    each = shape.layers // (stages * chunks)
    starts = [(chunk * stages + stage) * each for chunk in range(chunks)]
    return [layer for start in starts for layer in range(start, start + each)]


def _is_sparse(shape: ModelShape, layer: int) -> bool:
    """Dense layers come first, as in GLM; elsewhere only their number is known."""
    return shape.experts > 0 and layer >= max(shape.dense_layers, 0)


def _layer_parameters(shape: ModelShape, learner: LearnerConfig, *, sparse: bool) -> Parameters:
    tensor, hidden = learner.tensor_parallel, shape.hidden
    bias = shape.head_size * (shape.heads + 2 * shape.kv_heads) // tensor if shape.qkv_bias else 0
    vectors = 2 * hidden + (2 * shape.head_size if shape.qk_norm else 0) + bias
    dense = shape.attention_parameters // tensor + vectors
    if not sparse:
        return Parameters(dense=dense + 3 * hidden * shape.ffn // tensor)
    dense += hidden * shape.experts + 3 * hidden * shape.expert_ffn * shape.shared_experts // tensor
    experts = 3 * hidden * shape.expert_ffn * shape.experts
    return Parameters(dense=dense, expert=experts // (learner.expert_parallel * _expert_tensor(learner)))


def _layer_adapters(shape: ModelShape, learner: LearnerConfig, *, sparse: bool) -> Parameters:
    tensor, hidden, targets = learner.tensor_parallel, shape.hidden, set(learner.lora_targets)
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    columns = {"q_proj": query, "k_proj": key, "v_proj": key}
    attention = sum(hidden + width // tensor for name, width in columns.items() if name in targets)
    attention += query // tensor + hidden if "o_proj" in targets else 0

    def mlp(inner: int, ways: int) -> int:
        up = sum(hidden + inner // ways for name in ("gate_proj", "up_proj") if name in targets)
        return up + (inner // ways + hidden if "down_proj" in targets else 0)

    rank = learner.lora_rank
    if not sparse:
        return Parameters(dense=rank * (attention + mlp(shape.ffn, tensor)))
    shared = mlp(shape.expert_ffn * shape.shared_experts, tensor) if shape.shared_experts else 0
    experts = shape.experts // learner.expert_parallel * mlp(shape.expert_ffn, _expert_tensor(learner))
    return Parameters(dense=rank * (attention + shared), expert=rank * experts)


def _optimizer_bytes(learner: LearnerConfig, trained: Parameters, ranks: int, size: int) -> int:
    each = 16 if size == 8 else 8 if size == 4 else 12
    if not learner.distributed_optimizer:
        return each * trained.total
    pipeline = learner.pipeline_parallel
    dense = max(ranks // (learner.tensor_parallel * pipeline), 1)
    expert = max(ranks // (learner.expert_parallel * _expert_tensor(learner) * pipeline), 1)
    return each * (math.ceil(trained.dense / dense) + math.ceil(trained.expert / expert))


def _activation_bytes(config: Config, shape: ModelShape, size: int) -> int:
    """Kept inputs of every matrix, norm and product of the rank's layers, and once more of the layer being reversed;
    with full recomputation the layers' inputs, and two layers' working set. Experts are taken as evenly used."""
    learner = config.learner
    tensor = learner.tensor_parallel
    hidden = shape.hidden / (tensor if learner.sequence_parallel else 1)
    attention = 5 * hidden + 2 * (shape.heads + shape.kv_heads) * shape.head_size / tensor
    mlp = 3 * shape.ffn / tensor
    if shape.experts:
        shared = 3 * shape.shared_experts * shape.expert_ffn / tensor
        routed = shape.experts_per_token * (3 * shape.expert_ffn / _expert_tensor(learner) + 2 * shape.hidden)
        mlp = max(mlp if shape.dense_layers else 0, shared + routed / (tensor if learner.sequence_parallel else 1))
    layers = len(_layers_of(shape, learner, 0))
    kept = layers * hidden + 2 * (attention + mlp) if learner.recompute == "full" else (layers + 1) * (attention + mlp)
    return round(config.streaming.pack_tokens / learner.context_parallel * kept * size)


def _logit_bytes(config: Config, shape: ModelShape, size: int) -> int:
    """Logits exist for trained tokens: at most what the turns of a trajectory may sample."""
    rollout = config.rollout
    share = min(1.0, config.tasks.max_turns * rollout.max_new_tokens / rollout.max_tokens)
    trained = config.streaming.pack_tokens / config.learner.context_parallel * share
    each = LOGIT_COPIES_BYTES if size < 4 else 3 * size
    return round(trained * shape.vocabulary / config.learner.tensor_parallel * each)
