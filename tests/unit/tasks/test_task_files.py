"""Patches, protected files, boxed answers, and task folders that cannot be used."""

from __future__ import annotations

import difflib
import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import convert

from examples.policies.build.repairs import line_edit
from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError, UserError
from megathunder.tasks import build_source, heldout_tasks
from megathunder.tasks.boxed import boxed_reward, last_boxed
from megathunder.tasks.patch import apply_patch, make_patch
from megathunder.tasks.protected_paths import is_protected
from megathunder.tasks.row_files import raw_rows
from megathunder.tasks.swe import Instance, by_repository, instance_files, mended, read_instances, to_task
from megathunder.tasks.terminal import read_folder, read_weights

LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "  c\n", "d\x0c\u2028e\n", "f\r\n", "\r\n"]), max_size=12)
TEXT = st.tuples(LINES, st.sampled_from(["", "end", "\\ no"])).map(lambda pair: "".join(pair[0]) + pair[1])


@given(LINES, LINES)
def test_a_diff_leads_from_one_text_to_the_other(before, after):
    diff = "".join(difflib.unified_diff(before, after, "a/f", "b/f"))
    assert apply_patch({"f": "".join(before)}, diff) == {"f": "".join(after)}


@given(TEXT, TEXT)
def test_a_patch_that_is_made_applies_whatever_ends_the_lines_and_the_text(before, after):
    assert apply_patch({"f": before}, make_patch("f", before, after)) == {"f": after}


@pytest.mark.parametrize("hunk", ["\\ No newline at end of file\n", "x\n", "-x\nx\n"])
def test_what_is_no_line_of_a_hunk_is_refused(hunk):
    with pytest.raises(UserError, match="is no line of a hunk"):
        apply_patch({"n": "x\n"}, f"--- a/n\n+++ b/n\n@@ -1 +1 @@\n{hunk}")


def test_files_come_and_go_and_a_hunk_that_does_not_fit_is_refused():
    new = "--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+x\n"
    assert apply_patch({}, new) == {"n": "x\n"}
    assert apply_patch({"n": "x\n"}, "--- a/n\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n") == {}
    with pytest.raises(UserError, match="does not fit"):
        apply_patch({"n": "y\n"}, "--- a/n\n+++ b/n\n@@ -1 +1 @@\n-x\n+z\n")


@pytest.mark.parametrize(
    ("path", "protected"),
    [("a.py", False), ("src/a/b.py", False), ("docs/latest.md", False), ("attest.py", False)]
    + [(p, True) for p in ("conftest.py", "a/conftest.py", "tests/x.py", "a/test_b.py", "b_test.py", "pytest.py")]
    + [(p, True) for p in ("_pytest/runner.py", "setup.cfg", "a.pth", "sitecustomize.py", ".git/config")],
)
def test_what_decides_tests_is_not_taken_from_an_agent(path, protected):
    assert is_protected(path) is protected


@pytest.mark.parametrize(
    ("text", "right", "reward"),
    [(r"\boxed{43}", "43", 1.0), (r"so \boxed{1} or \boxed{\frac{1}{2}}", "0.5", 1.0), ("43", "43", 0.0)]
    + [(r"\boxed{44}", "43", 0.0), (r"\boxed{43", "43", 0.0), (r"\boxed{}", "43", 0.0)],
)
def test_the_last_box_counts(text, right, reward):
    assert boxed_reward(text, right) == reward


@pytest.mark.parametrize(
    ("text", "reward"),
    [("17 + 6 = 23", 1.0), ("23, or 24", 0.0), (r"23 \\boxed{24}", 0.0), (r"\\boxed{23} of 99", 1.0), ("-23", 0.0)]
    + [("it is 23.", 1.0), ("23.0", 1.0), ("23.5", 0.0), ("none", 0.0), ("17+6=23", 1.0), ("", 0.0)],
)
def test_the_last_number_may_stand_for_a_box(text, reward):
    assert boxed_reward(text, "23", or_last_number=True) == reward
    assert boxed_reward("23", "23") == 0.0


def test_braces_nest():
    assert last_boxed(r"\boxed{a_{1}}") == "a_{1}"


