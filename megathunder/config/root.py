"""The whole configuration of a run: one section a room, and the two choices a person makes first."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megathunder.config.hardware import HardwareConfig
from megathunder.config.learner import LearnerConfig
from megathunder.config.metrics import MetricsConfig
from megathunder.config.objective import GrpoConfig, LossConfig, OpdConfig
from megathunder.config.publish import PublishConfig
from megathunder.config.replay import ReplayConfig
from megathunder.config.rollout import RolloutConfig
from megathunder.config.run import RunConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.streaming import StreamingConfig
from megathunder.config.tasks import TasksConfig

ObjectiveName = Literal["grpo", "opd"]
ScheduleName = Literal["sync", "periodic_async", "thundersync", "one_step_off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Train a language-model agent: rollouts by SGLang, learning by Megatron-Core, exactly synchronous updates."""

    objective: ObjectiveName = "grpo"
    """`grpo` (rewards) or `opd` (a teacher)."""
    schedule: ScheduleName = "thundersync"
    """When the learner works: `sync` after the batch, `periodic_async` after each group, `thundersync` after each
    trajectory or turn, `one_step_off` on trajectories one update old."""
    run: RunConfig = field(default_factory=RunConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    opd: OpdConfig = field(default_factory=OpdConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    publish: PublishConfig = field(default_factory=PublishConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
