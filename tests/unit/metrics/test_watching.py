"""The display, the monitor and W&B: what is shown, and that nothing shown can end a run."""

from __future__ import annotations

import dataclasses
import io
import types
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from megathunder import tracing
from megathunder.config import Config
from megathunder.metrics.console import Console, Progress, draw, line
from megathunder.metrics.monitor import open_monitor
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import start_run
from megathunder.metrics.sinks import WandbSink
from megathunder.planning.memory import GpuUse, gpu_use
from megathunder.types import TrajectoryId, TrajectoryLost
from tests.unit.metrics.made_run import NO_STEP, made_row


def with_changes(**sections: dict[str, object]) -> Config:
    config = Config()
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def printed(renderable: object) -> str:
    text = io.StringIO()
    RichConsole(file=text, width=160).print(renderable)
    return text.getvalue()


def test_a_line_says_what_the_update_did() -> None:
    text = line(made_row(9, reward_mean=0.5, success_heldout=0.25, contributions_dropped=3))
    assert "update    9  reward 0.500 (held-out 0.250)" in text
    assert "dropped 3" in text
    assert "NO STEP: all rewards equal" in line(made_row(0, stepped=False, skip_reason="all rewards equal"))


def test_without_a_terminal_one_plain_line_an_update_is_printed() -> None:
    text = io.StringIO()
    console = Console(live=True, file=text)
    console.refresh(Progress(update=0, updates=2, phase="rollout", elapsed_s=0.5))
    assert text.getvalue() == ""
    for update in range(2):
        console.row(made_row(update))
    console.close()
    assert text.getvalue() == line(made_row(0)) + "\n" + line(made_row(1)) + "\n"


def test_the_live_part_has_a_bar_for_rollout_and_one_for_the_learner() -> None:
    progress = Progress(
        update=3,
        updates=8,
        phase="tail",
        elapsed_s=1.25,
        trajectories_done=64,
        trajectories=64,
        contributions_done=40,
        contributions=64,
        reward_mean=0.5,
    )
    text = printed(draw(progress, made_row(2)))
    for words in (
        "rollout",
        "64/64",
        "learner",
        "40/64",
        "update 3: tail, 1.2 s",
        "reward so far 0.500",
        "last: reward",
    ):
        assert words in text


def test_a_monitor_records_rows_events_and_trajectories_and_ends_with_a_report(tmp_path: Path) -> None:
    config = with_changes(run={"folder": str(tmp_path), "progress": False, "updates": 2})
    folder = start_run(config)
    monitor = open_monitor(config, folder, decode=lambda ids: "")
    for update in range(2):
        monitor.record(TrajectoryLost(id=TrajectoryId(update, 0, 0), reason="x", at_s=1.0))
        monitor.refresh(Progress(update=update, updates=2, phase="rollout", elapsed_s=0.0))
        tracing.record(tracing.UPDATE_LANE, "suffix", 1.0, 2.0, update=update)
        monitor.row(made_row(update))
    monitor.close()
    assert len(read_rows(folder.metrics)) == 2
    assert folder.trajectories_of(1).stat().st_size > 0
    assert '"suffix"' in folder.events.read_text()
    assert "Zero staleness" in folder.report.read_text()
    tracing.record("run", "after", 0.0, 0.0)
    assert "after" not in folder.events.read_text()


class Unreachable(Exception):
    """What W&B raises where it cannot be reached."""


class History:
    """A W&B run that keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[dict[str, object]] = []
        self.axis = ""
        self.finished = False

    def define_metric(self, pattern: str, step_metric: str) -> None:
        self.axis = step_metric

    def log(self, values: dict[str, object]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def wandb_with(reachable: bool, calls: list[dict[str, object]], history: History) -> types.ModuleType:
    module = types.ModuleType("wandb")

    def init(**arguments: object) -> History:
        calls.append(arguments)
        if arguments["mode"] == "online" and not reachable:
            raise Unreachable("no route to host")
        return history

    module.init = init  # type: ignore[attr-defined]
    module.teardown = lambda: None  # type: ignore[attr-defined]
    module.errors = types.SimpleNamespace(Error=Unreachable)  # type: ignore[attr-defined]
    return module


def test_an_unreachable_wandb_falls_back_to_files_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = with_changes(run={"folder": str(tmp_path)}, metrics={"wandb": "online"})
    calls: list[dict[str, object]] = []
    history = History()
    sink = WandbSink(config, start_run(config), wandb_with(False, calls, history))
    sink.row(made_row(0, tokens_by_lag={0: 7}))
    sink.close()
    assert [call["mode"] for call in calls] == ["online", "offline"]
    assert "wandb sync" in caplog.text
    assert history.logged[0]["tokens_by_lag/0"] == 7
    assert history.logged[0]["update"] == 0
    assert "success_heldout" not in history.logged[0]
    assert (history.axis, history.finished) == ("update", True)


def test_wandb_is_told_of_no_loss_and_no_trained_token_where_no_step_was_taken(tmp_path: Path) -> None:
    config = with_changes(run={"folder": str(tmp_path)}, metrics={"wandb": "offline"})
    history = History()
    WandbSink(config, start_run(config), wandb_with(True, [], history)).row(made_row(0, **NO_STEP))
    (logged,) = history.logged
    assert "loss" not in logged and logged["trained_tokens"] == 0 and logged["stepped"] is False
    assert logged["differentiated_tokens"] == 1200 and "coefficient" in logged["skip_reason"]


def test_a_resumed_run_continues_its_own_wandb_history(tmp_path: Path) -> None:
    config = with_changes(run={"folder": str(tmp_path)}, metrics={"wandb": "offline"})
    calls: list[dict[str, object]] = []
    folder = start_run(config)
    for _ in range(2):
        WandbSink(config, folder, wandb_with(True, calls, History()))
    assert calls[0]["id"] == calls[1]["id"]
    assert calls[0]["resume"] == "allow"


def test_the_fullest_gpu_is_reported_and_none_without_a_driver() -> None:
    used, busy = (10, 30), (50, 100)
    driver = types.ModuleType("pynvml")
    driver.__dict__.update(
        NVMLError=Unreachable,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda index: types.SimpleNamespace(used=used[index], total=80),
        nvmlDeviceGetUtilizationRates=lambda index: types.SimpleNamespace(gpu=busy[index]),
        nvmlDeviceGetComputeRunningProcesses=lambda index: [types.SimpleNamespace(pid=7, usedGpuMemory=used[index])],
    )
    assert gpu_use(driver) == GpuUse(memory_bytes=30, limit_bytes=80, utilisation=0.75, by_process={7: 40})

    def no_driver() -> None:
        raise Unreachable("NVML Shared Library Not Found")

    driver.__dict__["nvmlInit"] = no_driver
    assert gpu_use(driver) is None
