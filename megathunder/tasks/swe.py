"""Repositories with a fault: SWE-smith and SWE-bench instances as tasks.

    FOLDER/instances.jsonl (or .json, .parquet; train.* and dev.* where they are already split)
    FOLDER/repos/NAME/...                 the repository of `repo` = ".../NAME": its files, or a git repository

    SWE-smith   `patch` makes the fault: agent = clean + patch,   tests = clean
    SWE-bench   `patch` mends it:        agent = base commit,     tests = base commit + test_patch

The agent gets files in one commit without any other history; the mending patch is in no file of the task. Without a
given split, whole repositories are held out (about one in twenty, at least one where there are several), and always
those of benchmarks.
Called by tasks.source and tools/prepare_data.py. Refuses instances without a repository, and patches that do not fit.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import msgspec

from megathunder.config.tasks import TasksConfig
from megathunder.errors import ConfigError
from megathunder.tasks.benchmarks import is_benchmark
from megathunder.tasks.patch import apply_patch
from megathunder.tasks.protected_paths import decides_tests, is_protected, is_test_file
from megathunder.tasks.row_files import raw_rows
from megathunder.tasks.task import RepositoryTests, Task, TaskFile

SUFFIXES = (".jsonl", ".json", ".parquet")
REPORT, VERDICTS = "report.json", "verdicts.jsonl"  # beside prepared tasks
HELDOUT_SHARE = 0.05
MAX_FILE_BYTES = 1 << 20
GIT = "apt-get install git, or put the files of the commit there without .git"
PROMPT = (
    "{problem}\n\nThe repository is in {folder}. Reply with one shell command at a time; its output follows. Mend the "
    "sources, not the tests, then reply: submit done"
)
REQUEST = "{problem}\n\nThe repository is in {folder}. Mend the sources, not the tests."
ONE_COMMIT = (
    "command -v git >/dev/null || exit 0; cd {folder} && git init -q --template= -b main && "
    "git -c core.logAllRefUpdates=false add -A && GIT_AUTHOR_DATE=2000-01-01T00:00:00Z "
    "GIT_COMMITTER_DATE=2000-01-01T00:00:00Z git -c core.logAllRefUpdates=false -c user.name=task "
    "-c user.email=task@example.invalid commit -q -m base && rm -rf .git/logs .git/ORIG_HEAD"
)
AGENT_FOLDER = "/work"

Names = list[str] | str


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both formats share, and those that tell them apart; further fields are ignored."""

    instance_id: str
    repo: str
    patch: str
    FAIL_TO_PASS: Names
    PASS_TO_PASS: Names
    problem_statement: str
    image_name: str = ""  # SWE-smith
    image: str = ""  # SWE-bench, from 5.0 on
    base_commit: str = ""
    test_patch: str = ""
    version: str | None = None

    def __post_init__(self) -> None:
        for name in ("FAIL_TO_PASS", "PASS_TO_PASS"):
            if _names(getattr(self, name)) is None:
                raise ValueError(f"{name} is {getattr(self, name)!r:.60}, no list of test names")
        if self.repository in ("", ".", ".."):
            raise ValueError(f"repo is {self.repo!r}, which names no repository")
        if self.base_commit.startswith("-"):
            raise ValueError(f"base_commit is {self.base_commit!r}, no commit")

    @property
    def is_bench(self) -> bool:
        return bool(self.base_commit)

    @property
    def repository(self) -> str:
        """`swesmith/owner__name.1a2b3c4d` -> owner__name.1a2b3c4d, `owner/name` -> owner__name (SWE-bench)."""
        return self.repo.replace("/", "__") if self.is_bench else self.repo.rpartition("/")[2]

    @property
    def fail_to_pass(self) -> tuple[str, ...]:
        return _names(self.FAIL_TO_PASS) or ()

    @property
    def pass_to_pass(self) -> tuple[str, ...]:
        return _names(self.PASS_TO_PASS) or ()


def read_repository_tasks(config: TasksConfig) -> tuple[list[Task], list[Task]]:
    """(train, held-out) tasks of config.path. Raises ConfigError naming the file and the field."""
    path = Path(config.path)
    folder = path if path.is_dir() else path.parent
    train_files, dev_files = instance_files(path, "train"), instance_files(path, "dev")
    if train_files or dev_files:
        train, dev = ([i for f in files for i in read_instances(f)] for files in (train_files, dev_files))
        train = [i for i in train if not is_benchmark(i.repository)]
    else:
        train, dev = by_repository([i for f in instance_files(path) for i in read_instances(f)])
    parts = [[to_task(i, folder, config.max_turns) for i in part] for part in (train[: config.size], dev)]
    return parts[0], parts[1]


def instance_files(path: Path, name: str = "") -> list[Path]:
    """The files of instances at `path` whose name is `name` (any, without), but for what a preparation leaves there."""
    if path.is_file():
        return [] if name else [path]
    files = (p for p in path.glob("*") if p.suffix in SUFFIXES and p.is_file() and p.name not in (REPORT, VERDICTS))
    found = sorted(p for p in files if not name or p.stem == name)
    if not found and not name:
        raise ConfigError(
            f"{path} holds no file of instances",
            expected=f"a file, or a folder with one, that ends in {', '.join(SUFFIXES)}",
            remedy="write one with tools/prepare_data.py swe-smith, or use examples/tasks/swe",
        )
    return found


def read_instances(path: Path) -> list[Instance]:
    """Every instance of a file; raises ConfigError that names the first bad one."""
    rows = raw_rows(path)
    found = []
    for number, row in enumerate(rows):
        try:
            found.append(msgspec.convert(row, Instance))
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{path}, instance {number}: {error}",
                expected="a SWE-smith or SWE-bench instance",
                remedy="mend it, or leave it out with tools/prepare_data.py",
            ) from None
    return found


