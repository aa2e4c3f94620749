"""Tiny real models, random trajectories and a streaming driver for the equality tests.

The driver plays a scheduler that knows nothing but the objective: trajectories arrive in a random order, wait in the
accumulators the objective names, groups close when their last reward is there, micro-batches are packed at random.
"""

import dataclasses
import json
import random
import runpy
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import msgspec
import torch
from oracles.advantages import group_advantages, separate_advantages

from megathunder.accumulator_keys import BATCH, AccumulatorKind
from megathunder.config.learner import LearnerConfig
from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.config.root import Config
from megathunder.config.streaming import StreamingConfig
from megathunder.learner.model.attention import AttentionContext, RowSpan
from megathunder.learner.parallel import initialize
from megathunder.learner.passes.backward import WorkCounters
from megathunder.objectives.base import Reward, Survivor
from megathunder.objectives.build_objective import build_objective
from megathunder.objectives.weights import Affine, accumulators, features, fold_group
from megathunder.schedule.token_chain import train_rows
from megathunder.types import (
    ContributionId,
    Differentiate,
    EndReason,
    Fold,
    Role,
    Row,
    Segment,
    TakeStep,
    Trajectory,
    TrajectoryId,
)

VOCABULARY = 48


def write_model(folder, *, layers=2, hidden=32, heads=4, groups=2, ffn=48, vocabulary=VOCABULARY, **more):
    """A Qwen3 folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": hidden // heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def make_config(folder, *, dtype="float32", release="trajectory", **learner):
    settings = LearnerConfig(model=str(folder), dtype=dtype, device="cpu", learning_rate=1e-2, clip_grad=1.0, **learner)
    streaming = StreamingConfig(release=release, pack_tokens=40)
    return Config(objective="opd" if release == "turn" else "grpo", learner=settings, streaming=streaming)


def make_learner(config, seed=3):
    """A learner with random weights; every parameter is moved away from its special start (norms of 1)."""
    from megathunder.learner.learner import Learner
    from megathunder.learner.model.build_model import build_model

    layout = initialize(config.learner, seed=seed)
    bundle = build_model(config.learner, layout, load=False)
    generator = torch.Generator().manual_seed(seed)
    for stage in bundle.stages:
        for parameter in stage.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.08
            parameter.data.add_(noise.to(parameter.dtype))
    return Learner(config, layout, bundle)


def logprobs_of(learner):
    """The naive forward: one chain alone, every token predicted."""
    model = learner.bundle.stages[0]

    def run(token_ids):
        ids = torch.tensor(token_ids)
        context = AttentionContext.of([RowSpan(length=len(token_ids))])
        context.predict, context.targets = torch.arange(len(token_ids) - 1), ids[1:]
        return model(ids[None], context.position_ids[None], None, packed_seq_params=context)

    return run


def naive_gradient(learner, loss):
    """Name -> gradient by plain autograd."""
    names, parameters = learner.store.layout.names, learner.store.layout.parameters
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, gradients, strict=True)}


def streamed_gradient(learner, scale):
    """Name -> scale * what the batch accumulator holds."""
    if learner.arithmetic.exact:
        learner.arithmetic.to_float(learner.store.batch, learner.store.layout.homes)
    return {name: view.clone() * scale for name, view in learner.gradients()}


def largest_difference(got, want):
    """Over parameters: norm of the difference relative to the norm of the whole gradient."""
    whole = torch.stack([w.double().norm() for w in want.values()]).norm()
    worst = max(float((got[n].double() - want[n].double()).norm()) for n in want)
    return worst / max(float(whole), 1e-30)


def random_trajectory(rng, group, index, *, turns=3, reward=None, split=False):
    """Prompt, then actions and observations of random lengths; `split` puts the last turn in a row of its own."""

    def tokens(low, high):
        return tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high)))

    def action():
        ids = tokens(1, 6)
        return Segment(
            role=Role.ACTION,
            token_ids=ids,
            logprobs=tuple(rng.uniform(-5.0, -2.5) for _ in ids),
            policy_versions=(0,) * len(ids),
        )

    prompt_rng = random.Random(f"prompt {group}")
    prompt = tuple(prompt_rng.randrange(VOCABULARY) for _ in range(prompt_rng.randint(2, 9)))
    segments = [Segment(role=Role.PROMPT, token_ids=prompt), action()]
    for _ in range(rng.randint(0, turns - 1)):
        # Now and then nothing is observed: the next turn then starts with a trained token.
        seen = tokens(0, 5)
        segments += [Segment(role=Role.OBSERVATION, token_ids=seen)] if seen else []
        segments.append(action())
    rows = [Row(segments=tuple(segments))]
    if split:
        rows.append(Row(segments=(Segment(role=Role.PROMPT, token_ids=tokens(2, 5)), action())))
    return Trajectory(
        id=TrajectoryId(0, group, index),
        task_id=f"task-{group}",
        rows=tuple(rows),
        end_reason=EndReason.ANSWERED,
        started_s=0.0,
        completed_s=1.0,
        turns=sum(s.role is Role.ACTION for s in segments),
        reward=reward,
    )


def random_groups(rng, *, values, sizes):
    """Groups of rewarded trajectories; now and then one is split into two rows."""
    return [
        [random_trajectory(rng, b, i, reward=rng.choice(values), split=rng.random() < 0.2) for i in range(size)]
        for b, size in enumerate(sizes)
    ]


OWN_ADVANTAGE = f"{Path(__file__).parents[1] / 'unit' / 'schedule' / 'own_advantage.py'}:hashed"
hashed = runpy.run_path(OWN_ADVANTAGE.rpartition(":")[0])["hashed"]
OWN_OBJECTIVE = f"{Path(__file__).parents[1] / 'unit' / 'schedule' / 'reinforce.py'}:build"
OVER_BATCH = ("reinforce_plus_plus_baseline", "gdpo")
ADVANTAGES = ("sample_std", "none", "leave_one_out", *OVER_BATCH, "maxrl", "pass_at_k", OWN_ADVANTAGE)


PART_WEIGHTS = (1.0, 0.5)  # different ones: two rewards that normalise to opposite numbers would leave rounding alone


def grpo_of(advantage):
    """Settings of an advantage; `pass_k` is 1, so that every group has one more."""
    return GrpoConfig(advantage=advantage, pass_k=1, reward_weights=PART_WEIGHTS if advantage == "gdpo" else ())


def with_parts(rng, groups):
    """The same groups with two rewards per trajectory, whose sum is the reward."""

    def parted(trajectory):
        parts = {"correct": trajectory.reward, "short": rng.choice([0.0, 0.5])}
        return msgspec.structs.replace(trajectory, reward=sum(parts.values()), reward_parts=parts)

    return [[parted(t) for t in group] for group in groups]


def naive_advantage(name):
    """Arguments of the naive loss for `grpo_of(name)`."""

    def advantage(group):
        if name == "gdpo":
            return separate_advantages([sorted_parts(t) for t in group], PART_WEIGHTS)
        rewards = [t.reward for t in group]
        return hashed(rewards) if name == OWN_ADVANTAGE else group_advantages(rewards, name, k=1)

    return {"advantage": advantage, "over_batch": name in OVER_BATCH}


def sorted_parts(trajectory):
    return [trajectory.reward_parts[key] for key in sorted(trajectory.reward_parts)] or [trajectory.reward]


class Packer:
    """Collects rows by target and flushes them as Differentiate commands of random sizes."""

    def __init__(self, rng, emit, version=0):
        self.rng, self.emit, self.version = rng, emit, version
        self.waiting, self.items = defaultdict(list), 0

    def add(self, target, rows, signal=None):
        if target.kind is AccumulatorKind.MOMENT:
            self.send(target, rows, features(signal))
            return
        self.waiting[target].extend(rows)
        if self.rng.random() < 0.5:
            self.flush(target)

    def flush(self, target=None):
        for key in [target] if target else list(self.waiting):
            rows = self.waiting.pop(key, [])
            if rows:
                self.send(key, rows)

    def send(self, target, rows, features=()):
        self.items += 1
        self.emit(
            Differentiate(
                item=self.items,
                update=0,
                policy_version=self.version,
                target=target,
                rows=tuple(rows),
                features=features,
            )
        )


def make_objective(*, grpo=None, loss=None, reward_values=2):
    """The objective as a run builds it."""
    streaming = StreamingConfig(reward_values=reward_values)
    return build_objective(Config(grpo=grpo or GrpoConfig(), loss=loss or LossConfig(), streaming=streaming))


def signal_of(objective, trajectory):
    return objective.signal(trajectory, Reward(trajectory.reward, trajectory.reward_parts))


def close_group(objective, group):
    """Weights of a group of rewarded trajectories; all 0 where nothing of it is wanted."""
    signals = [signal_of(objective, t) for t in group]
    weights = objective.close_group([t.reward for t in group], signals).weights
    return weights or Affine(0.0, (0.0,) * len(signals[0]))


def stream_grpo(
    learner,
    groups,
    rng,
    *,
    grpo=None,
    loss=None,
    reward_values=2,
    content_ready=0.0,
    emit=None,
    version=0,
    objective=None,
):
    """Stream `groups` in a random order through the accumulators the objective chooses; returns the normaliser.

    `content_ready` is the chance that a trajectory is differentiated before its reward is known. `emit(group)` gives
    where a group's commands go (several cells); by default `learner` takes all.
    """
    objective = objective or make_objective(grpo=grpo, loss=loss, reward_values=reward_values)
    arrivals = [(b, i) for b, group in enumerate(groups) for i in range(len(group))]
    rng.shuffle(arrivals)
    seen = defaultdict(list)
    keys, alone = defaultdict(set), defaultdict(dict)
    weights = [objective.opening_weights() or close_group(objective, group) for group in groups]

    def learner_of(group):
        return emit(group) if emit else learner

    packers = {b: Packer(rng, lambda c, b=b: learner_of(b).differentiate(c), version) for b in range(len(groups))}
    for b, i in arrivals:
        trajectory, group = groups[b][i], groups[b]
        seen[b].append(i)
        unit = objective.row_scale(trajectory.sampled_tokens)
        values = list(dict.fromkeys(signal_of(objective, group[j]) for j in seen[b]))
        view = SimpleNamespace(index=b, values=values)
        closing, signal = len(seen[b]) == len(group), signal_of(objective, trajectory)
        if objective.opening_weights() or (closing and rng.random() < 0.5):
            packers[b].add(BATCH, train_rows(trajectory, unit * weights[b].weight(signal), unit))
        else:
            early = rng.random() < content_ready
            key = objective.target(view, None if early else signal, i)
            if key.kind is AccumulatorKind.PER_TRAJECTORY:
                alone[b][i] = signal
            keys[b].update(accumulators(key, signal))
            packers[b].add(key, train_rows(trajectory, unit, unit), signal)
        if closing:
            packers[b].flush()
            plan = fold_group(keys[b], values, alone[b], weights[b])
            learner_of(b).fold(Fold(item=0, update=0, terms=plan.terms, free=plan.free))
    return objective.normaliser(survivors_of(objective, groups, weights))


def survivors_of(objective, groups, weights):
    return [
        Survivor(
            trained_tokens=t.sampled_tokens, signal=signal_of(objective, t), weight=w.weight(signal_of(objective, t))
        )
        for group, w in zip(groups, weights, strict=True)
        for t in group
    ]


def random_scores(rng, trajectories):
    """Teacher log-probabilities [T] of every row."""
    return [[tuple(rng.uniform(-5.0, -1.0) for _ in row.token_ids) for row in t.rows] for t in trajectories]


def with_teacher(row, scores):
    """`row` with teacher log-probabilities."""
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    return type(row)(**fields | {"teacher_logprobs": tuple(scores)})


def stream_opd(learner, trajectories, scores, rng, *, loss=None, version=0):
    """Whole trajectories in a random order; returns the normaliser."""
    objective = make_objective(loss=loss)
    packer = Packer(rng, learner.differentiate, version)
    order = list(range(len(trajectories)))
    rng.shuffle(order)
    for i in order:
        unit = objective.row_scale(trajectories[i].sampled_tokens)
        rows = train_rows(trajectories[i], unit)
        packer.add(BATCH, [with_teacher(r, s[: len(r.token_ids)]) for r, s in zip(rows, scores[i], strict=True)])
    packer.flush()
    return objective.normaliser([Survivor(trained_tokens=t.sampled_tokens) for t in trajectories])


def step(learner, normaliser, update=0, skip=False):
    return learner.take_step(TakeStep(item=0, update=update, normaliser=normaliser, skip=skip))


def clear(learner):
    learner.abandon_update()
    learner._stale_below = -1


def replace(config, **sections):
    return dataclasses.replace(config, **sections)


def contribution(group, index):
    return ContributionId(0, group, index)


def tally(learner):
    return WorkCounters(learner._price)
