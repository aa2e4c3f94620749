"""One rank of a job that takes the same update in many parallel layouts, for the table of test_parallel_streaming.

    torchrun --nproc-per-node N -m tests.equality.parallel FOLDERS OUT ENTRY [ENTRY ...]

FOLDERS holds model folders by name. An ENTRY is `layout/model/mode[/field=value,...]`; its modes:

    kl           a second update with the KL term to the policy before the first
    grpo, opd    streamed updates, float32 accumulators        lora    GRPO on low-rank adapters
    exact        GRPO with fixed-point accumulators            bad     an all-equal batch, then gradients with a NaN
    resumed      adapters saved after an update and loaded into a learner that starts anew
    idle         replicas of 25 and 10 tokens, tied by experts, 10 a micro-batch at most: how many passes each makes

The layout `barrier` of one rank is no streaming at all: autograd of the naive loss, put where a reduced gradient would
be, and the same optimizer step. Everything else goes through `Learner` by Differentiate, Fold and TakeStep. Arrival
order, packing and the way each trajectory takes (direct, class, moment, own) are random, in exact mode drawn anew for
every layout; cells get unequal shares. Rank 0 writes OUT/<layout>.<model>.<mode>.safetensors: gradient, change of the
weights, statistics.
"""

import hashlib
import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from oracles.objective_losses import grpo_loss, opd_loss
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader

from benchmarks.parity.parity_checks import fill_adapters
from megathunder.accumulator_keys import BATCH
from megathunder.config.learner import LearnerConfig
from megathunder.config.objective import GrpoConfig
from megathunder.config.root import Config
from megathunder.errors import MegathunderError
from megathunder.learner.learner import Learner
from megathunder.learner.model.adapter_files import export_adapter
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.weights import export_tensors
from megathunder.learner.parallel import initialize, shutdown
from megathunder.types import Differentiate, TakeStep, TrainRow
from tests.equality import worlds
from tests.equality.cells import Tape

GROUPS, REWARDS = (4, 3, 4), (0.0, 0.5, 1.0)
ADAPTERS = {"lora_rank": 4, "lora_alpha": 8.0}
MODES = {"exact": {"accumulator": "exact"}, "lora": ADAPTERS, "resumed": ADAPTERS}


def batch(mode):
    """(groups) or (trajectories, teacher scores): the same in every layout."""
    rng = random.Random(11)
    if mode == "opd":
        trajectories = [worlds.random_trajectory(rng, i, 0, split=i == 2) for i in range(7)]
        return trajectories, worlds.random_scores(rng, trajectories)
    return worlds.random_groups(rng, values=REWARDS, sizes=GROUPS)


def units(mode, rng):
    """(units of work in order, normaliser); a unit is what one cell must do alone: a group, or one OPD command."""
    if mode == "opd":
        tape = Tape()
        z = worlds.stream_opd(tape, *batch(mode), rng)
        return [[command] for command in tape.commands], z
    groups = batch(mode)
    tapes = [Tape() for _ in groups]
    ways = 9 if mode == "exact" else rng.choice([0, 9])
    z = worlds.stream_grpo(None, groups, rng, reward_values=ways, content_ready=0.3, emit=lambda group: tapes[group])
    return [tape.commands for tape in tapes], z


def naive_loss(mode, logprobs_of):
    if mode == "opd":
        return opd_loss(logprobs_of, *batch(mode), normalisation="token_mean")
    return grpo_loss(logprobs_of, batch(mode), advantage="std", normalisation="token_mean")


def make(folder, mode, settings):
    config = LearnerConfig(
        model=str(folder), device="cpu", learning_rate=1e-2, adam_epsilon=1e-2, **settings, **MODES.get(mode, {})
    )
    layout = initialize(config)
    bundle = build_model(config, layout)
    if bundle.adapted:
        fill_adapters(bundle)
    grpo = GrpoConfig(kl_coefficient=0.3) if mode == "kl" else GrpoConfig()
    return Learner(Config(learner=config, grpo=grpo), layout, bundle)


