"""What a resumed run goes on from, and what may have changed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megathunder.checkpoint.folder import begin, commit
from megathunder.checkpoint.resume import find_resumption, nothing_to_resume, resume_hint
from megathunder.checkpoint.state import ControlState, RunState, read_state, write_state
from megathunder.config import Config
from megathunder.errors import ConfigError, UserError
from megathunder.metrics.resumptions import ResumedAt, note_resumption, read_resumptions
from megathunder.metrics.run_folder import RunFolder, resume_run
from megathunder.tasks import SourceState, build_source


def state(update: int = 5, **changes: object) -> RunState:
    fields = {"run_id": "r", "policy_version": 7, "source": SourceState(epoch=1, cursor=3), "seed": 0}
    return RunState(update=update, **{**fields, **changes})


def save(parent: Path, config: Config, saved: RunState) -> Path:
    partial = begin(parent, saved.update)
    write_state(partial, saved, config)
    return commit(partial)


def changed(config: Config, section: str, **values: object) -> Config:
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    saved = state(controls=(ControlState(name="group size", data=b"\x00\xff"),))
    folder = save(tmp_path, Config(), saved)
    assert read_state(folder) == saved
    found = find_resumption(Config(), tmp_path)
    assert found is not None and found.folder == folder and found.changed == ()


def test_changed_settings_are_named_and_those_of_the_start_are_not(tmp_path: Path) -> None:
    save(tmp_path, Config(), state())
    config = changed(changed(Config(), "learner", learning_rate=1e-4), "run", updates=80, resume=True)
    told = find_resumption(config, tmp_path).changed
    assert sorted(told) == ["learner.learning_rate: 0.0005 -> 0.0001", "run.updates: 40 -> 80"]


def test_what_changes_an_update_is_named_and_a_key_is_not_shown(tmp_path: Path) -> None:
    save(tmp_path, Config(), state())
    config = changed(changed(Config(), "run", group_size=4), "grpo", advantage="none")
    config = changed(config, "rollout", api_key="hidden-key")
    told = find_resumption(config, tmp_path).changed
    assert told == ("run.group_size: 8 -> 4", f"grpo.advantage: {Config().grpo.advantage!r} -> 'none'")


def test_a_model_of_another_shape_is_refused_and_a_moved_one_is_named(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    for name, layers in (("before", 2), ("moved", 2), ("deeper", 3)):
        (tmp_path / name).mkdir()
        text = json.dumps(shape | {"vocab_size": 32, "model_type": "llama", "num_hidden_layers": layers})
        (tmp_path / name / "config.json").write_text(text)
    models = {name: str(tmp_path / name) for name in ("before", "moved", "deeper")}
    save(tmp_path / "checkpoints", changed(Config(), "learner", model=models["before"]), state())
    moved = find_resumption(changed(Config(), "learner", model=models["moved"]), tmp_path / "checkpoints")
    assert moved.changed == (f"learner.model: {models['before']!r} -> {models['moved']!r}",)
    with pytest.raises(ConfigError, match="another shape"):
        find_resumption(changed(Config(), "learner", model=models["deeper"]), tmp_path / "checkpoints")


def test_resumptions_are_kept_but_those_that_were_taken_back(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).resumptions
    assert read_resumptions(path) == ()
    for update, change in ((3, "a: 1 -> 2"), (7, "b: 1 -> 2"), (9, "c: 1 -> 2"), (7, "d: 1 -> 2")):
        note_resumption(path, ResumedAt(update=update, changed=(change,)))
    assert [(one.update, one.changed) for one in read_resumptions(path)] == [(3, ("a: 1 -> 2",)), (7, ("d: 1 -> 2",))]


def test_a_run_that_ended_too_early_is_told_where_it_can_go_on_from(tmp_path: Path) -> None:
    assert resume_hint(tmp_path) == "no checkpoint was saved (run.checkpoint_every); --run.overwrite starts anew"
    folder = save(tmp_path, Config(), state())
    assert resume_hint(tmp_path) == f"the last checkpoint is {folder}; --run.resume goes on from it"


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("tasks", {"seed": 1}),
        ("tasks", {"size": 9}),
        ("tasks", {"kinds": ("count",)}),
        ("learner", {"lora_rank": 4}),
        ("learner", {"dtype": "bfloat16"}),
        ("learner", {"distributed_optimizer": True}),
    ],
)
def test_another_stream_of_tasks_other_parameters_and_another_optimizer_are_refused(
    tmp_path: Path, section: str, values: dict
) -> None:
    save(tmp_path, Config(), state())
    with pytest.raises(ConfigError, match=f"{section}.{next(iter(values))}"):
        find_resumption(changed(Config(), section, **values), tmp_path)


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, Config(), state(format=99))
    with pytest.raises(UserError, match="format 99"):
        find_resumption(Config(), tmp_path)


def test_the_source_goes_on_where_it_was(tmp_path: Path) -> None:
    config = changed(Config(), "tasks", size=5)
    straight, resumed = build_source(config.tasks), build_source(config.tasks)
    for _ in range(3):
        straight.take(3)
    resumed.restore(straight.state())
    assert [t.id for t in straight.take(12)] == [t.id for t in resumed.take(12)]


def test_rows_and_trajectories_of_updates_that_are_taken_again_are_forgotten(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.trajectories.mkdir()
    for update in range(4):
        folder.trajectories_of(update).write_text("{}\n")
    folder.metrics.write_text("".join(f'{{"update": {update}}}\n' for update in range(4)) + '{"upd')
    resume_run(folder, 2)
    assert folder.metrics.read_text() == '{"update": 0}\n{"update": 1}\n'
    assert sorted(p.name for p in folder.trajectories.iterdir()) == ["update_00000.jsonl", "update_00001.jsonl"]


def test_a_resume_without_a_checkpoint_names_the_runs_that_have_one(tmp_path: Path) -> None:
    save(tmp_path / "good" / "checkpoints", Config(), state())
    (tmp_path / "bare").mkdir()
    assert f"{tmp_path / 'typo'} does not exist" in str(nothing_to_resume(tmp_path / "typo"))
    said = str(nothing_to_resume(tmp_path / "bare"))
    assert "bare has no complete checkpoint" in said and f"runs with one in {tmp_path}: good" in said
