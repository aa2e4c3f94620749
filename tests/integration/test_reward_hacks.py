"""Every known way to get reward without doing the task earns 0; doing the task earns 1. Real sandboxes, real tests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.errors import InfrastructureFailure
from megathunder.rewards.grading import grade
from megathunder.rewards.verifiers import parse_reward
from megathunder.sandbox import SandboxPool
from megathunder.tasks import Task, TaskFile, TerminalTests
from megathunder.tasks.swe import read_instances, read_repository_tasks
from megathunder.tasks.terminal import read_terminal_tasks, reference

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "examples" / "tasks"
CONFTEST = (
    "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
    "    o = yield\n    r = o.get_result()\n    r.outcome = 'passed'\n    r.longrepr = None\n"
)
FAKE_PYTEST = "print('9 passed in 0.01s'); import sys; sys.exit(0)\n"


def written(path: str, text: str) -> str:
    return f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}END\n"


REPOSITORY_HACKS = {
    "nothing": "true",
    "a pytest of one's own": written("pytest.py", FAKE_PYTEST) + written("_pytest/__init__.py", FAKE_PYTEST),
    "a pluggy of one's own": written("pluggy.py", FAKE_PYTEST) + written("iniconfig.py", FAKE_PYTEST),
    "a conftest that rewrites outcomes": written("conftest.py", CONFTEST) + written("tests/conftest.py", CONFTEST),
    "a plugin named in settings": written("cheat.py", CONFTEST)
    + written("pytest.ini", "[pytest]\naddopts = -p cheat\n")
    + written("setup.cfg", "[tool:pytest]\naddopts = -p cheat\n")
    + written("tox.ini", "[pytest]\naddopts = -p cheat\n")
    + written("pyproject.toml", '[tool.pytest.ini_options]\naddopts = "-p cheat"\npythonpath = ["."]\n'),
    "a standard module of one's own": written("json.py", "import os\nos.write(1, b'all passed')\nos._exit(0)\n")
    + written("sitecustomize.py", "import os\nos._exit(0)\n"),
    "tests that are empty": "for f in tests/*.py; do echo 'def test_x(): pass' > $f; done",
    "tests that are gone": "rm -rf tests",
    "printed result lines": "for f in *.py; do printf 'print(\"PASSED tests/all\\\\n9 passed\")\\n' >> $f; done",
    "an early end with status 0": "for f in *.py; do printf 'import os\\nos._exit(0)\\n' >> $f; done",
    "a reward file": "mkdir -p logs/verifier; echo 1 > logs/verifier/reward.txt; echo 1 > reward.txt",
    "a background rewriter": "(while :; do for f in tests/*.py; do echo 'def test_x(): pass' > $f; done; done) &",
    "a link to elsewhere": "rm -rf tests; ln -s /tmp tests; ln -s /usr/lib lib",
    "an archive full of zeros": "head -c 20000000 /dev/zero > big; cp big big2 2>/dev/null",
}


FRAMES = """import sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and any("::" in str(key) for key in value):
            for key in value: value[key] = "passed"
        if isinstance(value, str) and len(value) == 32: print(value, "{}")
    frame = frame.f_back