def by_repository(instances: Sequence[Instance]) -> tuple[list[Instance], list[Instance]]:
    """(train, held-out): whole repositories, chosen by a digest of their names; those of benchmarks are held out."""
    names = {i.repository for i in instances}
    benchmarks = {name for name in names if is_benchmark(name)}
    others = sorted(names - benchmarks, key=lambda n: blake2b(n.encode(), digest_size=8).digest())
    count = max(1, round(HELDOUT_SHARE * len(others))) if len(others) > 1 else 0
    heldout = benchmarks | set(others[:count])
    return [i for i in instances if i.repository not in heldout], [i for i in instances if i.repository in heldout]


def to_task(instance: Instance, folder: Path, max_turns: int) -> Task:
    """The task of an instance whose repository lies in `folder`/repos (or is `folder`/repo)."""
    repository = read_repository(folder, instance.repository, instance.base_commit)
    clean, executable = repository.texts, repository.executable
    if instance.is_bench:
        given, tested = clean, apply_patch(clean, instance.test_patch)
    else:
        given, tested = apply_patch(clean, instance.patch), clean
    return Task(
        id=instance.instance_id,
        kind="swe_bench" if instance.is_bench else "swe_smith",
        prompt=PROMPT.format(problem=instance.problem_statement.strip(), folder=AGENT_FOLDER),
        files=as_files(given, executable),
        grading=RepositoryTests(
            fail_to_pass=instance.fail_to_pass,
            pass_to_pass=instance.pass_to_pass,
            files=as_files({p: t for p, t in tested.items() if is_protected(p)}, executable),
        ),
        max_turns=max_turns,
        request=REQUEST.format(problem=instance.problem_statement.strip(), folder=AGENT_FOLDER),
        image=instance.image_name or instance.image,
        setup=ONE_COMMIT.format(folder=AGENT_FOLDER),
    )


def mended(instance: Instance, folder: Path) -> tuple[TaskFile, ...]:
    """The sources after the reference fix, for validation; never part of a task."""
    repository = read_repository(folder, instance.repository, instance.base_commit)
    clean = repository.texts
    return as_files(apply_patch(clean, instance.patch) if instance.is_bench else clean, repository.executable)


def as_files(files: Mapping[str, str], executable: Collection[str] = ()) -> tuple[TaskFile, ...]:
    """Files in the order of their names; those of `executable` can be run."""
    return tuple(
        TaskFile(path=path, content=text, mode=0o755 if path in executable else 0o644)
        for path, text in sorted(files.items())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """{path: text} without history and without files that are not UTF-8 text, and the paths that can be executed."""

    texts: Mapping[str, str]
    executable: frozenset[str]


def repository_files(folder: Path, name: str, commit: str) -> Mapping[str, str]:
    """The texts of a repository."""
    return read_repository(folder, name, commit).texts


@lru_cache(maxsize=256)
def read_repository(folder: Path, name: str, commit: str) -> Repository:
    """`folder`/repos/`name` (or `folder`/repo), at `commit` where it is a git repository and a commit is named."""
    root = next((p for p in (folder / "repos" / name, folder / "repo") if p.is_dir()), None)
    if root is None:
        raise ConfigError(
            f"the repository {name} is not in {folder / 'repos'}",
            expected="a folder of that name with the repository's files, or a clone of it",
            remedy="put it there (git clone), or leave the instance out with tools/prepare_data.py",
        )
    found = list(_archived(root, commit) if (root / ".git").exists() and commit else _lying(root))
    return Repository(
        texts={path: text for path, data, _ in found if (text := _text(data)) is not None},
        executable=frozenset(path for path, _, mode in found if mode & 0o111),
    )


def _archived(root: Path, commit: str) -> Iterator[tuple[str, bytes, int]]:
    """(path, content, mode) of the files of a commit; ConfigError with git's words where it has none."""
    line = ["git", "-C", str(root), "archive", commit]
    try:
        archive = subprocess.run(line, capture_output=True, check=True).stdout
    except FileNotFoundError:
        raise ConfigError(f"{root} is a git repository, and there is no git", expected="git", remedy=GIT) from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(
            f"{root} at commit {commit}: {error.stderr.decode(errors='replace').strip()}",
            expected="a clone that holds the commit",
            remedy=f"git -C {root} fetch --unshallow, or clone it again",
        ) from None
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile() and member.size <= MAX_FILE_BYTES:
                yield member.name, tar.extractfile(member).read(), member.mode


def _lying(root: Path) -> Iterator[tuple[str, bytes, int]]:
    """The same of the files that lie there."""
    for path in sorted(root.rglob("*")):
        if _kept(path, root):
            yield path.relative_to(root).as_posix(), path.read_bytes(), path.stat().st_mode


def _kept(path: Path, root: Path) -> bool:
    parts = set(path.relative_to(root).parts)
    return (
        path.is_file()
        and not path.is_symlink()
        and not parts & {".git", "__pycache__", ".pytest_cache"}
        and path.stat().st_size <= MAX_FILE_BYTES
    )


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _names(value: Names) -> tuple[str, ...] | None:
    """SWE-bench gives lists as JSON strings; None for another string."""
    try:
        return tuple(msgspec.json.decode(value, type=list[str]) if isinstance(value, str) else value)
    except msgspec.DecodeError:
        return None


def sources_of(paths: Iterable[str]) -> list[str]:
    """The paths that an agent's version is taken of."""
    return [p for p in paths if not is_test_file(p) and not decides_tests(p)]
