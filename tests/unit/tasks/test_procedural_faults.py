"""Procedural faults: one expression of one function differs, and the rest of the file stays as it was."""

from __future__ import annotations

import ast
import asyncio
import difflib
import json
import signal
from pathlib import Path

import pytest

from megathunder.evaluation.validation import Verdict, Verdicts
from megathunder.tasks.patch import apply_patch
from tools import inject_bugs

MODULE = '''"""A module.  With odd   spacing."""


def clamp(value, low=0):
    """The value, at least low."""
    return max(value, low) if value != None else low


def shifted(values, by):  # é: two bytes
    """Every value moved."""
    return [value + by for value in values if 0 < value and not -by in values]
'''


def test_a_fault_is_one_changed_line_of_a_module_that_still_parses():
    found = list(inject_bugs.faults("sums.py", MODULE))
    assert {f.kind for f in found} >= {"compare", "op_change", "bool_change", "off_by_one", "call_change", "cond_swap"}
    for fault in found:
        ast.parse(fault.text)
        before, after = MODULE.splitlines(), fault.text.splitlines()
        assert len(before) == len(after)
        assert sum(a != b for a, b in zip(before, after)) == 1, fault
        assert fault.function in ("sums.clamp", "sums.shifted") and fault.function.partition(".")[2] in fault.described


def test_the_patch_of_an_instance_makes_the_fault_and_says_nothing_of_the_fix():
    for fault in inject_bugs.faults("sums.py", MODULE):
        instance = inject_bugs.draft("tiny__sums", fault, MODULE)
        assert apply_patch({"sums.py": MODULE}, instance.patch) == {"sums.py": fault.text}
        row = inject_bugs.finished(instance, ("tests/test_sums.py::test_low",), ("tests/test_sums.py::test_x",))
        changed = [d[2:].strip() for d in difflib.ndiff(fault.text.splitlines(), MODULE.splitlines()) if d[:1] == "+"]
        assert changed and changed[0] not in row["problem_statement"]


def test_what_stands_in_an_f_string_is_left_as_it_is():
    text = 'def f(n):\n    """é"""\n    return f"é {n + 1:{n * 2}}"\n'
    assert list(inject_bugs.faults("m.py", text)) == []


class NoPool:
    """Stands for the sandboxes: nothing is run in these tests."""

    def __init__(self, config: object) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instances that were validated; each breaks a test of its own."""
    found: list[str] = []

    async def validate(instance, *_: object) -> Verdict:
        found.append(instance.instance_id)
        return Verdict(fail_to_pass=(f"tests/test_m.py::test_{len(found)}",), pass_to_pass=("tests/test_m.py::test_x",))

    monkeypatch.setattr(inject_bugs, "SandboxPool", NoPool)
    monkeypatch.setattr(inject_bugs, "validate_instance", validate)
    return found


def repository(folder: Path, name: str = "tiny", module: str = MODULE, tests: bool = True) -> Path:
    repo = folder / "repos" / name
    (repo / "tests").mkdir(parents=True)
    (repo / "sums.py").write_text(module)
    if tests:
        (repo / "tests" / "test_m.py").write_text("")
    return repo.parent


def inject(*words: object) -> int:
    return inject_bugs.main([str(word) for word in words])


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert inject(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "\n  expected: " in said and "\n  remedy:   " in said
    return said


def test_what_no_task_can_be_made_from_is_refused_by_what_was_seen(tmp_path, tried, capsys):
    out = ("--out", tmp_path / "out" / "i.jsonl")
    (tmp_path / "empty" / "repos").mkdir(parents=True)
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "repos").touch()
    for repos, seen in (
        (tmp_path / "none" / "repos", "no such folder"),
        (tmp_path / "file" / "repos", "a file"),
        (tmp_path / "empty" / "repos", "it holds no folder"),
        (tmp_path / "empty", "no folder called repos"),
        (repository(tmp_path / "a", tests=False), "there are no tests"),
        (repository(tmp_path / "b", module="def f(:\n"), "sums.py is no Python"),
        (repository(tmp_path / "c", module="x = 1\n"), "no expression to change"),
    ):
        assert seen in refused(capsys, "--repos", repos, *out)
    sound = repository(tmp_path / "d")
    assert "--each 0" in refused(capsys, "--repos", sound, *out, "--each", "0")
    assert "Is a directory" in refused(capsys, "--repos", sound, "--out", tmp_path)
    assert "Not a directory" in refused(
        capsys, "--repos", sound, "--out", tmp_path / "file" / "repos" / "x" / "i.jsonl"
    )
    assert tried == [] and not any((tmp_path / "out").iterdir())


def test_a_repository_that_makes_no_task_says_why_beside_those_that_do(tmp_path, tried, capsys):
    repository(tmp_path, "silent", tests=False)
    repos = repository(tmp_path, "sound", module=MODULE.rstrip("\n"))
    assert inject("--repos", repos, "--out", tmp_path / "i.jsonl", "--each", "2") == 0
    told = capsys.readouterr().out
    assert (
        "silent: 0 tasks; left out: there are no tests (1)" in told and "sound: 2 tasks" in told and "note" not in told
    )
    made = [json.loads(line) for line in (tmp_path / "i.jsonl").read_text().splitlines()]
    for row in made:  # a text that does not end its last line
        ast.parse(apply_patch({"sums.py": MODULE.rstrip("\n")}, row["patch"])["sums.py"])
    assert len(made) == 2
    assert inject("--repos", repos, "--out", tmp_path / "elsewhere" / "i.jsonl", "--each", "2") == 0
    assert "note: tasks.path names one folder" in capsys.readouterr().out


def test_an_interrupted_run_says_where_its_verdicts_are_and_goes_on_from_there(tmp_path, tried, monkeypatch, capsys):
    repos, validate = repository(tmp_path), inject_bugs.validate_instance

    async def interrupted(*arguments: object) -> Verdict:
        if len(tried) == 2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(30)
        return await validate(*arguments)

    line = ("--repos", repos, "--out", tmp_path / "i.jsonl", "--each", "3")
    monkeypatch.setattr(inject_bugs, "validate_instance", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's &
    try:
        assert inject(*line) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    kept = tmp_path / ".i.jsonl.verdicts"
    assert str(kept) in capsys.readouterr().err and len(kept.read_text().splitlines()) == 2
    assert not (tmp_path / "i.jsonl").exists()
    with kept.open("a") as file:
        file.write('["cut off')
    monkeypatch.setattr(inject_bugs, "validate_instance", validate)
    assert inject(*line) == 0
    assert len(tried) == len(set(tried)) == 4, "no fault is tried twice"
    assert not kept.exists() and len((tmp_path / "i.jsonl").read_text().splitlines()) == 3


def test_a_verdict_that_follows_one_that_was_cut_off_is_known_the_next_time(tmp_path):
    asked = []

    async def run() -> Verdict:
        asked.append(1)
        return Verdict(reason="unsound")

    file = tmp_path / "v"
    file.write_text('["cut off')
    for _ in range(2):
        assert asyncio.run(Verdicts(file).of(b"content", run)).reason == "unsound"
    assert len(asked) == 1
