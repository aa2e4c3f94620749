"""From the configuration to the objective of a run: by name, or the user's own by "file.py:build".

Called by the coordinator, the learner, the plan and the scheduler's callers. Every combination that cannot be exact is
refused (ConfigError) before a run starts: by `config/compatibility.py`, or by the objective's own `build` and `check`.
"""

from __future__ import annotations

from megathunder.config.compatibility import check_objective
from megathunder.config.root import Config
from megathunder.errors import ConfigError
from megathunder.objectives.base import Need, Objective
from megathunder.registry import OBJECTIVES


def build_objective(config: Config) -> Objective:
    """The objective that `config.objective` names; ConfigError as in the module docstring."""
    check_objective(config)
    objective = OBJECTIVES.get(config.objective)(config)
    if not isinstance(objective, Objective):
        raise ConfigError(
            f"objective = {config.objective!r} built {objective!r:.80}",
            expected="a subclass of megathunder.objectives.base.Objective",
            remedy="let the function that is named return one",
        )
    objective.check(config)
    return objective


def needs_teacher(config: Config) -> bool:
    """A teacher scores the turns of this run."""
    return Need.TEACHER in build_objective(config).needs
