"""Laws of tables: every peer's rows read unchanged, the split, what is refused by file and row, and saved positions."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.tasks import ListedSource, Message, SourceState, Task, build_source, fitting

PEERS = Path(__file__).parent / "peer_formats"


def config(path: Path | str, **changes: object) -> TasksConfig:
    return TasksConfig(**{"source": "table", "path": str(path), "heldout": 0, **changes})


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def in_order(source: ListedSource) -> list[Task]:
    return source.parts[0]


@pytest.mark.parametrize("name", ["slime", "verl", "trl"])
def test_rows_of_each_peer_are_read_unchanged(name: str, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (PEERS / f"{name}.jsonl").read_text().splitlines()]
    parquet = tmp_path / f"{name}.parquet"
    if name != "slime":  # its prompts are of two types, which Parquet has no column for
        pa.parquet.write_table(pa.Table.from_pylist(lines), parquet)
    for path in filter(Path.exists, (PEERS / f"{name}.jsonl", parquet)):
        tasks = in_order(build_source(config(path)))
        assert [task.messages[-1] for task in tasks] == [
            Message("user", "What is 2 + 3?"),
            Message("user", "What is 7 + 4?"),
        ]
        assert [task.row for task in tasks] == lines
        assert all(task.single_turn for task in tasks)
    assert tasks[0].kind == ("openai/gsm8k" if name == "verl" else name)


def test_columns_are_renamed_and_a_system_message_is_added(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", [{"question": "q", "gold": "1"}, {"question": "r", "gold": "2", "system": "own"}])
    settings = config(path, columns={"prompt": "question", "label": "gold"}, system="Be brief.")
    first, second = in_order(build_source(settings))
    assert first.messages == (Message("system", "Be brief."), Message("user", "q"))
    assert second.messages[0] == Message("system", "own")
    assert first.row["label"] == first.row["gold"] == "1"


def test_held_out_rows_come_by_column_by_file_or_by_content(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "split": "test" if i % 3 == 0 else "train"} for i in range(30)]
    path = write(tmp_path / "a.jsonl", *rows)
    by_column = build_source(config(path, heldout=64))
    assert [t.prompt for t in by_column.heldout(64)] == [str(i) for i in range(0, 30, 3)]
    other = write(tmp_path / "b.jsonl", {"prompt": "new"})
    plain = write(tmp_path / "c.jsonl", *({"prompt": str(i)} for i in range(200)))
    by_file = build_source(config(plain, heldout=64, heldout_path=str(other)))
    assert [t.prompt for t in by_file.heldout(64)] == ["new"] and len(in_order(by_file)) == 200
    by_content = build_source(config(plain, heldout=64))
    train, heldout = by_content.parts
    assert 10 < len(heldout) < 45 and len(train) + len(heldout) == 200
    assert not {t.prompt for t in train} & {t.prompt for t in heldout}
    assert len(in_order(build_source(config(plain)))) == 200, "nothing is held out where nobody asks for it"


REFUSED = {
    "no prompt": ({"question": "q"}, {}, r'row 0 has no prompt.*\n.*\n.*prompt = "question"'),
    "no table": ([1], {}, r"row 0 is \[1\]"),
    "mapped column": ({"prompt": "q"}, {"columns": {"label": "gold"}}, r"row 0 has no column 'gold'"),
    "mapped name": ({"prompt": "q"}, {"columns": {"promt": "prompt"}}, r"did you mean 'prompt'"),
    "image": ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {}, r"row 0, prompt\[0\]"),
    "answered": ({"prompt": [{"role": "assistant", "content": "a"}]}, {}, r"row 0, prompt: the last message"),
    "number": ({"prompt": 5}, {}, r"row 0, prompt is 5"),
    "surrogate": ('{"prompt": "a\\ud800b"}', {}, r"a.jsonl, row 0: 'a\\ud800b' is no Unicode"),
    "broken line": ('{"prompt": ', {}, r"line 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_by_file_and_row(case: str, tmp_path: Path) -> None:
    row, changes, words = REFUSED[case]
    path = write(tmp_path / "a.jsonl", row)
    with pytest.raises(ConfigError, match=words) as refusal:
        build_source(config(path, **changes))
    assert "tasks.columns" in str(refusal.value) or str(path) in str(refusal.value)


def test_missing_files_are_refused_with_the_closest_name(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", {"prompt": "q"})
    with pytest.raises(ConfigError, match="did you mean 'train.jsonl'"):
        build_source(config(tmp_path / "tran.jsonl"))
    with pytest.raises(ConfigError, match=r"datasets|Hub"):
        build_source(config("nobody-has/this-data-set"))


class Words:
    """A chat format in which a word is a token."""

    def opening_ids(self, messages: tuple[Message, ...]) -> list[int]:
        return [0 for m in messages for _ in m.content.split()]


def test_prompts_that_leave_no_room_are_left_out_and_counted_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "a b"}, {"prompt": "w " * 9}, {"prompt": "w " * 8})
    settings = config(path)
    left = fitting(build_source(settings), settings, Words(), 9)
    assert [t.id for t in left.parts[0]] == ["a-0", "a-2"]
    assert "1 of 3 prompts have 9 tokens or more: a-1 (9)" in caplog.text
    with pytest.raises(ConfigError, match="1 of 3 prompts"):
        fitting(build_source(settings), dataclasses.replace(settings, overlong_prompts="refuse"), Words(), 9)
    with pytest.raises(ConfigError, match="3 of 3 prompts"):
        fitting(build_source(settings), settings, Words(), 1)


def test_saved_position_in_other_tasks_is_refused_with_both_counts(tmp_path: Path) -> None:
    rows = [{"prompt": str(i)} for i in range(36)]
    settings = config(write(tmp_path / "a.jsonl", *rows))
    source = build_source(settings)
    source.take(16)
    state = source.state()
    again = build_source(settings)
    again.restore(state)
    assert again.take(20) == source.take(20)
    write(tmp_path / "a.jsonl", *rows[:5])
    with pytest.raises(ConfigError, match="holds 5 tasks .* after 16 of 36"):
        build_source(settings).restore(state)
    write(tmp_path / "a.jsonl", *rows, *rows[:4])
    with pytest.raises(ConfigError, match="holds 40 tasks"):
        build_source(settings).restore(state)
    goes_on = build_source(dataclasses.replace(settings, on_change="next_epoch"))
    goes_on.restore(state)
    assert (goes_on.state().epoch, goes_on.state().cursor) == (1, 0)
    assert len({t.id for t in goes_on.take(40)}) == 40
    short = build_source(config(write(tmp_path / "b.jsonl", *rows[:5])))
    with pytest.raises(ConfigError, match="after 16 of"):
        short.restore(SourceState(cursor=16))  # of a checkpoint that has no digest


MORE = """
NUMBER = 5
def late():
    yield {"prompt": "a"}
    raise KeyError("late")
