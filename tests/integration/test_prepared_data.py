"""tools/prepare_data.py on a task of every format: what is sound is kept and can be read back, the rest is named."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.tasks import RepositoryTests, build_source, heldout_tasks
from megathunder.tasks.swe import read_instances

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "examples" / "tasks"


def prepare(*arguments: object) -> int:
    spec = importlib.util.spec_from_file_location("prepare_data_tool", ROOT / "tools" / "prepare_data.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.main([str(argument) for argument in arguments])


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


def test_parquet_without_its_package_is_refused_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ConfigError, match=r"pip install -e .\[parquet\]"):
        read_instances(tmp_path / "i.parquet")
