"""Weights & Biases without a network: the rows of a run, and of its continuation, are in W&B's own files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from megathunder.config import Config
from megathunder.metrics.run_folder import start_run
from megathunder.metrics.sinks import open_sinks
from tests.unit.metrics.made_run import made_row

BLOCK, HEADER = 32768, 7  # of a log in LevelDB's format: crc (4 bytes), length (2), kind (1), then the piece


def pieces(path: Path) -> Iterator[bytes]:
    """Whole records of a `.wandb` file, whose first block starts after a header of the same size as a piece's."""
    data, at, held = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + HEADER])
        held += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (1, 4):  # a full one, or the last part of one
            yield held
            held = b""


def records(folder: Path) -> list[wandb_internal_pb2.Record]:
    """What every file below `folder` holds, oldest first."""
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    return [wandb_internal_pb2.Record.FromString(piece) for path in files for piece in pieces(path)]


@pytest.mark.slow
def test_every_row_is_in_wandbs_files_under_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "agent7")  # as `wandb agent` gives it
    config = Config(
        run=replace(Config().run, folder=str(tmp_path), name="offline"),
        metrics=replace(Config().metrics, sinks=("wandb",), wandb_mode="offline"),
    )
    folder = start_run(config)
    for part in (range(2), range(2, 3)):
        sinks = open_sinks(config, folder)
        for update in part:
            for sink in sinks:
                sink.row(made_row(update))
        notes = [sink.close() for sink in sinks]
        assert f"wandb sync {folder.wandb}/offline-run-" in notes[1]
    wandb.teardown()
    history = [r.history for r in records(folder.path) if r.WhichOneof("record_type") == "history"]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in h.item} for h in history]
    assert [row["update"] for row in rows] == [0, 1, 2]
    assert [row["reward_mean"] for row in rows] == [made_row(update).reward_mean for update in range(3)]
    assert {r.run.run_id for r in records(folder.path) if r.WhichOneof("record_type") == "run"} == {"agent7"}
