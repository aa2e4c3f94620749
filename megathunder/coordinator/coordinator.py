"""The coordinator: one asyncio process that owns everything but the gradients.

    tasks -> Collector(servers, sandboxes) -> Rollouts.inbox -> UpdateScheduler -> LearnerClient -> cells
                                                                                -> Publish -> servers
`Coordinator` is what `loop.train` drives: each method is one verb of the loop. `assembly.py` builds its parts and takes
them down. Versions: update k samples with version k (one update ahead: k - 1) and its step makes version k + 1; a
publication counts once every ready server reports the new version.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from megathunder.checkpoint.resume import find_resumption, resume_hint
from megathunder.config import Config
from megathunder.coordinator import weight_sync
from megathunder.coordinator.assembly import Parts
from megathunder.coordinator.record import UpdateRecord
from megathunder.coordinator.rollouts import Collect, Rollouts, Stopped
from megathunder.coordinator.unfinished import unfinished
from megathunder.errors import InfrastructureFailure
from megathunder.evaluation import EVALUATION, KS, Attempt, AttemptEnds, Score, score
from megathunder.evaluation.history import Evaluation, append_evaluation, forget_evaluations, read_evaluations
from megathunder.jsonl import append_line, encode_lines
from megathunder.metrics.resumptions import ResumedAt, note_resumption
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import RunFolder, write_atomically
from megathunder.objectives.base import Objective, Unit
from megathunder.objectives.build_objective import build_objective
from megathunder.process_exit import NOTHING_TRAINED
from megathunder.schedule.scheduler import UpdateScheduler
from megathunder.schedule.schedules import find_rule
from megathunder.types import Command, Done, Event, Publish, ServerAddress, TakeStep

SHOW_EVERY_S = 0.2
log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Coordinator:
    """The run as the loop sees it. `version` is that of the learner's weights; between updates every ready server's."""

    config: Config
    parts: Parts
    version: int = 0
    update: int = 0
    started_s: float = field(default_factory=time.monotonic)
    _first_update: int = 0
    _acknowledged_s: float = 0.0
    _shown_s: float = 0.0
    _device_hours: float = 0.0
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _commands: dict[int, Command] = field(default_factory=dict)
    _records: dict[int, UpdateRecord] = field(default_factory=dict)
    _objectives: dict[str, Objective] = field(default_factory=dict)  # by the name of an update's settings
    _sampling: list[Rollouts] = field(default_factory=list)
    _learning: Rollouts | None = None

    # ------------------------------------------------------------------------------------------ start and end

    async def begin(self) -> None:
        """Go on from a checkpoint where that is asked for. Then every server holds this run's weights, under a version
        above any it ever held: a server given by address may come from a run that got further."""
        parts, config = self.parts, self.config
        found = find_resumption(config, parts.persistence.folder.checkpoints) if config.run.resume else None
        if found is not None:
            await parts.persistence.load(found)
            self.update, self.version = found.state.update, found.state.policy_version
            self._first_update = self.update
            self.started_s -= found.state.elapsed_s
            self._restore_costs(parts.persistence.folder)
            resumed = ResumedAt(update=self.update, changed=found.changed)
            note_resumption(parts.persistence.folder.resumptions, resumed)
            done = f"{self.update} updates done, policy version {self.version}"
            changed = "".join(f"\n  from update {self.update} on: {change}" for change in found.changed)
            parts.monitor.print(f"resumed {found.folder}: {done}{changed}")
        if (found is not None or config.rollout.urls) and parts.publishes:
            held = await weight_sync.server_versions(parts, parts.servers.ready)
            self.version = max([self.version, *(version + 1 for version in held.values())])
            await weight_sync.sync_weights(parts, self.version, self._send_weights)
        if config.run.evaluate_every and config.run.evaluate_at_start and found is None:
            before = await self.evaluate(0)
            self._append_evaluation(before, 0)
            parts.monitor.print(f"held-out reward before the first update: {before.reward_mean or 0.0:.3f}")
        elif found is not None and self.update and self._evaluates_after(self.update - 1) and not self._evaluated():
            missed = await self.evaluate(self.update)
            self._append_evaluation(missed, self.update)
            parts.monitor.print(f"held-out reward after {self.update} updates: {missed.reward_mean or 0.0:.3f}")

    def _evaluates_after(self, update: int) -> bool:
        """Whether an evaluation is due at the end of `update`."""
        run = self.config.run
        return bool(run.evaluate_every) and ((update + 1) % run.evaluate_every == 0 or update + 1 == run.updates)

    def _evaluated(self) -> bool:
        """Whether the policy of the checkpoint was: a run may be stopped while it evaluates."""
        kept = self.parts.persistence.folder.evaluations
        return kept.exists() and any(e.updates == self.update for e in read_evaluations(kept))

    def _restore_costs(self, folder: RunFolder) -> None:
        """Costs go on where the checkpoint left them; evaluations of updates that are taken again are made again."""
        hours = [row.device_hours or 0.0 for row in read_rows(folder.metrics) if row.update < self.update]
        self._device_hours = hours[-1] if hours else 0.0
        forget_evaluations(folder.evaluations, self.update)

    def stop(self) -> None:
        """End the run as soon as its state can be saved: now while rollouts run, after the barrier otherwise."""
        self.stopping.set()
        for rollouts in self._sampling:
            rollouts.cancel()
        if self._learning is not None:
            self._learning.inbox.put_nowait(Stopped())

    @property
    def elapsed_s(self) -> float:
        """Wall time of the run, over all its starts."""
        return time.monotonic() - self.started_s

    async def end_rollouts(self) -> None:
        """Stop sampling, whatever of it is still going on."""
        for rollouts in self._sampling:
            rollouts.cancel()
            await rollouts.ended()

    async def finish(self) -> None:
        """Leave the state on disk: a checkpoint, and the policy when every update has been taken."""
        persistence, say = self.parts.persistence, self.parts.monitor.print
        saved = await persistence.save(self.update, self.version, elapsed_s=self.elapsed_s)
        if self.update < self.config.run.updates:
            trained = self.update > self._first_update
            nothing = f"{NOTHING_TRAINED}; run folder: {persistence.folder.path}"
            stopped = f"stopped after {self.update} updates" if trained else nothing
            kept = f"{f'; saved {saved}' if saved else ''}; --run.resume goes on"
            say(f"{stopped}{'' if persistence.off else kept}")
        elif policy := await persistence.export():
            say(f"policy: {policy}")

    def record_unfinished(self, reason: str) -> None:
        """Leave a line of the update that is under way; nothing between updates."""
        if record := self._records.get(self.update):
            line = unfinished(record.rollouts, phase=record.phase, reason=reason)
            append_line(self.parts.persistence.folder.unfinished_updates, line)

    def print_last_checkpoint(self) -> None:
        """Say where a run that failed can go on from."""
        if not self.parts.persistence.off:
            self.parts.monitor.print(resume_hint(self.parts.persistence.folder.checkpoints))

    # ------------------------------------------------------------------------------------------ rollouts

    def remaining_updates(self) -> Iterator[int]:
        """Updates still to take."""
        while self.update < self.config.run.updates and not self.stopping.is_set():
            yield self.update
            self.update += 1

    def samples_ahead(self, update: int) -> bool:
        """Whether the next update's rollouts run while this one is trained on."""
        spec = self.parts.plan.spec(update)
        ahead = find_rule(spec.config.schedule).samples_ahead
        return ahead and not spec.last and not self.stopping.is_set()

    def continues(self, update: int) -> bool:
        """Whether what was sampled ahead for `update` is used."""
        return not self.parts.plan.spec(update).first

    def start_rollouts(self, update: int) -> Rollouts:
        """Begin sampling an update's trajectories with the version the servers hold now."""
        spec = self.parts.plan.spec(update)
        groups = list(self.parts.supply.groups(spec.batch))
        rollouts = Rollouts(update=update, batch=spec.batch, policy_version=self.version, groups=groups)
        self._records[update] = UpdateRecord(
            self.config,
            rollouts,
            schedule=spec.name,
            shape=self.parts.shape,
            cells=self.parts.learner.cells,
            peak_flops=self.parts.peak_flops,
        )
        return self._start(rollouts, self.parts.supply.collect)

    def schedule(self, rollouts: Rollouts) -> UpdateScheduler:
        """The ledger and queue of one update."""
        spec = self.parts.plan.spec(rollouts.update)
        if spec.name not in self._objectives:
            own = self.parts.objective if spec.config is self.config else None
            self._objectives[spec.name] = own or build_objective(spec.config)
        self._records[rollouts.update].set_policy_version(self.version)
        self._records[rollouts.update].set_start(self._acknowledged_s)
        sizes = [len(group) for group in rollouts.groups]
        return UpdateScheduler(
            spec.config, rollouts.update, self.version, sizes, self.parts.learner.cells, self._objectives[spec.name]
        )

    def replace_groups(self, scheduler: UpdateScheduler, rollouts: Rollouts) -> None:
        """Draw a task for each group that closed with equal rewards, as far as the objective asks for it."""
        while scheduler.needs_replacement():
            tasks = self.parts.supply.replacement_group(rollouts.batch, len(rollouts.groups))
            if tasks is None:
                scheduler.decline_replacements()
                return
            index = scheduler.add_group(len(tasks))
            assert index == len(rollouts.groups), "scheduler and rollouts number groups alike"
            rollouts.add_group(tasks, self.parts.supply.collect)

    def on_event(self, event: Event, rollouts: Rollouts) -> None:
        """A rollout event of the update being trained on."""
        rollouts.record(event)
        self.parts.monitor.record(event)
        self._records[rollouts.update].event(event)

    # ------------------------------------------------------------------------------------------ learner

    @property
    def free_cells(self) -> tuple[int, ...]:
        return self.parts.learner.free_cells

    @property
    def cells_with_room(self) -> tuple[int, ...]:
        return self.parts.learner.cells_with_room

    def listen(self, rollouts: Rollouts) -> None:
        """From now on the learner's answers arrive with these rollouts' events."""
        self.parts.learner.direct_to(rollouts.inbox)
        self._learning = rollouts

    async def submit(self, cell: int, command: Command) -> None:
        """Give a cell its next piece of work."""
        self._commands[command.item] = command
        await self.parts.learner.submit(cell, command)

    def on_done(self, done: Done, rollouts: Rollouts) -> None:
        """A cell has done its piece of work."""
        self._records[rollouts.update].work(self._commands.pop(done.item), done)

    def show(self, scheduler: UpdateScheduler, rollouts: Rollouts) -> None:
        """Refresh the progress display, a few times a second: reckoning it takes time that rollouts could have."""
        if (now := time.monotonic()) - self._shown_s < SHOW_EVERY_S:
            return
        self._shown_s = now
        self.parts.monitor.refresh(self._records[rollouts.update].progress(scheduler))

    # ------------------------------------------------------------------------------------------ barrier

    async def take_step(self, scheduler: UpdateScheduler, rollouts: Rollouts) -> None:
        """Reduce, normalise, clip and step once on every cell; contributions become APPLIED or DROPPED."""
        record = self._records[rollouts.update]
        record.set_phase("step")
        self.show(scheduler, rollouts)

        def step(item: int) -> TakeStep:
            return TakeStep(
                item=item,
                update=rollouts.update,
                normaliser=scheduler.normaliser or 1.0,
                skip=scheduler.skip,
            )

        command, answers = await self.parts.learner.everywhere(step, self.config.stall_limit_s)
        for done in answers:
            record.work(command, done)
        self.version += 1  # before anything can be awaited: a restarted server must be told the weights' true version
        scheduler.on_step(answers[0].stats.stepped)

    async def publish(self, rollouts: Rollouts) -> None:
        """Every ready server holds the new version, acknowledged, before this returns."""
        record = self._records[rollouts.update]
        if not self.parts.publishes:
            self._acknowledged_s = record.acknowledged()
            return
        for command, done in await weight_sync.sync_weights(self.parts, self.version, self._send_weights):
            record.work(command, done)
        self._acknowledged_s = record.acknowledged()

    async def republish(self, server: ServerAddress) -> None:
        """A server came back: it gets the weights of the current version before it gets work."""
        sent = -1
        while sent != self.version:  # a step may be taken while the weights of the last one travel
            self.parts.monitor.print(f"server {server.name} is back (start {server.incarnation}); sending the weights")
            command, done = await self._send_weights((server,))
            sent = command.version
            if done.stats.failed_servers:
                raise InfrastructureFailure(f"{server.name} did not take version {sent} after its restart")

    async def close_update(self, scheduler: UpdateScheduler, rollouts: Rollouts) -> None:
        """Evaluate where it is due, then write the update's row."""
        update, run = rollouts.update, self.config.run
        due = self._evaluates_after(update) and not self.stopping.is_set()
        found = await self.evaluate(update + 1) if due else None
        record = self._records.pop(update)
        row = record.row(
            scheduler,
            heldout=found.reward_mean if found else None,
            since_start_s=self.elapsed_s,
            hours_before=self._device_hours,
            devices=self.parts.devices,
            sizing=self.parts.sizes.observe(rollouts) if scheduler.objective.unit is Unit.TRAJECTORY else None,
        )
        self._device_hours = row.device_hours
        if self.parts.drafting is not None:
            row = await self.parts.drafting.filled(row)
        self.parts.monitor.row(row)
        persistence, goes_on = self.parts.persistence, update + 1 < run.updates
        persistence.check()
        if found:
            self._append_evaluation(found, update + 1)
        if run.export_every and (update + 1) % run.export_every == 0:
            await persistence.export(update + 1)
        if persistence.due(update):
            await persistence.save(update + 1, self.version, elapsed_s=self.elapsed_s, background=goes_on)

    async def evaluate(self, updates: int) -> Score | None:
        """The score after `updates` updates on the held-out tasks, under the published version at the training
        temperature; every attempt is kept. None when the run is asked to stop meanwhile."""
        groups = self.parts.supply.heldout()
        number = self.config.run.evaluate_attempts
        self.parts.monitor.print(f"evaluating {len(groups)} held-out tasks, {number} attempts each ...")
        rollouts = Rollouts(update=EVALUATION, batch=EVALUATION, policy_version=self.version, groups=groups)
        self._start(rollouts, self.parts.supply.collect_rewards)
        await rollouts.ended()
        if self.stopping.is_set():
            return None
        attempts: list[Attempt] = []
        ends = AttemptEnds(lambda where: groups[where.group][where.index], attempts.append)
        while not rollouts.inbox.empty():
            for event in await rollouts.messages(1.0):
                ends.event(event)
        path = self.parts.persistence.folder.attempts_after(updates)
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(lambda: write_atomically(path, encode_lines(attempts)))
        return score(attempts, [k for k in KS if k <= number])

    # ------------------------------------------------------------------------------------------ private

    def _append_evaluation(self, found: Score, updates: int) -> None:
        evaluation = Evaluation(
            updates=updates, policy_version=self.version, device_hours=self._device_hours, score=found
        )
        append_evaluation(self.parts.persistence.folder.evaluations, evaluation)

    def _start(self, rollouts: Rollouts, collect: Collect) -> Rollouts:
        self._sampling = [r for r in self._sampling if r.running] + [rollouts]
        return rollouts.start(collect)

    async def _send_weights(self, servers: tuple[ServerAddress, ...]) -> tuple[Publish, Done]:
        def publish(item: int) -> Publish:
            return Publish(item=item, version=self.version, servers=servers)

        limit_s = (2 + len(servers)) * self.config.publish.timeout_s  # each may be the one that is waited for
        return await self.parts.learner.on_first_cell(publish, limit_s)
