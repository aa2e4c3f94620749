"""Tasks from the rows of a table: what the policy is asked is a column, and all columns are the row that a reward sees.

    {"prompt": "What is 2 + 3?", "answer": "5"}                                        text
    {"prompt": [{"role": "user", "content": "..."}], "label": "5", "metadata": {...}}  slime
    {"prompt": [...], "data_source": "gsm8k", "reward_model": {"ground_truth": "5"}, "extra_info": {...}}  verl
    {"messages": [...], "solution": "5"}                                               TRL

`tasks.columns` renames: {"prompt": "question", "label": "answer"}. The row has both names.
Held out are the rows of `tasks.heldout_path` or `tasks.heldout_split`, else those whose column `split` is not "train",
else one in eight by a digest of the prompt. Called by tasks.source. Raises ConfigError naming file, row and column.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megathunder.config.hub import is_hub_id
from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.tasks.datasets import dataset_rows, is_saved_dataset
from megathunder.tasks.row_files import raw_rows
from megathunder.tasks.task import Message, RewardFunction, Task

PROMPTS = ("prompt", "messages")  # columns that are taken for the prompt, in this order
COLUMNS = ("prompt", "system", "id", "kind", "label", "split")  # that [tasks.columns] may rename
LIKELY = ("question", "problem", "input", "instruction", "query", "text")
TRAIN = "train"
FILES = (".json", ".jsonl", ".parquet")


def read_table(config: TasksConfig) -> tuple[list[Task], list[Task]]:
    """(train, held-out) tasks of `config.path`."""
    check_columns(config)
    tasks = table_tasks(table_rows(config.path, config.split), config, config.path)
    if config.heldout_path or config.heldout_split:
        path, split = config.heldout_path or config.path, config.heldout_split or config.split
        return tasks, table_tasks(table_rows(path, split), config, path, prefix="heldout")
    named = config.columns.get("split", "split")
    if any(named in task.row for task in tasks):
        sides = [str(task.row.get(named, TRAIN)) == TRAIN for task in tasks]
        return [t for t, side in zip(tasks, sides, strict=True) if side], [
            t for t, side in zip(tasks, sides, strict=True) if not side
        ]
    return tasks, []


def table_rows(path: str, split: str) -> list[object]:
    """The rows of a file, a saved data set or a Hub id."""
    place = Path(path)
    if place.is_file():
        if place.suffix not in FILES:
            raise ConfigError(
                f"tasks.path = {path!r} ends in {place.suffix or 'no suffix'}",
                expected=f"a file that ends in {', '.join(FILES)}, a folder saved by datasets, or a Hub id",
                remedy="rename or convert the file",
            )
        return raw_rows(place)
    if is_saved_dataset(place) or (not place.exists() and is_hub_id(path) and not place.suffix):
        return [*dataset_rows(path, split)]
    near = difflib.get_close_matches(place.name, [p.name for p in place.parent.glob("*")], 1) if path else []
    raise ConfigError(
        f"tasks.source = 'table' with tasks.path = {path!r}, which does not exist",
        expected="a JSON, JSONL or Parquet file, a folder saved by datasets, or a Hub id (owner/name)",
        remedy=f"did you mean {near[0]!r}?" if near else "correct tasks.path; a relative path is relative to the TOML",
    )


def check_columns(config: TasksConfig) -> None:
    """Raise ConfigError for a name in [tasks.columns] that is none of ours."""
    for name in config.columns:
        if name not in COLUMNS:
            near = difflib.get_close_matches(name, COLUMNS, 1)
            raise ConfigError(
                f"[tasks.columns] {name} = {config.columns[name]!r}",
                expected=f"one of {', '.join(COLUMNS)} on the left, a column of the table on the right",
                remedy=f"did you mean {near[0]!r}?" if near else "other columns need no name: the reward sees them all",
            )


def table_tasks(rows: Iterable[object], config: TasksConfig, origin: str, prefix: str = "") -> list[Task]:
    """A task per row. `origin` names the table in errors; ids are the column `id` where no two rows share one, else
    origin's name and the number of the row."""
    stem = "-".join(filter(None, (Path(origin).stem, prefix)))
    tasks = [_task(row, number, config, f"{origin}, row {number}", stem) for number, row in enumerate(rows)]
    ids = ["" if (given := task.row.get("id")) is None else str(given) for task in tasks]
    if all(ids) and len(set(ids)) == len(ids):
        return [msgspec.structs.replace(task, id=name) for task, name in zip(tasks, ids, strict=True)]
    return tasks


def _task(row: object, number: int, config: TasksConfig, where: str, stem: str) -> Task:
    if not isinstance(row, dict) or not all(isinstance(key, str) for key in row):
        raise ConfigError(
            f"{where} is {row!r:.80}",
            expected='a table of columns, {"prompt": "...", ...}',
            remedy="write one object per row",
        )
    missing = [theirs for theirs in config.columns.values() if theirs not in row]
    if missing:
        raise ConfigError(
            f"{where} has no column {missing[0]!r}, which [tasks.columns] names",
            expected=f"one of its columns: {', '.join(row) or 'none'}",
            remedy="correct [tasks.columns]",
        )
    known = row | {ours: row[theirs] for ours, theirs in config.columns.items()}
    messages = _messages(known, config, where)
    kind = known.get("kind") or known.get("data_source") or stem
    return Task(
        id=f"{stem}-{number}",
        kind=str(kind),
        prompt="\n\n".join(m.content for m in messages if m.role != "system"),
        files=(),
        grading=RewardFunction(),
        max_turns=config.max_turns,
        messages=tuple(messages),
        row=known,
        single_turn=not config.environment,
    )


def _messages(row: dict[str, object], config: TasksConfig, where: str) -> list[Message]:
    """The conversation before the first turn. With an environment it may be empty: `reset` says how it begins."""
    column = next((name for name in PROMPTS if row.get(name) not in (None, "", [])), "")
    if not column and not config.environment:
        likely = [name for name in LIKELY if name in row]
        raise ConfigError(
            f"{where} has no prompt; its columns are {', '.join(row) or 'none'}",
            expected="a column prompt (text, or a list of messages) or messages",
            remedy=f'[tasks.columns] prompt = "{likely[0] if likely else "the column with the prompt"}"',
        )
    prompt = row.get(column)
    if isinstance(prompt, str):
        messages = [Message("user", prompt)]
    else:
        messages = [_message(one, f"{where}, {column}[{i}]") for i, one in enumerate(_listed(prompt, where, column))]
    if messages and messages[-1].role == "assistant":
        raise ConfigError(
            f"{where}, {column}: the last message is the assistant's",
            expected="a conversation that the policy can answer",
            remedy="leave the answer out of the prompt and put it into a column of its own",
        )
    system = row.get("system") or config.system
    if system and not any(message.role == "system" for message in messages):
        messages.insert(0, Message("system", str(system)))
    return messages


def _listed(prompt: object, where: str, column: str) -> list[object]:
    if prompt is None or isinstance(prompt, list | tuple):
        return list(prompt or ())
    raise ConfigError(
        f"{where}, {column} is {prompt!r:.60}",
        expected="text, or a list of messages",
        remedy="write the prompt as text",
    )


def _message(given: object, where: str) -> Message:
    content = given.get("content") if isinstance(given, dict) else None
    if isinstance(content, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(given, dict) or not isinstance(given.get("role"), str) or not isinstance(content, str):
        raise ConfigError(
            f"{where} is {given!r:.80}",
            expected='{"role": "user", "content": "..."}, the content text (images are not supported)',
            remedy="correct the message, or leave the row out",
        )
    return Message(given["role"], content)