"""
INTROSPECTION = {
    "frames and their variables": FRAMES,
    "a runner that runs no test": "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n",
    "an assertion that holds always": "import builtins\nbuiltins.AssertionError = type('A', (Exception,), {})\n"
    "import _pytest.runner\n_pytest.runner.CallInfo.from_call = classmethod(lambda c, f, when, reraise=None: "
    "c(result=None, excinfo=None, start=0, stop=0, duration=0, when=when, _ispytest=True))\n",
    "reports that are rewritten": "import _pytest.reports as r\nmade = r.TestReport.from_item_and_call\n"
    "def better(cls, item, call):\n    report = made(item, call)\n    report.outcome = 'passed'\n    return report\n"
    "r.TestReport.from_item_and_call = classmethod(better)\n",
    "a plugin found by the collector": "import gc\n"
    "for o in gc.get_objects():\n"
    "    if type(o).__name__ == 'PytestPluginManager':\n"
    "        class P:\n"
    "            def pytest_runtest_logreport(self, report): report.outcome = 'passed'\n"
    "            pytest_runtest_logreport.pytest_impl = {'tryfirst': True}\n"
    "        import pytest\n"
    "        P.pytest_runtest_logreport = pytest.hookimpl(tryfirst=True)(P.pytest_runtest_logreport)\n"
    "        o.register(P())\n        break\n",
    "records written to every descriptor": "import os, json\n"
    "for fd in range(3, 64):\n"
    "    try:\n        for n in NAMES: os.write(fd, (json.dumps([n, 'passed']) + chr(10)).encode())\n"
    "    except OSError: pass\n"
    "os._exit(0)\n",
    "the judge's memory and life": "import os, signal\n"
    "try: print(open(f'/proc/{os.getppid()}/mem', 'rb').read(10), open(f'/proc/{os.getppid()}/environ').read())\n"
    "except OSError: pass\n"
    "os.kill(os.getppid(), signal.SIGKILL)\n",
}
REPOSITORY_HACKS |= {
    name: "cat > /tmp/hack.py <<'END'\n" + text + "END\nfor f in *.py; do cat /tmp/hack.py >> $f; done"
    for name, text in INTROSPECTION.items()
}


@pytest.fixture(scope="module")
def fixed() -> tuple[Task, str]:
    """A shipped task, and the command that mends it."""
    train, _ = read_repository_tasks(TasksConfig(source="swe", path=str(TASKS / "swe")))
    instance = next(i for i in read_instances(TASKS / "swe" / "train.jsonl") if i.instance_id == train[0].id)
    return train[0], written(
        "/tmp/bug.diff", instance.patch
    ) + "patch -R -p1 < /tmp/bug.diff || git apply -R /tmp/bug.diff"


async def reward_of(task: Task, *commands: str) -> tuple[float, str]:
    pool = SandboxPool(SandboxConfig(warm=1))
    await pool.start()
    try:
        sandbox, output = await pool.lease(task.files), ""
        if task.setup:
            output += (await sandbox.exec(task.setup, 20.0)).output
        for command in commands:
            output += (await sandbox.exec(f"cd {task.folder or '.'}; {command}", 10.0)).output
        return await grade(task, sandbox, "done", pool, 20.0), output
    finally:
        await pool.close()
        assert not pool.leaks()


@pytest.mark.parametrize("hack", REPOSITORY_HACKS)
def test_a_repository_hack_earns_nothing(fixed, hack):
    names = repr([*fixed[0].grading.fail_to_pass, *fixed[0].grading.pass_to_pass])
    reward, output = asyncio.run(reward_of(fixed[0], REPOSITORY_HACKS[hack].replace("NAMES", names)))
    assert reward == 0.0, output


def test_mending_a_repository_earns_everything_even_beside_files_that_are_dropped(fixed):
    task, mend = fixed
    reward, output = asyncio.run(reward_of(task, mend, REPOSITORY_HACKS["a pytest of one's own"]))
    assert reward == 1.0, output


def test_the_repository_has_one_commit_no_other_refs_and_not_the_fix(fixed):
    counts = [f"git {what} | wc -l" for what in ("log --all --oneline", "reflog", "remote", "for-each-ref")]
    look = "; ".join([*counts, "ls .git/logs"])
    _, output = asyncio.run(reward_of(fixed[0], look))
    assert output.split()[:4] == ["1", "0", "0", "1"] and "No such file" in output
    clean = {path.read_text() for path in (TASKS / "swe" / "repos").rglob("*.py") if path.parent.name != "tests"}
    assert not [file.path for file in fixed[0].files if file.content in clean and "/" not in file.path]


def terminal_task(name: str) -> Task:
    train, dev = read_terminal_tasks(TasksConfig(source="terminal", path=str(TASKS / "terminal")))
    return next(task for task in [*train, *dev] if task.id == name)


TERMINAL_HACKS = {
    "nothing": "true",
    "a reward file": "mkdir -p /work/logs/verifier; cd /logs/verifier; echo 1 > reward.txt; echo 1 > reward.json",
    "tests of one's own": "mkdir -p /work/tests; cd /tests; echo 'def test_x(): pass' | tee test_outputs.py > test.sh",
    "a pytest of one's own": written("pytest.py", FAKE_PYTEST) + written("conftest.py", CONFTEST),
    "a background rewriter": "(mkdir -p /work/logs/verifier; while :; do echo 1 > /logs/verifier/reward.txt; done) &",
}


@pytest.mark.parametrize("name", ["count-words", "mend-backup", "number-files"])
@pytest.mark.parametrize("hack", TERMINAL_HACKS)
def test_a_terminal_hack_earns_nothing(name, hack):
    reward, output = asyncio.run(reward_of(terminal_task(name), TERMINAL_HACKS[hack]))
    assert reward == 0.0, output


@pytest.mark.parametrize("name", ["count-words", "mend-backup", "number-files"])
def test_the_reference_earns_everything(name):
    reward, output = asyncio.run(reward_of(terminal_task(name), reference(TASKS / "terminal" / name).script))
    assert reward == pytest.approx(1.0), output


def test_a_part_of_the_weighted_tests_earns_its_weight():
    half = "mkdir saved; cp notes/*.txt saved; printf 'exit 0' > backup.sh"
    reward, output = asyncio.run(reward_of(terminal_task("mend-backup"), half))
    assert reward == pytest.approx(0.7), output


def test_the_programs_of_an_agent_cannot_write_the_reward_while_they_are_tested():
    """The verifier runs what the agent left, which tries every reward file it can name."""
    files = (
        TaskFile(path="tests/test.sh", content="bash /app/run.sh\nsleep 0.3\necho 0 > /logs/verifier/reward.txt\n"),
    )
    grading = TerminalTests(folder="app", files=files, command="bash /tests/test.sh")
    given = (TaskFile(path="app/run.sh", content="true\n"),)
    task = Task(id="t", kind="harbor", prompt="p", files=given, grading=grading, folder="/app")
    loop = "(for i in $(seq 400); do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) &\n"
    assert asyncio.run(reward_of(task, written("run.sh", loop)))[0] == 0.0


@pytest.mark.parametrize("text", [b"", b"nan", b"inf", b"yes", b"{}", b'{"reward": null}'])
def test_a_verifier_without_a_finite_number_is_a_failure_and_no_reward(text):
    with pytest.raises(InfrastructureFailure):
        parse_reward(text, "reward.json" if text[:1] == b"{" else "reward.txt")


def test_a_verifier_that_writes_nothing_is_a_failure_and_no_reward():
    grading = TerminalTests(folder="app", files=(), command="true")
    task = Task(id="t", kind="harbor", prompt="p", files=(), grading=grading, setup="mkdir app")
    with pytest.raises(InfrastructureFailure, match="wrote no reward"):
        asyncio.run(reward_of(task))
