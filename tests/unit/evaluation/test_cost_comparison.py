"""Runs compared at a target and at a budget: first checkpoint that reaches it, latest one published within it."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from megathunder.config import Config
from megathunder.config.toml import to_toml
from megathunder.errors import UserError
from megathunder.evaluation import Attempt, score
from megathunder.evaluation import command as evaluate
from megathunder.evaluation.cost_comparison import Curve, compare, shared_ks
from megathunder.evaluation.history import Evaluation, append_evaluation, forget_evaluations, read_evaluations
from megathunder.evaluation.request import sampling_settings
from megathunder.metrics.row import encode_row
from megathunder.metrics.run_folder import RunFolder
from tests.unit.config.config_cases import change
from tests.unit.metrics.made_run import made_row

STUDENT = Path(__file__).resolve().parents[3] / "examples" / "policies" / "student"


def evaluation(updates: int, hours: float, right: int, *, attempts: int = 1) -> Evaluation:
    """Of ten tasks, the first `right` are solved in every attempt."""
    made = [
        Attempt(task_id=f"t{t}", kind="k", number=n, reward=float(t < right))
        for t in range(10)
        for n in range(attempts)
    ]
    result = score(made, [k for k in (1, 3) if k <= attempts])
    return Evaluation(updates=updates, policy_version=updates, device_hours=hours, score=result)


def curve(name: str, points: list[tuple[float, int]]) -> Curve:
    evaluations = tuple(evaluation(5 * i, hours, right) for i, (hours, right) in enumerate(points))
    return Curve(run=name, schedule=name, evaluations=evaluations)


SYNC = curve("sync", [(0.0, 2), (1.0, 4), (2.0, 5), (3.0, 7)])
FAST = curve("thundersync", [(0.0, 2), (0.6, 5), (1.2, 6), (1.8, 6)])


def test_the_defaults_are_the_highest_score_all_reach_and_the_hours_of_the_shortest_run():
    found = compare([SYNC, FAST], 1)
    assert found.target == pytest.approx(0.6) and found.budget_hours == 1.8
    slow, fast = found.runs
    assert (slow.hours_to_target, slow.updates_to_target) == (3.0, 15)  # not guessed between 2.0 and 3.0
    assert (fast.hours_to_target, fast.updates_to_target) == (1.2, 10)
    assert (slow.at_budget, slow.updates_at_budget) == (pytest.approx(0.4), 5)  # the latest within, not the nearest
    assert (fast.at_budget, fast.updates_at_budget) == (pytest.approx(0.6), 15)


def test_a_target_that_is_not_reached_and_a_budget_before_the_first_checkpoint_are_none():
    found = compare([SYNC, FAST], 1, target=0.65, budget_hours=-0.1)
    assert [run.hours_to_target for run in found.runs] == [3.0, None]
    assert [run.at_budget for run in found.runs] == [None, None]


def test_only_a_k_that_every_run_was_tried_for_is_compared():
    more = Curve(run="a", schedule="sync", evaluations=(evaluation(0, 0.0, 3, attempts=3),))
    assert shared_ks([more, SYNC], (1, 3, 5)) == [1] and shared_ks([more], (1, 3, 5)) == [1, 3]
    assert shared_ks([SYNC, Curve(run="b", schedule="sync", evaluations=())], (1,)) == []


def test_evaluations_are_read_as_written_and_those_made_again_replace_the_first(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    for made in (evaluation(0, 0.0, 1), evaluation(5, 1.0, 2), evaluation(10, 2.0, 3)):
        append_evaluation(path, made)
    forget_evaluations(path, after=5)
    append_evaluation(path, evaluation(10, 2.5, 4))
    with path.open("ab") as file:
        file.write(b'{"updates": 15')  # cut off by a crash
    assert [(e.updates, e.device_hours) for e in read_evaluations(path)] == [(0, 0.0), (5, 1.0), (10, 2.5)]
    path.write_text("no evaluation\n")
    with pytest.raises(UserError, match="line 1"):
        read_evaluations(path)


def made_folder(path: Path, schedule: str, rights: list[int], hours: float, **settings: object) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir()
    folder.config.write_text(to_toml(change(Config(), **settings)))
    rows = [made_row(u, schedule=schedule, device_hours=hours * (u + 1)) for u in range(len(rights) - 1)]
    folder.metrics.write_bytes(b"".join(map(encode_row, rows)))
    for updates, right in enumerate(rights):
        append_evaluation(folder.evaluations, evaluation(updates, hours * updates, right))
    return folder


def test_the_tool_compares_runs_by_their_own_evaluations_and_draws_them(tmp_path, capsys):
    made_folder(tmp_path / "a", "sync", [2, 3, 4, 6, 8], 0.2)
    made_folder(tmp_path / "b", "thundersync", [2, 4, 6, 8, 8], 0.1)
    out, main = tmp_path / "out" / "cost.json", evaluate.main
    assert main(["--runs", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["unit"] == "machine-hours" and len(found["curves"][0]["evaluations"]) == 5
    assert [run["hours_to_target"] for run in found["comparisons"][0]["runs"]] == pytest.approx([0.8, 0.3])
    assert [run["at_budget"] for run in found["comparisons"][0]["runs"]] == pytest.approx([0.4, 0.8])
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "thundersync" in capsys.readouterr().out
    (tmp_path / "b" / "evaluations.jsonl").unlink()
    assert main(["--runs", str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(out)]) == 2
    assert "run.evaluate_every" in capsys.readouterr().err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert evaluate.main([str(word) for word in arguments]) == 2
    said = capsys.readouterr().err
    assert "expected:" in said and "remedy:" in said
    return said


def test_runs_that_evaluated_themselves_on_other_tasks_or_otherwise_are_no_curves_to_compare(tmp_path, capsys):
    out = ("--json", tmp_path / "cost.json")
    a = made_folder(tmp_path / "a", "sync", [2, 3], 0.2, tasks__kinds=("read",)).path
    b = made_folder(tmp_path / "b", "thundersync", [2, 4], 0.1, tasks__kinds=("sum",)).path
    said = refused(capsys, "--runs", a, b, *out)
    assert "tasks.kinds = ('read',) and ('sum',)" in said and "0 of them the same" in said
    c = made_folder(tmp_path / "c", "thundersync", [2, 4], 0.1, tasks__kinds=("read",), rollout__temperature=0.5).path
    assert "rollout.temperature = 1.0 and 0.5" in refused(capsys, "--runs", a, c, *out)
    d = made_folder(tmp_path / "d", "thundersync", [2, 4], 0.1, tasks__kinds=("read",))
    fewer = evaluation(10, 0.2, 3)
    append_evaluation(d.evaluations, replace(fewer, score=replace(fewer.score, by_task=fewer.score.by_task[:4])))
    assert "10 and 4 held-out tasks, 4 of them the same" in refused(capsys, "--runs", d.path, *out)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    assert "an empty metrics.jsonl" in refused(capsys, "--runs", tmp_path / "empty", *out)
    assert "different names" in refused(capsys, "--runs", a, a, *out)
    e = made_folder(tmp_path / "e", "sync", [2, 3], 0.2, tasks__kinds=("read",), tasks__seed=1, run__seed=1).path
    assert evaluate.main(["--runs", str(a), str(e), "--json", str(tmp_path / "cost.json")]) == 0, "seeds may differ"


def test_runs_whose_settings_give_other_tasks_are_refused_before_a_server_is_started(tmp_path, capsys, monkeypatch):
    def never(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("megathunder.evaluation.request.open_session", never)
    daemon = ("--sandbox.backend", "docker", "--sandbox.docker-host", f"unix://{tmp_path}/none.sock")
    single = ("--checkpoint", STUDENT, "--tasks", "shell", "--json", tmp_path / "one.json")
    assert "no Docker daemon" in refused(capsys, *single, *daemon)
    monkeypatch.setattr("megathunder.evaluation.request.CHECKS", ())
    folders = [
        made_folder(
            tmp_path / name, "sync", [2, 3], 0.2, learner__model=str(STUDENT), tasks__kinds=(kind,), tasks__heldout=5
        )
        for name, kind in (("a", "read"), ("b", "sum"))
    ]
    for folder in folders:
        folder.policy_after(2).mkdir(parents=True)
    line = ("--runs", *(folder.path for folder in folders), "--tasks", "shell", "--json", tmp_path / "cost.json")
    said = refused(capsys, *line)
    assert "tasks.kinds = ('read',) and ('sum',)" in said and "for all runs on this command line" in said
    with pytest.raises(AssertionError, match="a server was started"):
        evaluate.main([str(word) for word in (*line, "--tasks.kinds", "read")])
    assert "b was trained with tasks.kinds = ('sum',), evaluated with ('read',)" in capsys.readouterr().out


def test_an_interrupted_evaluation_says_where_its_attempts_are(tmp_path, capsys, monkeypatch):
    async def interrupted(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(30)

    monkeypatch.setattr(evaluate, "scores", interrupted)
    monkeypatch.setattr("megathunder.evaluation.request.CHECKS", ())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's &
    try:
        assert evaluate.main(["--checkpoint", str(STUDENT), "--json", str(tmp_path / "one.json")]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert f"kept beside {tmp_path / 'one.json'}" in capsys.readouterr().err


def test_a_run_is_evaluated_as_it_sampled_but_for_what_is_given(tmp_path, capsys):
    run = made_folder(tmp_path / "a", "sync", [2], 0.1, rollout__temperature=0.5, rollout__max_new_tokens=7).path
    assert sampling_settings(run, []) == ["--rollout.temperature", "0.5", "--rollout.max_new_tokens", "7"]
    assert f"sampled as {run} sampled: rollout.temperature = 0.5" in capsys.readouterr().out
    assert sampling_settings(run, ["--rollout.temperature=1.0"]) == ["--rollout.max_new_tokens", "7"]
    assert sampling_settings(run, ["--config", "x.toml"]) == sampling_settings(STUDENT, []) == []
