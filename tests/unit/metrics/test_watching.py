"""The display, the monitor and W&B: what is shown, and that nothing shown can end a run."""

from __future__ import annotations

import dataclasses
import io
import sqlite3
import struct
import sys
import threading
import types
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from megathunder import tracing
from megathunder.config import Config
from megathunder.metrics.console import Console, Progress, draw, line
from megathunder.metrics.flat_row import flat_numbers
from megathunder.metrics.monitor import open_monitor
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import start_run
from megathunder.metrics.sinks import GuardedSink, open_sinks
from megathunder.planning.memory import GpuUse, gpu_use
from megathunder.types import TrajectoryId, TrajectoryLost
from tests.unit.metrics.made_run import NO_STEP, everything, made_row


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
    assert "dropped 64 (equal rewards 64)" in line(made_row(0, **NO_STEP))
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


def install_wandb(
    monkeypatch: pytest.MonkeyPatch, history: History, calls: list[dict[str, object]] | None = None, error: str = ""
) -> None:
    """A module `wandb` in whose place nothing is sent; `error`: what `init` raises online."""
    module = types.ModuleType("wandb")

    def init(**arguments: object) -> History:
        if calls is not None:
            calls.append(arguments)
        if arguments["mode"] == "online" and error:
            raise ValueError(error)
        return history

    module.init = init  # type: ignore[attr-defined]
    module.teardown = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)


def wandb_config(tmp_path: Path, mode: str = "offline") -> Config:
    metrics = {"sinks": ("wandb",), "wandb_mode": mode, "report": False}
    return with_changes(run={"folder": str(tmp_path), "progress": False}, metrics=metrics)


def test_an_unreachable_wandb_falls_back_to_files_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, history, config = list[dict[str, object]](), History(), wandb_config(tmp_path, "online")
    install_wandb(monkeypatch, history, calls, error="no route to host")
    sink = open_sinks(config, start_run(config))[1]
    sink.row(made_row(0, tokens_by_lag={0: 7}))
    sink.close()
    assert [call["mode"] for call in calls] == ["online", "offline"]
    assert "wandb sync" in caplog.text
    assert history.logged[0]["tokens_by_lag/0"] == 7
    assert history.logged[0]["update"] == 0
    assert "success_heldout" not in history.logged[0]
    assert (history.axis, history.finished) == ("update", True)


def test_wandb_is_told_of_no_loss_and_no_trained_token_where_no_step_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, config = History(), wandb_config(tmp_path)
    install_wandb(monkeypatch, history)
    sink = open_sinks(config, start_run(config))[1]
    sink.row(made_row(0, **NO_STEP))
    sink.close()
    (logged,) = history.logged
    assert "loss" not in logged and logged["trained_tokens"] == 0 and logged["stepped"] is False
    assert logged["differentiated_tokens"] == 1200 and "coefficient" in logged["skip_reason"]


def test_a_resumed_run_continues_its_own_wandb_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, config = list[dict[str, object]](), wandb_config(tmp_path)
    install_wandb(monkeypatch, History(), calls)
    folder = start_run(config)
    for _ in range(2):
        for sink in open_sinks(config, folder):
            sink.close()
    assert calls[0]["id"] == calls[1]["id"]
    assert calls[0]["resume"] == "allow"


