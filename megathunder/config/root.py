"""The whole configuration of a run: one section a room, and the two choices a person makes first."""

from __future__ import annotations

from dataclasses import dataclass, field

from megathunder.config.field_types import Reference
from megathunder.config.hardware import HardwareConfig
from megathunder.config.learner import LearnerConfig
from megathunder.config.metrics import MetricsConfig
from megathunder.config.objective import GrpoConfig, LossConfig, OpdConfig
from megathunder.config.publish import PublishConfig
from megathunder.config.reward import RewardConfig
from megathunder.config.rollout import RolloutConfig
from megathunder.config.routing import RoutingConfig
from megathunder.config.run import RunConfig
from megathunder.config.sagc import SagcConfig
from megathunder.config.salt import SaltConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.speculation import SpeculationConfig
from megathunder.config.streaming import StreamingConfig
from megathunder.config.tasks import TasksConfig

STALL_GRACE_S = 30.0  # leases of sandboxes, copies, the learner's own last command


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Train a language-model agent: rollouts by SGLang, learning by Megatron-Core, exactly synchronous updates."""

    objective: Reference = "grpo"
    """`grpo` (rewards), `opd` (a teacher), or your own "file.py:build" with build(config) -> Objective."""
    schedule: Reference = "thundersync"
    """When the learner works: `sync` after the batch, `periodic_async` after each group, `thundersync` after each
    trajectory or turn, `one_step_off` on trajectories one update old, or your own "file.py:RULE"."""
    run: RunConfig = field(default_factory=RunConfig)
    sagc: SagcConfig = field(default_factory=SagcConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    salt: SaltConfig = field(default_factory=SaltConfig)
    opd: OpdConfig = field(default_factory=OpdConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Sizes that a group of this run may have, ascending."""
        return self.sagc.sizes if self.run.group_control == "sagc" else (self.run.group_size,)

    @property
    def trajectory_target(self) -> int:
        """Trajectories that an update should have about, whatever the size of its groups; 0: prompts do not follow."""
        return self.sagc.trajectories_per_update if self.run.group_control == "sagc" else 0

    @property
    def prompts_at_most(self) -> int:
        """Most prompts that an update may begin with."""
        target, smallest = self.trajectory_target, self.group_sizes[0]
        return max(1, (2 * target + smallest) // (2 * smallest)) if target else self.run.groups_per_update

    @property
    def trajectories_at_most(self) -> int:
        """Most trajectories that an update may begin with."""
        largest = self.group_sizes[-1]
        return self.trajectory_target + largest if self.trajectory_target else self.run.groups_per_update * largest

    @property
    def stall_limit_s(self) -> float:
        """How long an update may make no progress: never less than one trajectory may take with all its retries, its
        grading and its reward functions, which report nothing meanwhile."""
        rewards_s = self.reward.timeout_s * len(self.reward.function)
        attempt_s = self.rollout.deadline_s + self.sandbox.grading_budget_s + rewards_s
        longest_s = (1 + self.rollout.max_retries) * attempt_s + STALL_GRACE_S
        return max(self.streaming.stall_timeout_s, longest_s)

    @property
    def drafting(self) -> SpeculationConfig | None:
        """How the rollout servers draft; None where they do not."""
        return self.speculation if self.rollout.speculation == "suffix" else None
