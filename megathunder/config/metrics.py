"""What a run writes down and where it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megathunder.config.field_types import NonNegativeFloat, NonNegativeInt, PositiveInt, References


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """[metrics] sinks beside `metrics.jsonl`, which is always written and is the truth."""

    sinks: References = ()
    """Trackers that get every row: wandb, tensorboard, trackio, mlflow (extras:
    `pip install -e .[wandb]`), or your own as "file.py:Sink"."""
    project: str = "megathunder"
    """Project (W&B, trackio) or experiment (MLflow) that the run is filed under."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` keeps the files of W&B in the run folder; `online` falls back to it when W&B cannot be reached."""
    trajectories: bool = True
    """Write every trajectory (tokens, log-probabilities, text, reward, times), so that the run can be replayed."""
    events: bool = True
    """Write the spans of rollout and learner that the timeline is drawn from."""
    report: bool = True
    """Build `report.html` and `timeline.png` when the run ends."""
    report_every: NonNegativeInt = 0
    """Rebuild `report.html` and `timeline.png` every n updates as well; 0: only at the end."""
    timeline_updates: PositiveInt = 4
    """Updates the timeline shows, the newest last."""
    peak_flops: NonNegativeFloat = 0.0
    """Floating-point operations a second of one learner rank at its best; 0: known for the device, or measured."""
