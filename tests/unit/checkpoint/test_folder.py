"""Checkpoint folders: complete or skipped, newest first, and never without a good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from megathunder.checkpoint.folder import MARKER, begin, commit, defect, newest, prune


def save(parent: Path, update: int) -> Path:
    partial = begin(parent, update)
    (partial / "learner").mkdir()
    (partial / "learner" / "shard").write_bytes(b"x" * 100 * (update + 1))
    (partial / "coordinator.json").write_text("{}")
    return commit(partial)


def test_a_committed_folder_is_complete_and_the_newest(tmp_path: Path) -> None:
    for update in (9, 10, 100000):
        assert defect(save(tmp_path, update)) == ""
    assert newest(tmp_path, pytest.fail) == tmp_path / "update_100000"


def test_a_save_that_was_interrupted_does_not_count_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    good = save(tmp_path, 1)
    partial = begin(tmp_path, 2)
    (partial / "shard").write_bytes(b"half")
    assert newest(tmp_path, pytest.fail) == good
    save(tmp_path, 3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update_00001", "update_00003"]


def cut(folder: Path) -> None:
    shard = folder / "learner" / "shard"
    shard.write_bytes(shard.read_bytes()[:-1])


def lose(folder: Path) -> None:
    (folder / "learner" / "shard").unlink()


def unmark(folder: Path) -> None:
    (folder / MARKER).unlink()


def scribble(folder: Path) -> None:
    (folder / MARKER).write_bytes(b"{")


@pytest.mark.parametrize("damage", [cut, lose, unmark, scribble])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(tmp_path: Path, damage) -> None:
    good, bad = save(tmp_path, 4), save(tmp_path, 5)
    damage(bad)
    warnings: list[str] = []
    assert newest(tmp_path, warnings.append) == good
    assert len(warnings) == 1 and str(bad) in warnings[0]


def test_nothing_to_resume_is_none(tmp_path: Path) -> None:
    assert newest(tmp_path / "absent", pytest.fail) is None


def test_pruning_keeps_the_newest_n_complete_ones(tmp_path: Path) -> None:
    for update in range(5):
        save(tmp_path, update)
        prune(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update_00003", "update_00004"]


def test_pruning_never_deletes_the_last_good_one_for_newer_damaged_ones(tmp_path: Path) -> None:
    folders = [save(tmp_path, update) for update in range(4)]
    unmark(folders[0])
    cut(folders[2])
    unmark(folders[3])
    prune(tmp_path, 1)
    assert newest(tmp_path, lambda _: None) == folders[1]
    assert not folders[0].exists() and folders[2].exists() and folders[3].exists()


def test_a_damaged_folder_of_the_same_update_is_replaced(tmp_path: Path) -> None:
    cut(save(tmp_path, 7))
    assert defect(save(tmp_path, 7)) == ""
    assert [p.name for p in tmp_path.iterdir()] == ["update_00007"]