def test_whole_repositories_are_held_out(tmp_path):
    rows = [
        {"instance_id": f"{r}.{i}", "repo": f"x/{r}", "patch": "", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": "[]"}
        | {"problem_statement": ""}
        for r in "abcdef"
        for i in range(3)
    ]
    (tmp_path / "i.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train, dev = by_repository(read_instances(tmp_path / "i.jsonl"))
    assert len(train) == 15 and len(dev) == 3 and not {i.repo for i in train} & {i.repo for i in dev}
    assert dev[0].fail_to_pass == ("t",) and dev[0].pass_to_pass == ()


def test_an_instance_without_a_field_is_named(tmp_path):
    (tmp_path / "i.json").write_text('[{"instance_id": "x"}]')
    with pytest.raises(ConfigError, match="instance 0: .*repo"):
        read_instances(tmp_path / "i.json")


INSTANCE = {
    "instance_id": "x",
    "repo": "a/b",
    "patch": "",
    "FAIL_TO_PASS": [],
    "PASS_TO_PASS": [],
    "problem_statement": "",
}


@pytest.mark.parametrize(
    ("field", "value", "seen"),
    [("FAIL_TO_PASS", "[", "no list of test names"), ("PASS_TO_PASS", "5", "no list of test names")]
    + [("repo", "a/", "names no repository"), ("repo", "a/..", "names no repository")]
    + [("base_commit", "--output=/x", "no commit")],
)
def test_a_field_that_means_nothing_is_named(tmp_path, field, value, seen):
    (tmp_path / "i.json").write_text(json.dumps([INSTANCE, INSTANCE | {field: value}]))
    with pytest.raises(ConfigError, match=f"instance 1: .*{seen}"):
        read_instances(tmp_path / "i.json")


def test_a_commit_that_a_clone_does_not_hold_is_named_with_what_git_says(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path / "repos" / "a__b"], check=True)
    instance = convert(INSTANCE | {"base_commit": "0" * 40}, Instance)
    with pytest.raises(ConfigError, match=f"a__b at commit {'0' * 40}: fatal"):
        to_task(instance, tmp_path, 1)


@pytest.mark.parametrize(
    ("name", "content", "seen"),
    [("i.jsonl", b"{}\n\n{,}\n", "i.jsonl, line 3: .*column 2"), ("i.json", b"[\n{,}]", "line 2, column 2")]
    + [("i.jsonl", b"\xff", "utf-8"), ("i.parquet", b"garbage", "Parquet"), ("i.json", b"", "column 1")],
)
def test_a_file_that_cannot_be_read_is_named_with_the_line(tmp_path, name, content, seen):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=seen):
        raw_rows(tmp_path / name)


def test_other_ends_of_lines_stand_inside_a_text(tmp_path):
    (tmp_path / "i.jsonl").write_text('{"a": "x\u2028y"}\n', encoding="utf-8")
    assert raw_rows(tmp_path / "i.jsonl") == [{"a": "x\u2028y"}]


def test_what_a_preparation_leaves_beside_its_tasks_is_no_file_of_instances(tmp_path):
    for name in ("a.jsonl", "report.json", "verdicts.jsonl"):
        (tmp_path / name).touch()
    assert [path.name for path in instance_files(tmp_path)] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("copied", "paths"),
    [
        ("x /app/", ["app/x"]),
        ("/x /app/", ["app/x"]),
        ("/etc/hostname /app/", []),
        ("/ /app", ["app/Dockerfile", "app/x"]),
    ]
    + [(copied, None) for copied in ("../secret /app/", "a/../../secret /app/", '"x /app/', "x", "", "**x /app/")],
)
def test_a_dockerfile_copies_what_lies_beside_it_and_nothing_else(tmp_path, copied, paths):
    folder = terminal_folder(tmp_path / "task", "task.toml", "")
    (tmp_path / "secret").write_text("s")
    (folder / "environment").mkdir()
    (folder / "environment" / "x").write_text("1")
    (folder / "environment" / "Dockerfile").write_text(f"FROM x\nCOPY {copied}\n")
    if paths is None:
        with pytest.raises(UserError, match="its Dockerfile copies"):
            read_folder(folder, 3)
    else:
        assert [file.path for file in read_folder(folder, 3).files] == paths, "as for a daemon, / is that folder"


@pytest.mark.parametrize("name", ["instruction.md", "task.toml", "environment/Dockerfile", "tests/x"])
def test_a_file_that_is_no_text_is_named(tmp_path, name):
    folder = terminal_folder(tmp_path / "task", "task.toml", "")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        read_folder(folder, 3)


