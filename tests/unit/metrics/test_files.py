"""What a run writes: rows, folders, trajectories and spans, and what resuming does to them."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from benchmarks.comparison.differences import differences, kind_of
from megathunder import tracing
from megathunder.config import Config
from megathunder.errors import UserError
from megathunder.metrics.row import MetricsRow, definitions, read_rows
from megathunder.metrics.run_folder import RunFolder, open_folder, resume_run, start_run
from megathunder.metrics.sinks import JsonlSink
from megathunder.metrics.spans import read_spans
from megathunder.metrics.trajectories import TrajectoryWriter, read_trajectories
from megathunder.report.html_report import main
from megathunder.types import (
    EndReason,
    Rewarded,
    Role,
    Row,
    Segment,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)
from tests.unit.metrics.made_run import made_row, made_run


def config_in(parent: Path, **run: object) -> Config:
    return dataclasses.replace(Config(), run=dataclasses.replace(Config().run, folder=str(parent), name="r", **run))


def test_rows_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [made_row(0, dropped_by_reason={"lost": 2}, tokens_by_lag={0: 5, 1: 2}), made_row(1, success_heldout=0.5)]
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for row in rows:
        sink.row(row)
        assert len(read_rows(tmp_path / "metrics.jsonl")) == row.update + 1, "a row is on disk once it is taken"
    assert read_rows(tmp_path / "metrics.jsonl") == rows


def test_every_line_is_plain_json_whatever_the_numbers(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m")
    sink.row(made_row(0, reward_std=math.nan, grad_norm=math.inf, loss=None))
    assert json.loads((tmp_path / "m").read_text(), parse_constant=pytest.fail)["grad_norm"] is None
    (row,) = read_rows(tmp_path / "m")
    assert math.isnan(row.reward_std) and math.isnan(row.grad_norm)
    assert row.loss is None and row.teacher_kl is None


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=5)
    with folder.metrics.open("a") as file:
        file.write('{"update": 5, "rew')
    assert [row.update for row in read_rows(folder.metrics)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("garbage", ['{"update": 2, "re', "\\xff\\xfe", "[1, 2]", '{"update": 1}'])
def test_a_garbled_line_is_an_error_that_names_file_and_line(
    tmp_path: Path, garbage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made_run(tmp_path, updates=5)
    lines = folder.metrics.read_text().splitlines()
    folder.metrics.write_text("\n".join([*lines[:2], garbage, *lines[3:]]) + "\n")
    assert main([str(folder.path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder.metrics}, line 3: ") and f"sed -i 3d {folder.metrics}" in said


def test_a_garbled_trajectory_is_an_error_that_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "update_00000.jsonl"
    file.write_text('{"id": [0, 0, 0], "traj\n')
    with pytest.raises(UserError, match=r"update_00000.jsonl, line 1: "):
        list(read_trajectories(file))


def test_every_field_of_a_row_is_defined() -> None:
    assert set(definitions()) == set(MetricsRow.__struct_fields__)
    assert all(text.endswith(".") and len(text) > 10 for text in definitions().values())


def test_resuming_forgets_the_updates_that_will_be_taken_again(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=6)
    folder.trajectories.mkdir()
    for update in range(6):
        folder.trajectories_of(update).touch()
    resume_run(folder, 4)
    assert [row.update for row in read_rows(folder.metrics)] == [0, 1, 2, 3]
    assert sorted(folder.trajectories.iterdir()) == [folder.trajectories_of(update) for update in range(4)]
    sink = JsonlSink(folder.metrics)
    sink.row(made_row(4))
    assert [row.update for row in read_rows(folder.metrics)] == [0, 1, 2, 3, 4]


def test_a_resumed_run_writes_no_event_onto_one_that_was_cut_off(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=6)
    before = len(read_spans(folder.events))
    with folder.events.open("a") as file:
        file.write('{"lane": "rollout/39", "name": "tu')
    resume_run(folder, 4)
    recorder = tracing.Recorder(folder.events)
    recorder.write(tracing.CHECKPOINT_LANE, "write", 1e3, 1e3)
    recorder.close()
    assert len(read_spans(folder.events)) == before + 1


def test_a_run_writes_its_settings_first(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    assert start_run(config).read_config() == config


def test_overwriting_removes_what_the_older_run_wrote_and_nothing_else(tmp_path: Path) -> None:
    folder = start_run(config_in(tmp_path))
    folder.metrics.write_text("old")
    folder.trajectories.mkdir()
    folder.trajectories_of(0).touch()
    (folder.path / "notes.txt").write_text("mine")
    start_run(config_in(tmp_path, overwrite=True))
    assert sorted(path.name for path in folder.path.iterdir()) == ["config.toml", "notes.txt"]


def test_a_folder_without_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        open_folder(tmp_path)
    assert main([str(tmp_path)]) == 2
    assert "remedy" in capsys.readouterr().err


def segment(role: Role, *ids: int) -> Segment:
    sampled = role is Role.ACTION
    return Segment(
        role=role,
        token_ids=ids,
        logprobs=(-0.5,) * len(ids) if sampled else (),
        policy_versions=(4,) * len(ids) if sampled else (),
    )


def whole(key: TrajectoryId, *segments: Segment) -> TrajectoryCompleted:
    trajectory = Trajectory(
        id=key,
        task_id="task",
        rows=(Row(segments=segments),),
        end_reason=EndReason.ANSWERED,
        started_s=1.0,
        completed_s=3.0,
        turns=2,
    )
    return TrajectoryCompleted(trajectory=trajectory, at_s=3.0)


def test_trajectories_hold_all_that_a_replay_needs(tmp_path: Path) -> None:
    writer = TrajectoryWriter(RunFolder(tmp_path), decode=lambda ids: " ".join(map(str, ids)))
    done, lost, later = TrajectoryId(2, 0, 1), TrajectoryId(2, 0, 0), TrajectoryId(3, 0, 0)
    prompt, first, tool, second = (
        segment(Role.PROMPT, 1, 2),
        segment(Role.ACTION, 3),
        segment(Role.OBSERVATION, 4),
        segment(Role.ACTION, 5, 6),
    )
    events = [
        TurnCompleted(id=done, turn=0, row=0, segments=(prompt, first), at_s=1.5),
        TurnCompleted(id=later, turn=0, row=0, segments=(prompt, first), at_s=1.6),
        TurnScored(id=done, turn=0, teacher_logprobs=(-0.25,), at_s=1.8),
        TurnCompleted(id=done, turn=1, row=0, segments=(tool, second), at_s=2.5),
        Rewarded(id=done, reward=1.0, verifier_s=0.5, at_s=4.0),
        whole(done, prompt, first, tool, second),
        TrajectoryLost(id=lost, reason="server gone", at_s=2.0),
    ]
    for event in events:
        writer.note(event)
    first_record, second_record = read_trajectories(writer.end_update(2)())
    assert (first_record.id, first_record.lost, first_record.trajectory) == (lost, "server gone", None)
    assert second_record.trajectory is not None
    assert second_record.trajectory.rows[0].token_ids == (1, 2, 3, 4, 5, 6)
    assert second_record.trajectory.rows[0].policy_versions == (4, 4, 4)
    assert second_record.text == ("1 2 3 4 5 6",)
    assert (second_record.reward, second_record.rewarded_s, second_record.verifier_s) == (1.0, 4.0, 0.5)
    assert [(t.completed_s, t.scored_s, t.teacher_logprobs) for t in second_record.turns] == [
        (1.5, 1.8, (-0.25,)),
        (2.5, None, ()),
    ]
    assert [record.id for record in read_trajectories(writer.end_update(3)())] == [later]


def test_a_trajectory_that_runs_again_forgets_its_first_turns(tmp_path: Path) -> None:
    writer = TrajectoryWriter(RunFolder(tmp_path), decode=lambda ids: "")
    key = TrajectoryId(0, 0, 0)
    for turn, at_s in ((0, 1.0), (1, 2.0), (0, 5.0)):
        writer.note(TurnCompleted(id=key, turn=turn, row=0, segments=(), at_s=at_s))
    (record,) = read_trajectories(writer.end_update(0)())
    assert [(turn.turn, turn.completed_s) for turn in record.turns] == [(0, 5.0)]


def test_spans_are_those_since_the_last_start(tmp_path: Path) -> None:
    recorder = tracing.Recorder(tmp_path / "events.jsonl")
    for start in (500.0, 7.0):
        recorder.write(tracing.RUN_LANE, "start", start, start)
        recorder.write("learner/0", "step", start + 1, start + 2, update=3)
    recorder.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"lane": "lear')
    spans = read_spans(tmp_path / "events.jsonl")
    assert [(span.name, span.start_s, span.update) for span in spans] == [("start", 7.0, None), ("step", 8.0, 3)]
    assert read_spans(tmp_path / "none") == []


def test_the_exported_trace_keeps_every_span_in_microseconds(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=5)
    assert main([str(folder.path), "--perfetto", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = read_spans(folder.events)
    intervals = [event for event in events if event["ph"] == "X"]
    assert len(intervals) == sum(span.end_s > span.start_s for span in spans)
    assert sum(event["dur"] for event in intervals) == pytest.approx(1e6 * sum(s.end_s - s.start_s for s in spans))
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {s.lane for s in spans}


def test_differences_are_relative_to_their_kind_and_name_what_is_missing(tmp_path: Path) -> None:
    one = {"layers.0.w": numpy.array([4.0, 0.0]), "layers.1.w": numpy.array([0.0, 1.0]), "b": numpy.array([1e-3])}
    other = {**one, "layers.1.w": numpy.array([0.0, 1.5])}
    save_file(one, tmp_path / "a")
    save_file(other, tmp_path / "b")
    save_file({"b": one["b"]}, tmp_path / "c")
    found = differences(tmp_path / "a", tmp_path / "b")
    assert found.by_kind == pytest.approx({"layers.*.w": 0.5 / 4, "b": 0.0})
    assert found.by_norm["layers.*.w"] == pytest.approx(0.5 / math.sqrt(17))
    assert not found.identical
    assert differences(tmp_path / "a", tmp_path / "a").identical
    assert differences(tmp_path / "a", tmp_path / "c").largest == math.inf
    zero = {**one, "b": numpy.array([0.0])}
    save_file(zero, tmp_path / "z")
    assert set(differences(tmp_path / "z", tmp_path / "z").by_kind) == {"layers.*.w"}, "two zeros say nothing"
    assert differences(tmp_path / "z", tmp_path / "a").by_kind["b"] == math.inf
    assert kind_of("layers.11.mlp.experts.linear_fc1.weight7") == "layers.*.mlp.experts.linear_fc1.weight*"