def exported(learner, prefix, read):
    """`read(parameter)` of everything that is trained, whole, on the leader of the cell."""
    export = export_adapter if learner.bundle.adapted else export_tensors
    return {f"{prefix}{name}": tensor.clone() for name, tensor in export(learner.bundle, read)}


def fill_by_autograd(learner, mode):
    """The barrier: the naive gradient, as if it had just been reduced; the normaliser is 1."""
    gradient = worlds.naive_gradient(learner, naive_loss(mode, worlds.logprobs_of(learner)))
    for name, view in learner.gradients():
        view.copy_(gradient[name])
    return [], 1.0


def stream(learner, mode, order):
    """The cell's share of the units; the first cell has less to do than the others."""
    work, z = units(mode, random.Random(order))
    cells, done = learner.layout.cells, []
    for index, unit in enumerate(work):
        if min(index % (2 * cells), cells - 1) == learner.layout.cell:
            done += [getattr(learner, verb)(command) for verb, command in unit]
    return done, z


def take_update(learner, name, mode):
    before = exported(learner, "", lambda p: p.data)
    order = f"{name} exact" if mode == "exact" else mode
    done, z = fill_by_autograd(learner, mode) if name == "barrier" else stream(learner, mode, order)
    seen, step = {}, learner.stepper.step

    def spy(normaliser, *, skip):
        views = dict(zip(learner.store.layout.parameters, learner.store.layout.home_views, strict=True))
        seen.update(exported(learner, "gradient.", lambda p: views[p] / normaliser if p in views else p.data * 0))
        return step(normaliser, skip=skip)

    learner.stepper.step = spy
    stats = worlds.step(learner, z)
    after = exported(learner, "", lambda p: p.data)
    seen |= {f"update.{n}": after[n] - before[n] for n in after}
    digest = hashlib.sha256(b"".join(after[n].contiguous().numpy().tobytes() for n in sorted(after))).digest()
    seen["digest"] = torch.tensor(list(digest))
    return seen | totals(learner, done, stats)


def totals(learner, done, stats):
    """What the leaders of all cells reported, added up as the coordinator does."""
    mine = [sum(getattr(s, n) for s in done) for n in ("loss_sum", "trained_tokens", "tokens", "flops")]
    mine += [float(learner.layout.leads_cell), stats.grad_norm]
    everyone = [None] * learner.layout.world
    dist.all_gather_object(everyone, mine)
    leaders = [one for one in everyone if one[4]]
    assert len({one[5] for one in everyone}) == 1, "ranks disagree on the norm"
    names = ("loss", "trained", "tokens", "flops")
    found = {f"stat.{n}": sum(one[i] for one in leaders) for i, n in enumerate(names)} | {"stat.norm": mine[5]}
    trainable = sum(p.numel() for p in learner.store.layout.parameters)
    element = learner.store.layout.homes[0].element_size()
    found["stat.accumulator_elements"] = (learner.store.peak_bytes or 0) / element
    found |= {"stat.trainable": trainable, "stat.buffer": learner.store.layout.elements}
    return {n: torch.tensor(float(v), dtype=torch.float64) for n, v in found.items()}


def bad_updates(learner):
    """1 where each law held: no step on an all-equal batch; a NaN on the last rank alone is skipped and named on every
    rank, weights untouched; the third in a row raises on every rank."""

    def weights():
        return [p.detach().clone() for p in learner.store.layout.parameters]

    def poison():
        if dist.get_rank() == dist.get_world_size() - 1:
            learner.store.layout.home_views[2].view(-1)[0] = float("nan")

    before = weights()
    name = [None] * dist.get_world_size()
    dist.all_gather_object(name, learner.store.layout.names[2])
    equal = learner.take_step(TakeStep(item=0, update=0, normaliser=5.0, skip=True))
    laws = {"all-equal": not equal.stepped and bool(equal.skip_reason)}
    for k in (1, 2):
        poison()
        bad = learner.take_step(TakeStep(item=0, update=k, normaliser=5.0))
        laws[f"bad {k}"] = not bad.stepped and name[-1] in bad.skip_reason
    laws["weights"] = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    poison()
    try:
        learner.take_step(TakeStep(item=0, update=3, normaliser=5.0))
        laws["stops"] = False
    except MegathunderError as error:
        laws["stops"] = "3 updates in a row" in str(error) and name[-1] in str(error)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, laws)
    return {law: torch.tensor([int(laws[law]) for laws in everyone]) for law in laws}