@pytest.mark.parametrize("text", ['environment = "x"', "[environment]\ndocker_image = 5"])
def test_an_environment_that_names_no_image_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="environment is"):
        read_folder(terminal_folder(tmp_path / "task", "task.toml", text), 3)


def test_a_container_that_must_be_built_is_refused_by_name(tmp_path):
    (tmp_path / "environment").mkdir()
    (tmp_path / "task.toml").write_text("")
    (tmp_path / "instruction.md").write_text("do it")
    (tmp_path / "environment" / "Dockerfile").write_text("FROM x\nRUN apt-get update && make -C /src install\n")
    with pytest.raises(UserError, match="make -C /src install"):
        read_folder(tmp_path, 3)


@pytest.mark.parametrize(
    ("name", "text", "seen"),
    [("task.toml", "a = [", "task.toml cannot be read"), ("task.yaml", "a: [", "task.yaml cannot be read")]
    + [("task.yaml", "- a", "holds no table"), ("task.yaml", "x: 1", "instruction is empty")]
    + [("task.toml", "", "instruction.md is missing")],
)
def test_a_task_whose_description_is_broken_is_named(tmp_path, name, text, seen):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=seen):
        read_folder(tmp_path, 3)


def terminal_folder(folder, name, text):
    """A task folder whose settings are `text` in a file `name`."""
    (folder / "tests").mkdir(parents=True)
    (folder / "tests" / "test_x.py").write_text("def test_x(): pass\n")
    (folder / "instruction.md").write_text("do it")
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "limits"),
    [
        ("task.toml", "[agent]\ntimeout_sec = 30\n[verifier]\ntimeout_sec = 5.5\n", (30.0, 5.5)),
        ("task.toml", "", (0, 0)),
    ]
    + [("task.yaml", "instruction: x\nmax_agent_timeout_sec: 40.0\nmax_test_timeout_sec: 9\n", (40.0, 9.0))],
)
def test_a_task_brings_its_time_limits_and_the_shorter_of_its_own_and_the_runs_holds(tmp_path, name, text, limits):
    task = read_folder(terminal_folder(tmp_path, name, text), 3)
    assert (task.agent_limit_s, task.verifier_limit_s) == limits
    agent_s, verifier_s = limits
    assert (task.attempt_s(1.0), task.grading_s(2.0)) == (1.0, 2.0)
    assert (task.attempt_s(1000.0), task.grading_s(999.0)) == (agent_s or 1000.0, verifier_s or 999.0)


@pytest.mark.parametrize("value", ["-1", "inf", "nan", '"soon"', "true"])
def test_a_time_limit_that_is_no_time_is_refused(tmp_path, value):
    folder = terminal_folder(tmp_path, "task.toml", f"[agent]\ntimeout_sec = {value}\n")
    with pytest.raises(UserError, match="agent.timeout_sec is"):
        read_folder(folder, 3)


def test_files_of_a_repository_that_can_be_executed_stay_so(tmp_path):
    repo = tmp_path / "repos" / "tools"
    (repo / "tests").mkdir(parents=True)
    files = {"run.sh": 0o755, "plain.py": 0o644, "tests/drive.sh": 0o755, "tests/test_a.py": 0o600}
    for name, mode in files.items():
        (repo / name).write_text("x\n")
        (repo / name).chmod(mode)
    wanted = {name: 0o755 if mode & 0o111 else 0o644 for name, mode in files.items()}
    row = {"instance_id": "i", "repo": "a/tools", "patch": "--- a/run.sh\n+++ b/run.sh\n@@ -1 +1 @@\n-x\n+y\n"}
    row |= {"FAIL_TO_PASS": ["t"], "PASS_TO_PASS": [], "problem_statement": "p"}
    smith = convert(row, Instance)
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@example.invalid"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    (repo.parent / "a__tools").symlink_to(repo)
    bench = convert(row | {"base_commit": commit}, Instance)
    for instance in (smith, bench):
        task = to_task(instance, tmp_path, 3)
        assert {f.path: f.mode for f in task.files} == wanted
        assert {f.path: f.mode for f in task.grading.files} == {n: m for n, m in wanted.items() if "/" in n}
        assert {f.path: f.mode for f in mended(instance, tmp_path)} == wanted


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("    if a != 1:", "    if a == 1:"),
        ("  x = [a / b, a // b]", "  x = [a / b, a % b]"),
        ("    b = 1", "    b = 2"),
    ]
    + [
        ("    if a in b:", "    if a not in b:"),
        ("    if not (a or b):", "    if not a:"),
        ("min(a, min(b))", "min(a, max(b))"),
    ]
    + [("  return f'{n}s' if n else f'{n}'", '  return f"{n}" if n else f"{n}s"'), ("a[1]*.", "a[0]*.")],
)
def test_an_edit_makes_the_line_what_it_should_be(tmp_path, wrong, right):
    (tmp_path / "f").write_text(f"first\n{wrong}\nlast\n")
    subprocess.run(["bash", "-c", f"sed -i '2{line_edit(wrong, right)}' f"], cwd=tmp_path, check=True)
    assert (tmp_path / "f").read_text().replace("'", '"') == f"first\n{right}\nlast\n"


