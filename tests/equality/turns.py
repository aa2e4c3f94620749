"""Releases trajectories turn by turn, in random interleavings and packs, as a scheduler would."""

from collections import defaultdict
from dataclasses import dataclass

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind
from megathunder.objectives.base import Survivor
from megathunder.objectives.weights import fold_group
from megathunder.schedule.token_chain import TokenChain
from megathunder.types import ContributionId, Differentiate, Fold
from tests.equality import worlds


@dataclass(eq=False)
class Growing:
    """One row of a trajectory on its way: `sent` turns are with the learner."""

    chain: TokenChain
    source: ContributionId
    row: int
    scale: float
    scores: tuple = ()
    target: AccumulatorKey = BATCH
    sent: int = 0
    done: bool = False

    def take(self, end, *, last, whole_mask):
        """The row of turns [sent, end); under `turn_forward` the last one carries the mask of the whole chain."""
        mask_from = 0 if last and whole_mask else self.sent
        row = self.chain.train_row(
            self.source, row=self.row, context_turns=self.sent, end_turn=end, mask_from_turn=mask_from, scale=self.scale
        )
        if self.scores:
            fields = {n: getattr(row, n) for n in row.__struct_fields__}
            teacher = tuple(self.scores[: len(row.token_ids)])
            if not last and whole_mask:
                teacher = ()  # a forward does not wait for its scores
            row = type(row)(**fields | {"teacher_logprobs": teacher})
        self.sent, self.done = end, last
        return row


def growing_rows(trajectory, scale, scores=(), target=BATCH):
    return [
        Growing(
            chain=TokenChain.of_row(row),
            source=ContributionId(*trajectory.id),
            row=i,
            scale=scale,
            scores=scores[i] if scores else (),
            target=target,
        )
        for i, row in enumerate(trajectory.rows)
    ]


def release(learner, rows, rng, *, mode):
    """Send every row's turns; rows of one pack agree in `last` and, when something flows back, in their target."""
    whole_mask = mode == "turn_forward"
    while left := [r for r in rows if not r.done]:
        lead = rng.choice(left)
        last = lead.sent == lead.chain.turns or rng.random() < 0.4
        if not last and lead.sent == lead.chain.turns:
            continue
        alike = [r for r in left if r.target == lead.target or (whole_mask and not last)]
        if not last:
            alike = [r for r in alike if r.sent < r.chain.turns]
        pack = rng.sample(alike, rng.randint(1, len(alike)))
        taken = []
        for row in pack:
            end = row.chain.turns if last else rng.randint(row.sent + 1, row.chain.turns)
            taken.append(row.take(end, last=last, whole_mask=whole_mask))
        learner.differentiate(
            Differentiate(item=0, update=0, policy_version=0, target=lead.target, rows=tuple(taken), last=last)
        )


def release_opd(learner, trajectories, scores, rng, *, mode, loss=None):
    """Returns the normaliser."""
    objective = worlds.make_objective(loss=loss)
    rows = [
        row
        for trajectory, score in zip(trajectories, scores, strict=True)
        for row in growing_rows(trajectory, objective.row_scale(trajectory.sampled_tokens), score)
    ]
    release(learner, rows, rng, mode=mode)
    return objective.normaliser([Survivor(trained_tokens=t.sampled_tokens) for t in trajectories])


def release_grpo(learner, groups, rng, *, loss=None):
    """turn_forward into class accumulators; returns the normaliser."""
    objective = worlds.make_objective(loss=loss, reward_values=9)
    rows, values = [], defaultdict(list)
    for b, group in enumerate(groups):
        for trajectory in group:
            signal = worlds.signal_of(objective, trajectory)
            if signal not in values[b]:
                values[b].append(signal)
            key = AccumulatorKey(AccumulatorKind.CLASS, b, values[b].index(signal))
            rows += growing_rows(trajectory, objective.row_scale(trajectory.sampled_tokens), target=key)
    release(learner, rows, rng, mode="turn_forward")
    for b, group in enumerate(groups):
        keys = {r.target for r in rows if r.target.group == b}
        plan = fold_group(keys, values[b], {}, worlds.close_group(objective, group))
        learner.fold(Fold(item=0, update=0, terms=plan.terms, free=plan.free))
    survivors = [Survivor(trained_tokens=t.sampled_tokens) for g in groups for t in g]
    return objective.normaliser(survivors)
