"""One rank of a job in which cells pull work from a common queue, as the live cells do.

    torchrun --nproc-per-node 2 -m tests.equality.cells FOLDER OUT [--cases N] [field=value ...]

Every rank knows all units of work (a group's commands in order, or one command of a group-less objective); who
reaches a unit first takes it. Writes, from rank 0, the largest relative differences to the naive barrier gradient, the
steps and a digest of the weights after every case, as JSON.
"""

import hashlib
import json
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from oracles.objective_losses import grpo_loss, opd_loss

from megathunder.config.objective import LossConfig
from tests.equality import worlds


class Tape:
    """Stands where a learner stands and writes down what it is told."""

    def __init__(self):
        self.commands = []

    def differentiate(self, command):
        self.commands.append(("differentiate", command))

    def fold(self, command):
        self.commands.append(("fold", command))


def units_of_case(case, version):
    """(units, naive loss, normaliser): the same on every rank."""
    rng = random.Random(case)
    loss = LossConfig(normalisation=rng.choice(["token_mean", "sequence_mean", "constant"]), constant=11.0)
    if rng.random() < 0.7:
        sizes = [rng.randint(2, 4) for _ in range(rng.randint(1, 4))]
        groups = worlds.random_groups(rng, values=rng.choice([(0.0, 1.0), (0.0, 0.5, 1.0)]), sizes=sizes)
        grpo = worlds.grpo_of(rng.choice(["std", *worlds.ADVANTAGES]))
        if grpo.advantage == "gdpo":
            groups = worlds.with_parts(rng, groups)
        tapes = [Tape() for _ in groups]
        z = worlds.stream_grpo(
            None, groups, rng, grpo=grpo, loss=loss, reward_values=9, content_ready=0.3,
            emit=lambda group: tapes[group], version=version,
        )  # fmt: skip

        def naive(logprobs_of):
            return grpo_loss(
                logprobs_of,
                groups,
                **worlds.naive_advantage(grpo.advantage),
                normalisation=loss.normalisation,
                constant=11.0,
            )

        return [tape.commands for tape in tapes], naive, z
    trajectories = [worlds.random_trajectory(rng, i, 0) for i in range(rng.randint(2, 6))]
    scores = worlds.random_scores(rng, trajectories)
    tape = Tape()
    z = worlds.stream_opd(tape, trajectories, scores, rng, loss=loss, version=version)

    def naive(logprobs_of):
        return opd_loss(logprobs_of, trajectories, scores, normalisation=loss.normalisation, constant=11.0)

    return [[command] for command in tape.commands], naive, z


def pull(store, case, units, learner):
    """Take units until none is left; a random order of taking on top of the race."""
    taken = 0
    while (index := store.add(f"case {case}", 1) - 1) < len(units):
        for verb, command in units[index]:
            getattr(learner, verb)(command)
        taken += 1
    return taken


def run_case(learner, store, case, version, measure):
    units, naive, z = units_of_case(case, version)
    want = None
    if measure:
        loss = naive(worlds.logprobs_of(learner))
        want = worlds.naive_gradient(learner, loss) if torch.is_tensor(loss) else None
    dist.barrier()
    taken = pull(store, case, units, learner)
    learner.store.layout.point_home()
    result = {"taken": taken, "units": len(units)}
    seen = {}
    spy = learner.stepper.step

    def step(normaliser, *, skip):
        seen.update({n: v.clone() / normaliser for n, v in learner.gradients()})
        return spy(normaliser, skip=skip)

    learner.stepper.step = step
    stats = worlds.step(learner, z, version)
    learner.stepper.step = spy
    if want is not None:
        result["difference"] = worlds.largest_difference(seen, want)
    result |= {"grad_norm": stats.grad_norm, "stepped": stats.stepped, "digest": digest(learner)}
    return result


def digest(learner):
    """Of this rank's weights."""
    whole = hashlib.sha256()
    for parameter in learner.store.layout.parameters:
        whole.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def main():
    folder, out, cases, *settings = sys.argv[1:]
    learner_settings = dict(item.split("=") for item in settings)
    fields = {k: (v == "true") if v in ("true", "false") else v for k, v in learner_settings.items()}
    learner = worlds.make_learner(worlds.make_config(Path(folder), **fields))
    # A store of its own: the job's carries Megatron's rendezvous.
    store = dist.PrefixStore("work", dist.distributed_c10d._get_default_store())
    store.set_timeout(timedelta(seconds=60))
    results = []
    for case in range(int(cases)):
        mine = run_case(learner, store, case, case, measure="accumulator" not in fields)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        results.append(everyone)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main()