def ends():
    raise SystemExit(0)
def surrogate():
    return [{"prompt": "a\\ud800"}]
"""


def test_own_source_gives_rows_or_tasks(tmp_path: Path) -> None:
    code = "def load(path, count='3'):\n    return [{'prompt': f'{path} {i}'} for i in range(int(count))]\n"
    (tmp_path / "mine.py").write_text(code + "def fails():\n    return 1 / 0\ndef wrong():\n    return 5\n" + MORE)
    named = f"{tmp_path}/mine.py:load"
    tasks = in_order(build_source(TasksConfig(source=named, path="/p", heldout=0, options={"count": "2"})))
    assert [t.prompt for t in tasks] == ["/p 0", "/p 1"]
    for name, options, words in (
        ("lod", {}, "did you mean 'load'"),
        ("load", {"n": "2"}, "remove tasks.options.n"),
        ("fails", {}, "ZeroDivisionError"),
        ("wrong", {}, "gave int"),
        ("late", {}, "KeyError: 'late'"),
        ("ends", {}, "SystemExit"),
        ("surrogate", {}, "row 0: .* is no Unicode text"),
        ("NUMBER", {}, "is 5"),
    ):
        with pytest.raises(ConfigError, match=words):
            build_source(TasksConfig(source=f"{tmp_path}/mine.py:{name}", options=options))
    with pytest.raises(ConfigError, match="did you mean 'table'"):
        build_source(TasksConfig(source="tabel"))


def test_integers_of_any_size_and_ids_from_0_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 10**40, "id": 0}, {"prompt": "b", "answer": 1, "id": 1}]
    source = build_source(config(write(tmp_path / "a.jsonl", *rows)))
    assert {task.id for task in in_order(source)} == {"0", "1"}
    others = build_source(config(write(tmp_path / "b.jsonl", rows[0] | {"answer": 10**40 + 1}, rows[1])))
    assert source.state().digest != others.state().digest
    (tmp_path / "c.jsonl").write_text('{"prompt": "a", "answer": ' + "9" * 5000 + "}\n")
    with pytest.raises(ConfigError, match="line 1: .*4300 digits"):
        build_source(config(tmp_path / "c.jsonl"))
