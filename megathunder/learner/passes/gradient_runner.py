"""How the rows of a command are run: whole, turn by turn, forward first, or with a shared prompt.

    streaming.release     learner.shared_prompt    here
    trajectory            off                      one packed micro-batch
    trajectory            packed                   one packed micro-batch, one copy of each prompt
    trajectory            group                    prefix/prompt.py
    turn                  off                      prefix/eager.py
    turn_forward          off                      prefix/forward.py

Under exact sums every row runs alone, so that its gradient never depends on what it would have been packed with.
Replicas of a cell share the rows; those that experts tie together run the same number of passes.
Called by `learner.py`. Refuses combinations that are not in the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megathunder.accumulator_keys import BATCH, AccumulatorKind
from megathunder.config.compatibility import check_learner_release
from megathunder.config.root import Config
from megathunder.config.streaming import ReleaseName
from megathunder.errors import ConfigError
from megathunder.learner.accumulators.store import AccumulatorStore
from megathunder.learner.parallel import Layout
from megathunder.learner.passes.backward import Runner, WorkCounters
from megathunder.learner.passes.gradient_geometry import GradientGeometry
from megathunder.learner.passes.packing import PackedRow, whole_rows
from megathunder.learner.passes.prefix.eager import EagerTurns
from megathunder.learner.passes.prefix.forward import ForwardTurns
from megathunder.learner.passes.prefix.prompt import SharedPrompts, share_prompts
from megathunder.learner.passes.reference_policies import ReferencePolicies
from megathunder.types import Differentiate, Fold, TrainRow


class GradientRunner:
    """One of the lines of the table, chosen by the configuration, or by a command of a comparison of releases."""

    def __init__(
        self, config: Config, layout: Layout, runner: Runner, store: AccumulatorStore, others: ReferencePolicies
    ) -> None:
        check_learner_release(config)
        self._others = others
        self._adds_divergence = runner.token_loss.kl_coefficient > 0
        self._config, self._release = config, config.streaming.release
        self._layout, self._runner, self._store = layout, runner, store
        shared = config.learner.shared_prompt
        self._pack_prompts = shared == "packed"
        self._prompts = SharedPrompts(runner, config.run.group_size) if shared == "group" else None
        self._geometry = GradientGeometry.of(config, store)
        self._turns = self._turns_of(self._release)

    def differentiate(self, command: Differentiate, counters: WorkCounters) -> None:
        """Add the gradient of the command's rows to its target (or hold their forward passes)."""
        if command.release and command.release != self._release:
            self._change(command.release)
        if self._runner.token_loss.clips and (command.target != BATCH or self._store.arithmetic.exact):
            raise ConfigError(
                f"a clip range with work for {command.target.kind.value} accumulators",
                expected="the sign of the advantage at the backward pass: it decides on which side a ratio is clipped",
                remedy="use schedule = one_step_off and accumulator = fp32 with grpo.clip_low/clip_high",
            )
        self._open(command)
        dealt = self._deal(command.rows)
        mine = dealt[self._layout.cell_replica % len(dealt)]
        if not self._store.arithmetic.exact:
            self._run(with_rows(command, mine), counters)
            return
        for turn in range(max(map(len, dealt))):  # as many turns on every replica: each may scatter its accumulator
            self._run_exactly(command, mine[turn : turn + 1], counters)

    def score(self, rows: Sequence[TrainRow], counters: WorkCounters) -> tuple[float, ...]:
        """sum_t (log pi_engine - log pi_ref) of each row; on every replica of the cell, and 0 before the last stage."""
        pieces = whole_rows(rows, weightless=True)
        found = self._runner.divergences(pieces, self._others.reference, counters) if pieces else []
        by_row = {id(piece.row): value for piece, value in zip(pieces, found, strict=True)}
        return tuple(by_row.get(id(row), 0.0) for row in rows)

    def fold(self, command: Fold, counters: WorkCounters) -> None:
        """Fold the accumulators, and what they defer to shared prompts."""
        if self._geometry and (command := self._geometry.fold(command, counters)) is None:
            return
        self._store.fold(command)
        if self._prompts:
            self._prompts.fold(command)
            with self._store.collect(BATCH):
                self._prompts.settle(counters)

    def finish(self, counters: WorkCounters) -> None:
        """Replay what is still deferred before the step; chains that never ended are dropped."""
        if self._prompts:
            with self._store.collect(BATCH):
                self._prompts.settle(counters, everything=True)
        for fold in self._geometry.finish(counters) if self._geometry else ():
            self._store.fold(fold)
        self.clear()
        self._store.layout.point_home()

    def clear(self) -> None:
        for part in (self._turns, self._prompts, self._geometry):
            if part:
                part.clear()

    def _change(self, release: ReleaseName) -> None:
        """The next update of a comparison is of another release; nothing of the last one is held any more."""
        streaming = replace(self._config.streaming, release=release)
        check_learner_release(replace(self._config, streaming=streaming))
        self._release, self._turns = release, self._turns_of(release)

    def _turns_of(self, release: ReleaseName) -> EagerTurns | ForwardTurns | None:
        if release == "turn":
            return EagerTurns(self._runner, replay_tokens=self._config.streaming.pack_tokens)
        return ForwardTurns(self._runner) if release == "turn_forward" else None

    def _open(self, command: Differentiate) -> None:
        """A target exists from its first command on, also if none of the rows can add to it."""
        if command.target.kind is AccumulatorKind.BATCH or not command.last and isinstance(self._turns, ForwardTurns):
            return
        self._store.of(command.target)
        if command.target.kind is AccumulatorKind.MOMENT:
            for slot in range(1, len(command.features)):
                self._store.of(command.target._replace(slot=slot))

    def _deal(self, rows: Sequence[TrainRow]) -> list[list[TrainRow]]:
        """The rows of each replica of the cell; replicas that experts tie together get all, and part them by passes. A
        trajectory whose turns come one by one stays where its keys and values are."""
        replicas = 1 if self._layout.tied else self._layout.cell_replicas
        dealt: list[list[TrainRow]] = [[] for _ in range(replicas)]
        for number, row in enumerate(rows):
            at = row.source.group + row.source.trajectory if self._turns else number
            dealt[at % replicas].append(row)
        return dealt

    def _run(self, command: Differentiate, counters: WorkCounters, coefficient: float = 1.0) -> None:
        if isinstance(self._turns, ForwardTurns) and not command.last:
            self._turns.differentiate(command, counters)
            return
        with self._store.collect(command.target, features=command.features, coefficient=coefficient):
            if self._turns:
                self._turns.differentiate(command, counters)
            elif self._prompts:
                self._prompts.differentiate(command, counters)
            else:
                self._whole(command, counters)
        if self._adds_divergence and not self._kl_together(command):
            self._divergence(command, counters)

    def _whole(self, command: Differentiate, counters: WorkCounters) -> None:
        together = self._kl_together(command)
        if pieces := self._pieces(command.rows, counters, weightless=together):
            reference = self._others.reference if together else None
            self._runner.differentiate(pieces, counters, old=self._others.old, reference=reference)

    def _kl_together(self, command: Differentiate) -> bool:
        """Whether the KL term rides on the backward pass of the rows: where their weight is known and in the loss."""
        known = command.target == BATCH and not self._store.arithmetic.exact
        return self._adds_divergence and known

    def _divergence(self, command: Differentiate, counters: WorkCounters) -> None:
        """The KL term alone, into the batch: the rows' own target waits for a coefficient that it must not get."""
        rows = [with_scale(row, 0.0) for row in command.rows]
        if pieces := self._pieces(rows, counters, weightless=True):
            with self._store.collect(BATCH):
                self._runner.differentiate(pieces, counters, reference=self._others.reference, again=True)

    def _pieces(self, rows: Sequence[TrainRow], counters: WorkCounters, *, weightless: bool = False) -> list[PackedRow]:
        if self._pack_prompts:
            return share_prompts(rows, counters, weightless=weightless)
        pieces = whole_rows(rows, weightless=weightless)
        replicas = self._layout.cell_replicas
        if not self._layout.tied or not pieces:
            return pieces
        mine = pieces[self._layout.cell_replica :: replicas]
        # A replica with fewer rows still makes as many passes: the experts' collectives couple them. Without a pipeline
        # all rows of a replica are one pass.
        wanted = -(-len(pieces) // replicas) if self._layout.pipeline > 1 else 1
        spare = min(pieces, key=lambda piece: piece.length)
        return mine + [replace(spare, trained=False, counted=False)] * (wanted - len(mine))

    def _run_exactly(self, command: Differentiate, rows: Sequence[TrainRow], counters: WorkCounters) -> None:
        """One row, or none: backward with its own factor, or for the batch with factor 1 and its weight as an
        integer."""
        coefficient = 1.0
        if rows and command.target == BATCH and (command.last or not isinstance(self._turns, ForwardTurns)):
            coefficient, rows = rows[0].scale, [with_scale(rows[0], 1.0 if rows[0].scale else 0.0)]
        counters.weight = coefficient
        self._run(with_rows(command, rows), counters, coefficient)


def with_rows(command: Differentiate, rows: Sequence[TrainRow]) -> Differentiate:
    """`command` with other rows."""
    fields = {name: getattr(command, name) for name in command.__struct_fields__}
    return Differentiate(**fields | {"rows": tuple(rows)})


def with_scale(row: TrainRow, scale: float) -> TrainRow:
    """`row` with another scale."""
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    return TrainRow(**fields | {"scale": scale})