def resumed(learner, folder, out, settings):
    """1 where each law held on every rank: the same adapters after loading, the same after one update more, and only
    adapters in the files."""
    take_update(learner, "resumed", "lora")
    learner.save(out)
    again = make(folder, "resumed", settings)
    again.load(out)
    laws = {"loaded": same_weights(learner, again)}
    for one in (learner, again):
        one._stale_below = -1  # the batch is of version 0 again
        _, z = stream(one, "lora", "more")
        worlds.step(one, z, 1)
    laws["went on"] = same_weights(learner, again)
    stored = FileSystemReader(out).read_metadata().state_dict_metadata
    laws["adapters alone"] = all(".lora." in name for name in stored if name.startswith("decoder."))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, laws)
    return {law: torch.tensor([int(laws[law]) for laws in everyone]) for law in laws}


def idle(learner):
    """Passes and counted tokens of each rank."""
    passes, tokens, forward = [], [], learner.runner.forward

    def counting(pieces, tally, **more):
        held = forward(pieces, tally, **more)
        passes.append(held.batch.context.tokens)
        tokens.append(held.batch.tokens)
        return held

    learner.runner.forward = counting
    for item, lengths in enumerate(([10, 10], [10], [5])):
        rows = tuple(
            TrainRow(
                source=worlds.contribution(item, i),
                token_ids=tuple(range(1, n + 2)),  # the last token is predicted and not computed
                loss_mask=(0,) + (1,) * n,
                engine_logprobs=(0.0,) * (n + 1),
            )
            for i, n in enumerate(lengths)
        )
        learner.differentiate(Differentiate(item=item, update=0, policy_version=0, target=BATCH, rows=rows))
    worlds.step(learner, 35.0)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (len(passes), max(passes), sum(tokens)))
    return {n: torch.tensor([one[i] for one in everyone]) for i, n in enumerate(("passes", "longest", "tokens"))}


def same_weights(one, two):
    pairs = zip(one.store.layout.parameters, two.store.layout.parameters, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def parse(entry):
    """`tp2/dense/grpo/tensor_parallel=2` -> ("tp2", "dense", "grpo", {"tensor_parallel": 2})"""
    name, model, mode, *fields = entry.split("/")
    pairs = [f.split("=") for f in ",".join(fields).split(",") if f]
    return name, model, mode, {k: v == "true" if v in ("true", "false") else int(v) for k, v in pairs}


def main():
    folders, out, *entries = sys.argv[1:]
    for entry in entries:
        name, model, mode, settings = parse(entry)
        learner = make(Path(folders) / model, mode, settings)
        if mode == "bad":
            seen = bad_updates(learner)
        elif mode == "idle":
            seen = idle(learner)
        elif mode == "resumed":
            seen = resumed(learner, Path(folders) / model, Path(out) / f"saved.{name}.{model}", settings)
        else:
            if mode == "kl":
                take_update(learner, name, mode)
                learner._stale_below = -1  # the batch is of version 0 again
            seen = take_update(learner, name, mode)
        if dist.get_rank() == 0:
            file = Path(out) / f"{name}.{model}.{mode}.safetensors"
            save_file({n: t.contiguous() for n, t in seen.items()}, file)
        dist.barrier()
        parallel_state.destroy_model_parallel()
    shutdown()


if __name__ == "__main__":
    main()
