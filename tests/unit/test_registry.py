"""Parts by name, by installed plug-in, by module and by file; what does not fit is refused with the closest name."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from megathunder.errors import ConfigError
from megathunder.registry import Registry, absolute_reference

REWARDS_PY = """
import neighbour
LIMIT = 3
runs = globals().get("runs", 0) + 1
def score(completion, row, trajectory): return neighbour.VALUE
def score_short(completion): return 0.0
def score_more(completion, row, trajectory, *, weight=1.0): return weight
class Game:
    def __init__(self, completion, row, trajectory): self.row = row
    def reset(self, row): return "start"
    @staticmethod
    def judge(completion, row, trajectory): return 0.25
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS_PY)
    (tmp_path / "neighbour.py").write_text("VALUE = 0.5")
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('no licence')")
    (tmp_path / "typo.py").write_text("def score(:")
    return tmp_path


def rewards() -> Registry[Callable[..., float]]:
    registry: Registry[Callable[..., float]] = Registry("reward", parameters=("completion", "row", "trajectory"))

    @registry.register("boxed")
    def boxed(completion: str, row: dict, trajectory: object) -> float:
        return 1.0

    return registry


def test_a_registered_name_a_file_and_a_module_all_resolve(folder: Path) -> None:
    registry = rewards()
    assert registry.get("boxed")("", {}, None) == 1.0
    assert registry.get("rewards.py:score", base=folder)("", {}, None) == 0.5  # its neighbour was imported
    assert registry.get(f"{folder}/rewards.py:score_more")("", {}, None) == 1.0
    assert registry.get("rewards.py:Game.judge", base=folder)("", {}, None) == 0.25
    assert registry.get("os.path:join")("a", "b", "c") == "a/b/c"


def test_a_file_runs_once_however_often_it_is_named(folder: Path) -> None:
    first = rewards().get("rewards.py:score", base=folder)
    second = rewards().get(f"{folder}/../{folder.name}/rewards.py:score")
    assert first is second


def test_an_entry_point_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    point = importlib.metadata.EntryPoint("joined", "os.path:join", "megathunder.reward")
    seen: list[str] = []

    def points(group: str) -> list[importlib.metadata.EntryPoint]:
        seen.append(group)
        return [point]

    monkeypatch.setattr("megathunder.registry.entry_points", points)
    assert rewards().get("joined")("a", "b", "c") == "a/b/c"
    assert rewards().names() == ["boxed", "joined"]
    assert set(seen) == {"megathunder.reward"}


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("boxd", r"no reward 'boxd'\n.*boxed.*\n.*did you mean 'boxed'\?"),
        ("reward.py:score", r"/reward\.py does not exist\n(.|\n)*did you mean 'rewards\.py'\?"),
        ("nowhere/rewards.py:score", r"does not exist(.|\n)*holds no Python file"),
        ("rewards.py:scor", r"has no 'scor'\n.*score(.|\n)*did you mean 'score'\?"),
        ("rewards.py:LIMIT", r"is 3, which cannot be called\n.*LIMIT\(completion, row, trajectory\)"),
        ("rewards.py:score_short", r"signature \(completion\): too many positional(.|\n)*\(completion, row, traj"),
        ("broken.py:score", r"RuntimeError: no licence \(at .*broken\.py:2\)"),
        ("typo.py:score", r"could not be imported: SyntaxError"),
        ("no.such.module:score", r"could not be imported: ModuleNotFoundError"),
        (":score", r"could not be imported"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, reference: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rewards().get(reference, base=folder)


def test_methods_are_required(folder: Path) -> None:
    registry: Registry[type] = Registry("environment", methods=("reset", "step"))
    with pytest.raises(ConfigError, match=r"'rewards.py:Game' has no step\n.*reset, step"):
        registry.get("rewards.py:Game", base=folder)


def test_a_name_is_taken_once() -> None:
    registry = rewards()
    with pytest.raises(ConfigError, match="'boxed' is registered twice"):
        registry.register("boxed")(lambda completion, row, trajectory: 0.0)


def test_built_in_parts_are_imported_at_the_first_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Registry[Callable[[], int]] = Registry("lazy part", parameters=(), modules=("lazy_parts",))
    (tmp_path / "lazy_parts.py").write_text(
        "from lazy_home import PARTS\n@PARTS.register('late')\ndef late(): return 7"
    )
    monkeypatch.setitem(sys.modules, "lazy_home", types.SimpleNamespace(PARTS=registry))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "lazy_parts" not in sys.modules
    assert registry.get("late")() == 7


def test_a_reference_becomes_absolute_in_the_first_folder_that_has_the_file(folder: Path) -> None:
    other = folder / "other"
    assert absolute_reference("rewards.py:score", [other, folder]) == f"{folder}/rewards.py:score"
    assert absolute_reference("new.py:score", [other, folder]) == f"{other}/new.py:score"
    assert absolute_reference("boxed", [other]) == "boxed"
    assert absolute_reference("package.module:score", [other]) == "package.module:score"
