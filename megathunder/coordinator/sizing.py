"""Group sizes of a live run: how many prompts a batch takes and how many attempts each gets, and what came of it.

    batch opens    `draw`: prompts from the source until there are enough, each with its size     (Sagc chooses)
    batch closes   `observe`: every group's lengths -> straggler events                           (Sagc learns)

Under `run.group_control = "fixed"`, and where `chooses` is off, only the events are counted. It is a
`Control` of checkpoints: what it saves makes a resumed run choose as the uninterrupted one would have. Called by the
supply and the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from megathunder.config import Config
from megathunder.coordinator.rollouts import Rollouts
from megathunder.metrics.row import Sizing
from megathunder.rollout.group_size.sagc import Sagc, prompts_for
from megathunder.rollout.group_size.straggler import GroupOutcome, length_of, outcome
from megathunder.tasks import Task

Take = Callable[[int], list[Task]]
Groups = list[list[Task]]


class GroupSizes:
    """See the module docstring. `chooses` is off where the groups are recorded ones."""

    name = "group size"

    def __init__(self, config: Config, *, chooses: bool = True) -> None:
        self._config, self._settings = config, config.sagc
        controlled = chooses and config.run.group_control == "sagc"
        self._sagc = Sagc(config.sagc, config.run.group_size, config.run.seed) if controlled else None

    # ------------------------------------------------------------------------------------------ choice

    def draw(self, batch: int, take: Take) -> Groups:
        """The groups a batch begins with; `take(n)` answers the next n tasks of the source."""
        if self._sagc is None:
            return [self.group(batch, task) for task in take(self._config.run.groups_per_update)]
        size, target = self._sagc.size(batch), self._config.trajectory_target
        if not target or self._settings.prompt_prior == "off":
            prompts = prompts_for(target, size) if target else self._config.run.groups_per_update
            return [self.group(batch, task) for task in take(prompts)]
        groups: Groups = []
        while not groups or sum(map(len, groups)) + size / 2 <= target:
            groups.append(self.group(batch, take(1)[0]))
        return groups

    def group(self, batch: int, task: Task) -> list[Task]:
        """As many attempts at `task` as its group gets in this batch."""
        if self._sagc is None:
            return [task] * self._config.run.group_size
        return [task] * self._sagc.size(batch, self._prompt(task))

    def _prompt(self, task: Task) -> str:
        names = {"off": "", "kind": task.kind, "task": task.id}
        return names[self._settings.prompt_prior]

    # ------------------------------------------------------------------------------------------ learning

    def observe(self, rollouts: Rollouts) -> Sizing:
        """The batch has ended: count its stragglers, learn from them, and say where the controller stands."""
        lengths: dict[int, list[float]] = {}
        for identity, trajectory in rollouts.trajectories.items():
            lengths.setdefault(identity.group, []).append(length_of(trajectory, self._settings.length))
        outcomes: list[GroupOutcome] = []
        for index, group in enumerate(rollouts.groups):
            if group and (found := self._outcome(group, lengths.get(index, []))):
                outcomes.append(found)
        sizes = Counter(len(group) for group in rollouts.groups)
        straggled = sum(found.straggled for found in outcomes)
        seen = {"groups_by_size": dict(sorted(sizes.items())), "measured": len(outcomes), "straggled": straggled}
        if self._sagc is None:
            return Sizing(**seen)
        chosen, paid = self._sagc.size(rollouts.batch), self._sagc.multiplier
        self._sagc.observe(rollouts.batch, outcomes)
        posterior = {size: self._sagc.posterior(size) for size in self._settings.sizes}
        return Sizing(**seen, chosen=chosen, price=paid, multiplier=self._sagc.multiplier, posterior=posterior)

    def _outcome(self, group: list[Task], lengths: list[float]) -> GroupOutcome | None:
        return outcome(len(group), lengths, self._settings.threshold, self._prompt(group[0]))

    # ------------------------------------------------------------------------------------------ state

    def state(self) -> bytes:
        """What a checkpoint keeps; nothing where sizes are fixed."""
        return self._sagc.encode() if self._sagc else b""

    def restore(self, data: bytes) -> None:
        """Go on from `state`; a run that had fixed sizes before has nothing to go on from."""
        if self._sagc and data:
            self._sagc.decode(data)