@pytest.mark.parametrize("weights", [{}, {"a": 0.5}, {"a": 1.5, "b": -0.5}])
def test_weights_must_add_up_to_one(tmp_path, weights):
    (tmp_path / "weights.json").write_text(json.dumps(weights))
    with pytest.raises(UserError, match="add up to 1"):
        read_weights(tmp_path / "weights.json")


def test_arithmetic_tasks_are_distinct_and_held_out_ones_are_others():
    source = build_source(TasksConfig(source="math", size=200))
    train, heldout = source.take(200), source.heldout(50)
    assert len({t.prompt for t in train}) == 200 and not {t.prompt for t in train} & {t.prompt for t in heldout}


def test_problems_of_a_file_are_split_by_content(tmp_path):
    rows = [{"problem": f"What is {i} / 2?", "answer": f"\\frac{{{i}}}{{2}}", "level": 1} for i in range(200)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, [*rows, rows[3]])))
    (tmp_path / "q.json").write_text(json.dumps(rows[::-1]))
    sides = []
    for name in ("p.jsonl", "q.json"):
        config = TasksConfig(source="math", path=str(tmp_path / name))
        source, heldout = build_source(config), heldout_tasks(config, 500)
        train = {t.prompt for t in source.take(200 - len(heldout))}
        assert len(train) == 200 - len(heldout) and 10 < len(heldout) < 40
        assert not train & {t.prompt for t in heldout} and source.heldout(500) == heldout
        sides.append(train)
    assert sides[0] == sides[1]
    (tmp_path / "p.jsonl").write_text('{"problem": "x"}')
    with pytest.raises(ConfigError, match="row 0: .*answer"):
        build_source(TasksConfig(source="math", path=str(tmp_path / "p.jsonl")))
    (tmp_path / "p.jsonl").write_text("{")
    with pytest.raises(ConfigError, match="JSONL"):
        build_source(TasksConfig(source="math", path=str(tmp_path / "p.jsonl")))


def test_what_a_task_asks_for_is_honoured_or_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = (
        '[environment]\nworkdir = "/data"\nmemory = "2G"\ncpus = 2\ngpus = 0\nallow_internet = true\n'
        '[verifier.env]\nMODE = "a b"\n[agent]\nuser = "x"\n[metadata]\ndifficulty = "easy"\n'
    )
    task = read_folder(terminal_folder(tmp_path / "asks", "task.toml", text), 3)
    assert task.folder == "/data" and task.grading.folder == "data"
    assert task.grading.command == "env MODE='a b' bash /tests/test.sh"
    said = "agent.user, environment.allow_internet, environment.cpus, environment.gpus, environment.memory"
    assert f"{said} not honoured" in caplog.text
    read_folder(terminal_folder(tmp_path / "again", "task.toml", text), 3)
    assert caplog.text.count("not honoured") == 1


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("environment", "memory = -3"),
        ("environment", 'memory = "much"'),
        ("environment", "cpus = true"),
        ("environment", "gpus = -1"),
        ("environment", 'allow_internet = "yes"'),
        ("environment", "workdir = 5"),
        ("environment", 'workdir = "/etc"'),
        ("verifier.env", "MODE = 5"),
        ("verifier.env", 'MODE = "${SECRET}"'),
    ],
)
def test_nonsense_in_task_toml_is_refused(tmp_path: Path, section: str, line: str) -> None:
    with pytest.raises(UserError, match=line.split(" = ")[0] if "etc" not in line else "/etc"):
        read_folder(terminal_folder(tmp_path / "task", "task.toml", f"[{section}]\n{line}\n"), 3)
