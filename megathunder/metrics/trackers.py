"""The built-in sinks beside `metrics.jsonl`: Weights & Biases, TensorBoard, trackio and MLflow.

Each is made as `Sink(config, folder)` and takes rows as `guarded_sink.py` says. What a library keeps on this machine
lies in the run folder; a resumed run goes on in its own history.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import shlex
from pathlib import Path

import msgspec

from megathunder.config import Config
from megathunder.config.toml import to_toml
from megathunder.metrics.flat_row import flat_numbers, flat_row
from megathunder.metrics.row import MetricsRow
from megathunder.metrics.run_folder import RunFolder, write_atomically
from megathunder.registry import SINKS

log = logging.getLogger(__name__)

CONNECT_S = 20.0
"""Limit for W&B to answer before its files are kept here."""


@SINKS.register("wandb")
class WandbSink:
    """Rows as W&B history over updates. W&B may be unreachable: its files then stay in the run folder."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        import wandb

        folder.wandb.mkdir(exist_ok=True)
        arguments = {
            "project": config.metrics.project,
            "name": config.run.name,
            "id": _run_id(folder.wandb / "id", os.environ.get("WANDB_RUN_ID")),  # a sweep's agent gives one
            "dir": str(folder.path),
            "config": _settings(config) | {"toml": to_toml(_without_keys(config))},
            "resume": "allow",
            "settings": {"console": "off", "silent": True, "init_timeout": CONNECT_S},
        }
        self._folder, self._offline = folder, config.metrics.wandb_mode == "offline"
        try:
            self._run = wandb.init(mode=config.metrics.wandb_mode, **arguments)
        except Exception as error:  # whatever W&B raises: without a network its files are kept
            if self._offline:
                raise
            log.warning(
                "W&B cannot be reached (%s); its files stay in %s, send them with `wandb sync`", error, folder.wandb
            )
            wandb.teardown()  # its service still holds the run's id
            self._run, self._offline = wandb.init(mode="offline", **arguments), True
        self._run.define_metric("*", step_metric="update")

    def row(self, row: MetricsRow) -> None:
        self._run.log(flat_row(row))

    def close(self) -> str:
        self._run.finish()
        if not self._offline:
            return ""
        files = sorted(self._folder.wandb.glob("offline-run-*"))
        names = " ".join(shlex.quote(str(path)) for path in files)
        return f"W&B was offline; to send this run: wandb sync {names}" if files else ""


@SINKS.register("tensorboard")
class TensorBoardSink:
    """Scalars over updates, in `tensorboard/` of the run folder."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder.tensorboard))
        self._writer.add_text("settings", f"```toml\n{to_toml(_without_keys(config))}\n```")

    def row(self, row: MetricsRow) -> None:
        for name, value in flat_numbers(row).items():
            self._writer.add_scalar(name, value, row.update)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


@SINKS.register("trackio")
class TrackioSink:
    """Rows of one trackio project; the file is where trackio keeps it (TRACKIO_DIR)."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        import trackio

        self._run = trackio.init(
            config.metrics.project,
            name=config.run.name,
            config=_settings(config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def row(self, row: MetricsRow) -> None:
        self._run.log(dict(flat_row(row)), step=row.update)

    def close(self) -> None:
        self._run.finish()


@SINKS.register("mlflow")
class MlflowSink:
    """One MLflow run; the server or database of MLFLOW_TRACKING_URI, else `mlflow.db` in the run folder."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        address = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder.path.resolve() / 'mlflow.db'}"
        self._client, project = MlflowClient(tracking_uri=address), config.metrics.project
        known = folder.path / "mlflow_run"
        if known.exists():
            self._run = known.read_text()
            return
        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        self._run = self._client.create_run(number, run_name=config.run.name).info.run_id
        write_atomically(known, self._run.encode())
        settings = [Param(f"{section}.{key}", str(value)) for section, key, value in _leaves(config)]
        self._client.log_batch(self._run, params=[param for param in settings if param.value])

    def row(self, row: MetricsRow) -> None:
        from mlflow.entities import Metric

        now_ms = int(row.since_start_s * 1000)
        numbers = flat_numbers(row).items()
        self._client.log_batch(self._run, metrics=[Metric(name, v, now_ms, row.update) for name, v in numbers])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _without_keys(config: Config) -> Config:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, api_key=""))


def _settings(config: Config) -> dict[str, object]:
    return msgspec.to_builtins(_without_keys(config))


def _leaves(config: Config) -> list[tuple[str, str, object]]:
    sections = {name: value for name, value in _settings(config).items() if isinstance(value, dict)}
    return [(name, key, value) for name, section in sections.items() for key, value in section.items()]


def _run_id(path: Path, given: str | None) -> str:
    """The id under which this run's history goes on."""
    if not path.exists():
        write_atomically(path, (given or secrets.token_hex(4)).encode())
    return path.read_text()