class Broken(History):
    """A W&B run that raises where `at` says."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def log(self, values: dict[str, object]) -> None:
        if self.at == "log" and values["update"]:
            raise RuntimeError("broken pipe")
        super().log(values)

    def finish(self) -> None:
        if self.at == "finish":
            raise SystemExit(1)


@pytest.mark.parametrize(("at", "lost"), [("init", 3), ("log", 2), ("finish", 0)])
def test_a_sink_that_fails_costs_its_own_rows_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    at: str,
    lost: int,
) -> None:
    config, history = wandb_config(tmp_path), Broken(at)
    install_wandb(monkeypatch, history)
    if at == "init":
        monkeypatch.setattr(sys.modules["wandb"], "init", lambda **_: 1 // 0)
    folder = start_run(config)
    monitor = open_monitor(config, folder, decode=lambda ids: "")
    for update in range(3):
        monitor.record(TrajectoryLost(id=TrajectoryId(update, 0, 0), reason="x", at_s=1.0))
        tracing.record(tracing.UPDATE_LANE, "suffix", 1.0, 2.0, update=update)
        monitor.row(made_row(update))
    monitor.close()
    assert [row.update for row in read_rows(folder.metrics)] == [0, 1, 2]
    assert folder.trajectories_of(2).stat().st_size and folder.events.read_text().count("suffix") == 3
    assert len(history.logged) == 3 - lost
    assert len(caplog.records) == 1 and "sink wandb failed and the run goes on" in caplog.text
    assert f"sink wandb: {lost} of 3 rows were lost; first error: " in capsys.readouterr().out


def test_a_sink_that_hangs_is_left_behind(tmp_path: Path) -> None:
    ended = threading.Event()
    sink = GuardedSink(
        "slow", lambda: types.SimpleNamespace(row=lambda row: ended.wait(20), close=lambda: None), close_s=0.1
    )
    sink.row(made_row(0))
    assert "1 of 1 rows were lost; it has not ended after 0 s" in sink.close()
    ended.set()


def test_a_sink_of_ones_own_gets_every_row_and_its_last_word_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text(
        "class Sink:\n"
        "    def __init__(self, config, folder): self.file = open(folder.path / 'own.txt', 'w')\n"
        "    def row(self, row): print(row.update, row.reward_mean, file=self.file)\n"
        "    def close(self): self.file.close(); return f'rows are in {self.file.name}'\n"
    )
    sinks = (f"{tmp_path}/own.py:Sink",)
    config = with_changes(run={"folder": str(tmp_path), "progress": False}, metrics={"sinks": sinks, "report": False})
    folder = start_run(config)
    monitor = open_monitor(config, folder, decode=lambda ids: "")
    rows = [made_row(update) for update in range(3)]
    for row in rows:
        monitor.row(row)
    monitor.close()
    assert (folder.path / "own.txt").read_text() == "".join(f"{row.update} {row.reward_mean}\n" for row in rows)
    assert f"rows are in {folder.path / 'own.txt'}" in capsys.readouterr().out


def test_tensorboard_has_every_number_of_every_row(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    config = with_changes(run={"folder": str(tmp_path)}, metrics={"sinks": ("tensorboard",)})
    folder, rows = start_run(config), [made_row(update, **everything(update)) for update in range(3)]
    sink = open_sinks(config, folder)[1]
    for row in rows:
        sink.row(row)
    assert sink.close() == ""
    (file,) = folder.tensorboard.iterdir()
    found: dict[str, dict[int, float]] = {}
    for event in _events(file):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    assert found["reward_mean"] == {row.update: pytest.approx(row.reward_mean) for row in rows}
    assert found["sizing/risk/8"][1] == pytest.approx(flat_numbers(rows[1])["sizing/risk/8"])
    assert found.keys() == set().union(*(flat_numbers(row) for row in rows))


def _events(file: Path) -> list[object]:
    from tensorboardX.proto.event_pb2 import Event

    data, at, events = file.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        events.append(Event.FromString(data[at + 12 : at + 12 + length]))
        at += length + 16
    return events


@pytest.mark.parametrize("name", ["trackio", "mlflow"])
def test_trackers_that_are_installed_take_rows(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip(name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = with_changes(run={"folder": str(tmp_path)}, metrics={"sinks": (name,)})
    folder = start_run(config)
    for part in (range(2), range(2, 3)):
        sink = open_sinks(config, folder)[1]
        for update in part:
            sink.row(made_row(update))
        assert sink.close() == ""
    database = next(tmp_path.rglob("*.db"))
    tables = {
        "trackio": "select count(distinct step) from metrics",
        "mlflow": "select count(*) from metrics where key = 'loss'",
    }
    with sqlite3.connect(database) as connection:
        assert connection.execute(tables[name]).fetchone() == (3,)


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
