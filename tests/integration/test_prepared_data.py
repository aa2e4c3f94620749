"""tools/prepare_data.py on a task of every format: what is sound is kept and can be read back, the rest is named."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.evaluation.validation import Verdict
from megathunder.tasks import RepositoryTests, build_source, heldout_tasks
from megathunder.tasks.swe import read_instances
from tools import prepare_data

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "examples" / "tasks"


def prepare(*arguments: object) -> int:
    return prepare_data.main([str(argument) for argument in arguments])


def report(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHIPPED / "swe" / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def smith(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sound instances of two repositories, one a file format, and one of each kind of unsound ones."""
    folder = tmp_path_factory.mktemp("smith")
    shutil.copytree(SHIPPED / "swe" / "repos", folder / "repos")
    (clocks,) = rows("train.jsonl")[:1]
    grids = next(row for row in rows("train.jsonl") if "grids" in row["repo"])
    spans = rows("dev.jsonl")[0]
    (folder / "a.json").write_text(json.dumps([clocks]))
    unsound = [
        clocks,  # a second time
        grids | {"instance_id": "harmless", "patch": "--- /dev/null\n+++ b/notes.txt\n@@ -0,0 +1 @@\n+x\n"},
        grids | {"instance_id": "silent", "problem_statement": " "},
        grids | {"instance_id": "bench", "repo": "swesmith/psf__requests.1a2b3c4d"},
        grids | {"instance_id": "named", "patch": grids["patch"] + "\n"},
        {"instance_id": "x"},
    ]
    (folder / "b.jsonl").write_text("\n".join(map(json.dumps, [grids, *unsound])))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist([spans]), folder / "c.parquet")
    (folder / "exclude.txt").write_text("named\n")
    return folder


def test_swe_smith_instances_are_checked_run_split_and_never_run_twice(smith, tmp_path, capsys):
    arguments = ("swe-smith", "--in", smith, "--out", tmp_path, "--exclude", smith / "exclude.txt", "--parallel", 2)
    assert prepare(*arguments) == 0
    found = report(tmp_path)
    stages = {"read": 9, "schema": 8, "statement": 7, "benchmark": 5, "duplicate": 4, "run": 3, "train": 2, "dev": 1}
    assert found["stages"] == stages, capsys.readouterr().out
    why = {name: reason.partition(":")[0] for name, reason in found["left_out"].items()}
    assert {name: why[name] for name in ("harmless", "silent", "bench", "named")} == {
        "harmless": "run",
        "silent": "statement",
        "bench": "benchmark",
        "named": "benchmark",
    }
    assert "no test fails before the fix" in found["left_out"]["harmless"]
    assert "does not prove" in found["separation"]
    verdicts = (tmp_path / "verdicts.jsonl").read_bytes()
    assert len(verdicts.splitlines()) == 4
    (tmp_path / "verdicts.jsonl").write_bytes(verdicts[:-5])  # interrupted while the last verdict was written
    assert prepare(*arguments) == 0 and report(tmp_path)["stages"] == stages
    assert len((tmp_path / "verdicts.jsonl").read_bytes().splitlines()) <= 6
    source = build_source(TasksConfig(source="swe", path=str(tmp_path)))
    train, heldout = {t.id for t in source.take(2)}, {t.id for t in source.heldout(9)}
    assert len(train) == 2 and len(heldout) == 1 and not train & heldout


