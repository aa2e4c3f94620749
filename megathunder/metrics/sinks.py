"""Where rows go: `metrics.jsonl` (the truth), and Weights & Biases where it is asked for.

A sink takes rows in order and is closed once. W&B may be unreachable at any time: the run goes on, its files stay in
the run folder for `wandb sync`, and `metrics.jsonl` has everything.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
from pathlib import Path
from types import ModuleType
from typing import Protocol

import msgspec

from megathunder.config import Config
from megathunder.config.toml import to_toml
from megathunder.metrics.row import MetricsRow, Sizing, encode_row
from megathunder.metrics.run_folder import RunFolder, write_atomically

log = logging.getLogger(__name__)

CONNECT_S = 20.0
"""Limit for W&B to answer before its files are kept here."""


class Sink(Protocol):
    """Takes every row once."""

    def row(self, row: MetricsRow) -> None: ...
    def close(self) -> None: ...


class JsonlSink:
    """Appends a line a row and hands it to the operating system at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def row(self, row: MetricsRow) -> None:
        self._file.write(encode_row(row))

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """Rows as W&B history over updates. The id is kept in the folder, so that a resumed run continues its own."""

    def __init__(self, config: Config, folder: RunFolder, wandb: ModuleType) -> None:
        folder.wandb.mkdir(exist_ok=True)
        shown = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, api_key=""))
        settings = msgspec.to_builtins(shown) | {"toml": to_toml(shown)}
        arguments = {
            "project": config.metrics.wandb_project,
            "name": config.run.name,
            "id": _kept_id(folder.wandb / "id"),
            "dir": str(folder.path),
            "config": settings,
            "resume": "allow",
            "settings": {"console": "off", "silent": True, "init_timeout": CONNECT_S},
        }
        try:
            self._run = wandb.init(mode=config.metrics.wandb, **arguments)
        except (wandb.errors.Error, OSError, TimeoutError) as error:
            log.warning(
                "W&B cannot be reached (%s); its files stay in %s, send them with `wandb sync`", error, folder.wandb
            )
            wandb.teardown()  # its service still holds the run's id
            self._run = wandb.init(mode="offline", **arguments)
        self._run.define_metric("*", step_metric="update")

    def row(self, row: MetricsRow) -> None:
        flat = {name: getattr(row, name) for name in row.__struct_fields__}
        nested = {"dropped_by_reason": row.dropped_by_reason, "tokens_by_lag": row.tokens_by_lag}
        nested |= {f"memory_peaks/{phase}": found for phase, found in (flat.pop("memory_peaks") or {}).items()}
        nested |= _sizing(flat.pop("sizing"))
        salt = flat.pop("salt")
        numbers = msgspec.to_builtins(salt) if salt else {}
        nested["salt/spectrum"] = dict(enumerate(numbers.pop("spectrum", ())))
        nested["salt"] = numbers
        for name, table in nested.items():
            flat.pop(name, None)
            flat.update({f"{name}/{key}": value for key, value in table.items()})
        self._run.log({name: value for name, value in flat.items() if value is not None})

    def close(self) -> None:
        self._run.finish()


def _sizing(found: Sizing | None) -> dict[str, dict[object, float | None]]:
    """Tables of the numbers in a row's `sizing`; a size's risk is the mean of its posterior."""
    if found is None:
        return {}
    names = ("measured", "straggled", "chosen", "price", "multiplier")
    risks = {size: alpha / (alpha + beta) for size, (alpha, beta) in (found.posterior or {}).items()}
    numbers: dict[object, float | None] = {name: getattr(found, name) for name in names}
    return {"sizing": numbers, "sizing/groups": dict(found.groups_by_size), "sizing/risk": dict(risks)}


def open_sinks(config: Config, folder: RunFolder) -> list[Sink]:
    """The sinks of a run; that W&B is installed where it is asked for has been checked."""
    sinks: list[Sink] = [JsonlSink(folder.metrics)]
    if config.metrics.wandb != "off":
        import wandb

        sinks.append(WandbSink(config, folder, wandb))
    return sinks


def _kept_id(path: Path) -> str:
    """The run's id, the one given by a W&B agent if this is a trial of a sweep."""
    if not path.exists():
        write_atomically(path, (os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)).encode())
    return path.read_text()
