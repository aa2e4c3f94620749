"""The shape of the tree, as laws: who may import whom, how long things are, what must not be in them.

    tasks -> sandbox -> environments -> rewards -> speculation -> rollout -> objectives -> schedule -> learner
          -> publish -> planning -> metrics | checkpoint -> simulator -> report -> evaluation

A room imports rooms left of it and the shared files; `loop.py`, `launch.py` and `coordinator/` see all. Each law is
a function from source files to offenders, so that it is also tested on sources that break it. A failing law lists every
offender.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS: tuple[tuple[str, ...], ...] = (
    ("tasks",),
    ("sandbox",),
    ("environments",),
    ("rewards",),
    ("speculation",),
    ("rollout",),
    ("objectives",),
    ("schedule",),
    ("learner",),
    ("publish",),
    ("planning",),
    ("metrics", "checkpoint"),
    ("simulator",),
    ("report",),
    ("evaluation",),
)
RANK = {room: rank for rank, rooms in enumerate(ROOMS) for room in rooms}
SHARED = {
    "hardware",
    "types",
    "accumulator_keys",
    "work_stats",
    "errors",
    "process_exit",
    "tracing",
    "jsonl",
    "logs",
    "registry",
    "processes",
    "cores",
    "background",
    "identity",
    "rendezvous",
    "user_code",
    "config",
}
COMPOSERS = {"loop", "launch", "coordinator", "cli"}
TORCH_FREE = SHARED - {"jsonl", "rendezvous"} | {"schedule", "simulator", "objectives"}
TORCH_ALLOWED_FILES = {"tests/oracles/objective_losses.py"}
MEGATRON_ROOMS = {"learner", "publish"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_COLUMNS = 400, 80, 120
MIN_ANNOTATED = 0.95
DATA = ROOT / "examples" / "tasks"  # what agents work on
THIS_FILE = "tests/test_architecture.py"
FORBIDDEN = re.compile(
    r"/work/(?:main|wt|scratch|shared)|/root/|/home/\w+/|\bscratch/|\blab/|\bfacts/|\b[Ii]ssues? [A-F]\b"
)
BANNED_NAMES = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}


class Source(NamedTuple):
    """A file: `path` is relative to the root, with forward slashes."""

    path: str
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def room(self) -> str:
        """`megathunder/learner/model/build_model.py` -> learner, `megathunder/types.py` -> types, elsewhere ->
        empty."""
        parts = self.path.removesuffix(".py").split("/")
        return parts[1] if parts[0] == "megathunder" and len(parts) > 1 else ""


def read_tree(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Source]:
    found = (p for folder in folders for p in sorted((ROOT / folder).rglob("*")))
    paths = (p for p in found if p.suffix in suffixes and p.is_file())
    code = (p for p in paths if "__pycache__" not in p.parts and DATA not in p.parents)
    return [Source(p.relative_to(ROOT).as_posix(), p.read_text()) for p in code]


def imports_of(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every absolute import, wherever it stands; relative ones are resolved."""
    package = source.path.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def functions_of(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(source.tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


# ---------------------------------------------------------------------------------------------- the laws


def wrong_imports(source: Source) -> Iterator[str]:
    room = source.room
    if not room or room == "__init__" or room in COMPOSERS:
        return
    if room not in RANK and room not in SHARED:
        yield f"{source.path}: no such room; known: {', '.join(RANK)} and {', '.join(sorted(SHARED | COMPOSERS))}"
        return
    for line, name in imports_of(source):
        parts = name.split(".")
        target = parts[1] if parts[0] == "megathunder" and len(parts) > 1 else room
        legal = target in SHARED if room in SHARED else target in SHARED or RANK.get(target, 99) < RANK[room]
        if target != room and not legal:
            yield f"{source.path}:{line}: {room} imports {name}, which is not left of it"


def torch_where_none_may_be(source: Source) -> Iterator[str]:
    if source.room in TORCH_FREE:
        found = ((line, n) for line, n in imports_of(source) if n.split(".")[0] == "torch")
        yield from (f"{source.path}:{line}: imports {n}" for line, n in found)


def megatron_outside_the_learner(source: Source) -> Iterator[str]:
    if source.room and source.room not in MEGATRON_ROOMS:
        found = ((line, n) for line, n in imports_of(source) if n.split(".")[0] == "megatron")
        yield from (f"{source.path}:{line}: imports {n}; only {sorted(MEGATRON_ROOMS)} may" for line, n in found)


def too_long(source: Source) -> Iterator[str]:
    lines = source.text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield f"{source.path}: {len(lines)} lines, at most {MAX_FILE_LINES}"
    for node in functions_of(source):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            yield f"{source.path}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"


def too_wide(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.text.splitlines(), 1):
        if len(line) > MAX_COLUMNS:
            yield f"{source.path}:{number}: {len(line)} columns, at most {MAX_COLUMNS}"


def without_docstring(source: Source) -> Iterator[str]:
    if source.text.strip() and not ast.get_docstring(source.tree):
        yield f"{source.path}: the module says nothing about itself (docstring)"


def without_return_type(source: Source) -> Iterator[str]:
    for node in functions_of(source):
        if node.returns is None:
            yield f"{source.path}:{node.lineno}: {node.name}"


def configuration_that_can_change(source: Source) -> Iterator[str]:
    """Every dataclass of config/ is frozen, slotted and keyword-only."""
    if source.room != "config":
        return
    for node in ast.walk(source.tree):
        for decorator in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            text = ast.unparse(decorator)
            wanted = ("frozen=True", "slots=True", "kw_only=True")
            if text.startswith("dataclass") and not all(w in text for w in wanted):
                yield f"{source.path}:{node.lineno}: {node.name} is not a dataclass({', '.join(wanted)})"


def banned_name(source: Source) -> Iterator[str]:
    if Path(source.path).name in BANNED_NAMES:
        yield f"{source.path}: name the file after what it does"


def words_that_belong_elsewhere(source: Source) -> Iterator[str]:
    """Paths of one machine, and references to notes that are not in this tree."""
    if source.path == THIS_FILE:
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        if hit := FORBIDDEN.search(line):
            yield f"{source.path}:{number}: {hit.group()!r}"


def module_of(source: Source) -> str:
    return source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def circle(sources: list[Source]) -> list[str]:
    """Modules that import each other, wherever the import stands; empty where there is no circle."""
    modules = {module_of(source): source for source in sources}
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        names = {name for _, name in imports_of(source)}
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} & modules.keys()
        graph[module].discard(module)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def assert_none(law: Callable[[Source], Iterator[str]], sources: list[Source], remedy: str) -> None:
    offenders = [line for source in sources for line in law(source)]
    assert not offenders, f"{len(offenders)} offender(s); {remedy}\n  " + "\n  ".join(offenders)


PACKAGE = ("megathunder",)
CODE = ("megathunder", "tools", "examples", "benchmarks")
EVERYTHING = (*CODE, "tests")


def test_a_room_imports_only_rooms_left_of_it() -> None:
    assert_none(wrong_imports, read_tree(*PACKAGE), "move the code, or pass the value in")


def test_no_modules_import_each_other() -> None:
    assert not (found := circle(read_tree(*PACKAGE))), " -> ".join(found) + ": give what both need a file of its own"
    lazy = "from megathunder.{} import x"
    pair = [
        Source("megathunder/tasks/a.py", lazy.format("tasks.b")),
        Source("megathunder/tasks/b.py", "def f():\n    from megathunder.tasks import a"),
    ]
    assert sorted(set(circle(pair))) == ["megathunder.tasks.a", "megathunder.tasks.b"]


def test_policy_rooms_are_free_of_torch() -> None:
    assert_none(torch_where_none_may_be, read_tree(*PACKAGE), "these rooms decide; they do not compute on tensors")


def test_megatron_is_imported_by_the_learner_alone() -> None:
    assert_none(megatron_outside_the_learner, read_tree(*PACKAGE), "ask the learner for it")


def test_files_and_functions_are_short() -> None:
    assert_none(too_long, read_tree(*EVERYTHING), "split it by what its parts are about")


def test_lines_are_short() -> None:
    assert_none(too_wide, read_tree(*EVERYTHING), "break the line")


def test_every_module_says_what_it_is() -> None:
    assert_none(without_docstring, read_tree(*CODE), "one sentence first")


def test_functions_name_their_return_types() -> None:
    sources = read_tree(*CODE)
    total = sum(1 for source in sources for _ in functions_of(source))
    missing = [line for source in sources for line in without_return_type(source)]
    share = 1 - len(missing) / max(total, 1)
    assert share >= MIN_ANNOTATED, f"{share:.1%} of {total} are annotated; missing:\n  " + "\n  ".join(missing)


def test_configuration_is_frozen() -> None:
    assert_none(configuration_that_can_change, read_tree(*PACKAGE), "a setting is decided once")


def test_no_file_is_called_utils() -> None:
    assert_none(banned_name, read_tree(*EVERYTHING), "a drawer for everything is read by nobody")


def test_no_path_of_one_machine_and_no_note_to_elsewhere() -> None:
    texts = read_tree(*EVERYTHING, suffixes=(".py", ".sh", ".toml", ".md", ".txt", ".yaml", ".yml", ".json"))
    texts += [Source(p.name, p.read_text()) for p in ROOT.iterdir() if p.suffix in (".md", ".py", ".toml", ".txt")]
    assert_none(words_that_belong_elsewhere, texts, "the tree must be readable on any machine")


def test_every_law_can_fail() -> None:
    long = "def f():\n" + "    x = 1\n" * 81
    broken = {
        wrong_imports: Source("megathunder/tasks/a.py", "from megathunder.learner import model"),
        torch_where_none_may_be: Source("megathunder/schedule/a.py", "def f():\n    import torch.nn"),
        megatron_outside_the_learner: Source("megathunder/metrics/a.py", "from megatron.core import x"),
        too_long: Source("tools/a.py", long),
        too_wide: Source("tools/a.py", "#" * 121),
        without_docstring: Source("tools/a.py", "x = 1"),
        without_return_type: Source("tools/a.py", "async def f(): ..."),
        configuration_that_can_change: Source("megathunder/config/a.py", "@dataclass(frozen=True)\nclass A: ..."),
        banned_name: Source("megathunder/rollout/utils.py", ""),
        words_that_belong_elsewhere: Source("README.md", "see /root/x"),
    }
    for law, source in broken.items():
        assert list(law(source)), f"{law.__name__} lets {source} pass"


def test_legal_imports_pass() -> None:
    for path, text in (
        ("megathunder/learner/a.py", "from megathunder.types import Task\nfrom . import model\nfrom .model import x"),
        ("megathunder/metrics/a.py", "from megathunder.schedule.ledger import Ledger\nimport torch"),
        ("megathunder/loop.py", "from megathunder.metrics import sinks\nimport megathunder.tasks"),
        ("megathunder/config/root.py", "from megathunder.config.run import RunConfig\nfrom megathunder import errors"),
    ):
        assert not list(wrong_imports(Source(path, text))), path


def test_modules_of_the_tests_have_different_names() -> None:
    """pytest imports modules outside packages by base name: two of one name end the whole collection."""
    loose = [path for path in (ROOT / "tests").rglob("*.py") if not (path.parent / "__init__.py").exists()]
    names = [path.name for path in loose if path.name != "conftest.py"]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"rename one of each: {', '.join(twice)}"


@pytest.mark.parametrize("arguments", [("check",), ("format", "--check")], ids="-".join)
def test_ruff_finds_nothing(arguments: tuple[str, ...]) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "ruff", *arguments, "--quiet", str(ROOT)], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout + found.stderr
