"""What an agent finds of a repository that has a history: one commit, and nothing that leads to the fix."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.rewards.grading import grade
from megathunder.sandbox import SandboxPool
from megathunder.tasks import Task
from megathunder.tasks.swe import read_instances, to_task

SECRET = "return left + right"
BROKEN = "def add(left, right):\n    return left - right\n\n\ndef zero():\n    return 0\n"
TESTS = "from sums import add, zero\n\n\ndef test_zero():\n    assert zero() == 0\n"
FIX = "--- a/sums.py\n+++ b/sums.py\n@@ -2 +2 @@\n-    return left - right\n+    return left + right\n"
TEST_FIX = "--- a/tests/test_sums.py\n+++ b/tests/test_sums.py\n@@ -4,2 +4,6 @@\n def test_zero():\n"
TEST_FIX += "     assert zero() == 0\n+\n+\n+def test_add():\n+    assert add(2, 3) == 5\n"
LOOK = {
    "commits": "git rev-list --all --count",
    "parents": "git cat-file -p HEAD | grep -c '^parent'",
    "refs": "git for-each-ref | wc -l",
    "remotes": "git remote | wc -l; grep -c remote .git/config",
    "reflog": "git reflog --all | wc -l; ls .git/logs 2>/dev/null | wc -l",
    "stash": "git stash list | wc -l",
    "packs": "find .git -name '*.pack' -o -name '*.idx' -o -name packed-refs -o -name alternates | wc -l",
    "heads": "ls .git | grep -c '.*_HEAD'",
    "unreachable": "git fsck --unreachable --dangling --no-reflogs --lost-found 2>/dev/null | wc -l",
    "extra objects": "echo $(($(find .git/objects -type f | wc -l) - $(git rev-list --objects --all | wc -l)))",
    "hooks": "ls .git/hooks 2>/dev/null | wc -l",
    "the fix": "git grep -c 'left + right' | wc -l; grep -rl 'left + right' . | wc -l",
    "untracked": "git status --porcelain | wc -l",
}
EXPECTED = {"commits": "1", "refs": "1"}  # everything else: 0, as often as it is counted


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.invalid", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """A SWE-bench task of a repository that went on: the fix is committed, tagged, branched, stashed and packed."""
    folder = tmp_path_factory.mktemp("upstream")
    repo = folder / "repos" / "tiny__sums"
    (repo / "tests").mkdir(parents=True)
    git(repo, "init", "-q")
    (repo / "sums.py").write_text(BROKEN)
    (repo / "tests" / "test_sums.py").write_text(TESTS)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "base")
    base = git(repo, "rev-parse", "HEAD")
    (repo / "sums.py").write_text(BROKEN.replace("return left - right", SECRET))
    git(repo, "commit", "-qam", "mend add")
    git(repo, "tag", "v2")
    git(repo, "branch", "fixed")
    git(repo, "remote", "add", "origin", str(repo))
    (repo / "sums.py").write_text(f"# {SECRET}\n")
    git(repo, "stash")
    git(repo, "gc", "-q")
    row = {"repo": "tiny/sums", "instance_id": "tiny__sums-1", "base_commit": base, "patch": FIX}
    row |= {"test_patch": TEST_FIX, "problem_statement": "add subtracts", "hints_text": "", "version": "1.0"}
    row |= {"FAIL_TO_PASS": '["tests/test_sums.py::test_add"]', "PASS_TO_PASS": '["tests/test_sums.py::test_zero"]'}
    (folder / "verified.jsonl").write_text(json.dumps(row))
    return to_task(read_instances(folder / "verified.jsonl")[0], folder, max_turns=3)


async def episode(task: Task, command: str, answer: str | None) -> tuple[float, str]:
    """(reward, output) of one command in a sandbox of the task."""
    pool = SandboxPool(SandboxConfig(warm=1))
    await pool.start()
    try:
        sandbox = await pool.lease(task.files)
        await sandbox.exec(task.setup, 20.0)
        output = (await sandbox.exec(command, 20.0)).output
        return await grade(task, sandbox, answer, pool, 20.0), output
    finally:
        await pool.close()
        assert not pool.leaks()


def test_an_agent_finds_one_commit_and_no_way_to_the_fix(upstream: Task) -> None:
    script = "; ".join(f"echo '= {name}'; {command}" for name, command in LOOK.items())
    _, output = asyncio.run(episode(upstream, f"exec 2>&1; {script}", None))
    found = {part.partition("\n")[0].strip(): part.split("\n")[1:] for part in output.split("= ")[1:]}
    assert found.keys() == LOOK.keys(), output
    for name, lines in found.items():
        counts = [line for line in lines if line.strip()]
        assert counts and set(counts) == {EXPECTED.get(name, "0")}, f"{name}: {counts}"
    assert SECRET not in "".join(file.content for file in upstream.files) and SECRET not in upstream.prompt


@pytest.mark.parametrize("answer", ["done", None])
def test_a_mended_repository_earns_the_reward_whether_or_not_it_was_submitted(
    upstream: Task, answer: str | None
) -> None:
    reward, output = asyncio.run(episode(upstream, "sed -i 's/left - right/left + right/' sums.py", answer))
    assert reward == 1.0, output


def test_an_untouched_repository_earns_nothing(upstream: Task) -> None:
    assert asyncio.run(episode(upstream, "true", None))[0] == 0.0