def test_a_swe_bench_task_is_validated_and_is_for_evaluation_alone(tmp_path):
    clean = SHIPPED / "swe" / "repos" / "tiny__spans"
    smith = rows("dev.jsonl")[0]
    repo = tmp_path / "in" / "repos" / "psf__requests"
    shutil.copytree(clean, repo)
    (tmp_path / "bug.diff").write_text(smith["patch"])
    subprocess.run(["patch", "-s", "-p1", "-i", tmp_path / "bug.diff"], cwd=repo, check=True)
    fix = subprocess.run(["diff", "-u", repo / "spans.py", clean / "spans.py"], capture_output=True, text=True).stdout
    fix = f"--- a/spans.py\n+++ b/spans.py\n{fix.split(chr(10), 2)[2]}"
    row = {"repo": "psf/requests", "instance_id": "psf__requests-1", "base_commit": "0" * 40, "patch": fix}
    row |= {"test_patch": "", "problem_statement": "shift", "hints_text": "", "created_at": "", "version": "2.0"}
    row |= {key: json.dumps(smith[key]) for key in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    row |= {"environment_setup_commit": "", "difficulty": "<15 min fix"}
    (tmp_path / "in" / "verified.jsonl").write_text(json.dumps(row))
    assert prepare("swe-bench", "--in", tmp_path / "in", "--out", tmp_path / "out") == 0
    assert report(tmp_path / "out")["stages"]["dev"] == 1, report(tmp_path / "out")
    for path in (tmp_path / "out", tmp_path / "in" / "verified.jsonl"):
        config = TasksConfig(source="swe", path=str(path))
        (task,) = heldout_tasks(config, 500)
        assert isinstance(task.grading, RepositoryTests) and task.kind == "swe_bench"
        with pytest.raises(ConfigError, match="no task to train on"):
            build_source(config)


def test_terminal_tasks_of_each_format_are_validated_with_their_references(tmp_path):
    given = tmp_path / "in"
    shutil.copytree(SHIPPED / "terminal", given)
    (given / "unsolved").mkdir()
    for name in ("environment", "tests"):
        shutil.copytree(given / "count-words" / name, given / "unsolved" / name)
    for name in ("task.toml", "instruction.md"):
        shutil.copy(given / "count-words" / name, given / "unsolved" / name)
    (given / "unsolved" / "instruction.md").write_text("something else")
    (given / "no-tests").mkdir()
    (given / "no-tests" / "task.yaml").write_text("instruction: nothing to test\n")
    assert prepare("terminal", "--in", given, "--out", tmp_path / "out") == 0
    found = report(tmp_path / "out")
    assert found["stages"] == {"read": 8, "schema": 7, "benchmark": 7, "duplicate": 7, "run": 6, "train": 5, "dev": 1}
    assert "no reference" in found["left_out"]["unsolved"] and "tests/ is missing" in found["left_out"]["no-tests"]
    source = build_source(TasksConfig(source="terminal", path=str(tmp_path / "out")))
    kinds = {task.kind for task in [*source.take(5), *source.heldout(9)]}
    assert kinds == {"harbor", "seta", "terminal_bench_1"}
    assert prepare("terminal", "--in", given, "--out", tmp_path / "out") == 0, "what an earlier run made is replaced"


def test_parquet_without_its_package_is_refused_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install -e .\[parquet\]"):
        read_instances(tmp_path / "i.parquet")


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert prepare(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "\n  expected: " in said and "\n  remedy:   " in said
    return said


def swe_folder(folder: Path, *lines: str, name: str = "i.jsonl") -> Path:
    """Instances, and a folder of repositories that holds none of theirs."""
    (folder / "repos" / "other").mkdir(parents=True)
    (folder / name).write_text("\n".join(lines))
    return folder


def test_an_input_that_is_none_is_refused_by_what_was_seen(tmp_path, capsys):
    out = ("--out", tmp_path / "out")
    (tmp_path / "bare").mkdir()
    (tmp_path / "file").touch()
    instance = json.dumps(rows("train.jsonl")[0])
    for given, seen in (
        ("missing", "no such folder"),
        ("file", "a file"),
        ("bare", "it holds no folder repos"),
        (swe_folder(tmp_path / "a", name="i.txt"), "holds no file of instances"),
        (swe_folder(tmp_path / "b", "{}", "{"), "i.jsonl, line 2: "),
    ):
        assert seen in refused(capsys, "swe-smith", "--in", tmp_path / given, *out)
        assert not list((tmp_path / "out").glob("*")), "nothing was written"
    for given, seen in (
        (swe_folder(tmp_path / "c", ""), "none of the 0 tasks"),
        (swe_folder(tmp_path / "d", '{"instance_id": "x"}', "5"), "none of the 2 tasks"),
        (swe_folder(tmp_path / "e", instance), "run: the repository tiny__clocks is not in"),
    ):
        assert seen in refused(capsys, "swe-smith", "--in", tmp_path / given, *out)
        assert (tmp_path / "out" / "report.json").is_file()
    assert "it has no base_commit" in refused(capsys, "swe-bench", "--in", tmp_path / "e", *out)
    for name in ("seta", "terminal"):
        assert "task.toml" in refused(capsys, name, "--in", tmp_path / "e", *out)
        assert "no such folder" in refused(capsys, name, "--in", tmp_path / "missing", *out)


def test_an_option_or_an_output_that_cannot_work_is_refused_before_anything_is_read(tmp_path, capsys):
    given = swe_folder(tmp_path / "in", "{")  # reading it would be refused for another reason
    line = ("swe-smith", "--in", given, "--out", tmp_path / "out")
    for more, seen in (
        (("--parallel", 0), "--parallel 0"),
        (("--parallel", 5000), "1 to 454"),
        (("--budget", "nan"), "--budget nan"),
        (("--budget", -1), "--budget -1"),
        (("--exclude", tmp_path / "none"), "--exclude"),
    ):
        assert seen in refused(capsys, *line, *more)
    assert not (tmp_path / "out").exists()
    assert "lies in" in refused(capsys, *line[:-1], given / "repos" / "out")
    for name in ("report.json", "verdicts.jsonl", "train.jsonl"):
        (tmp_path / name / name).mkdir(parents=True)
        assert "Is a directory" in refused(capsys, *line[:-1], tmp_path / name)


def test_tasks_that_the_tool_did_not_write_are_never_replaced(tmp_path, capsys):
    task = SHIPPED / "terminal" / "count-words"
    shutil.copytree(task, tmp_path / "own" / "train" / "mine")
    shutil.copytree(task, tmp_path / "in" / "other")
    said = refused(capsys, "terminal", "--in", tmp_path / "in", "--out", tmp_path / "own")
    assert "tasks that this tool has not put there" in said
    said = refused(capsys, "terminal", "--in", tmp_path / "own" / "train", "--out", tmp_path / "own")
    assert "which is written anew" in said
    assert "lies in" in refused(capsys, "terminal", "--in", tmp_path / "in", "--out", tmp_path / "in" / "other" / "out")
    assert (tmp_path / "own" / "train" / "mine" / "task.toml").is_file()


def test_an_interrupted_preparation_says_so_and_goes_on_from_its_verdicts(smith, tmp_path, monkeypatch, capsys):
    tried = list[str]()

    async def interrupted(instance, *_):
        tried.append(instance.instance_id)
        if len(tried) == 2:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        return Verdict(fail_to_pass=("a",), pass_to_pass=("b",))

    line = ("swe-smith", "--in", smith, "--out", tmp_path, "--parallel", 1)
    monkeypatch.setattr(prepare_data, "validate_instance", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's &
    try:
        assert prepare(*line) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert str(tmp_path / "verdicts.jsonl") in capsys.readouterr().err
    assert len((tmp_path / "verdicts.jsonl").read_text().splitlines()) == 1
    assert prepare(*line) == 0 and tried.count(tried[0]) == 1, "its verdict is known"
    assert prepare(*line, "--budget", 30) == 0 and tried.count(tried[0]) == 2, "but not within another budget"
