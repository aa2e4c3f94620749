"""Runs pytest inside a sandbox and reports each test's outcome where the code under test cannot change it.

    /usr/bin/python3 -I run_tests.py JOB        JSON {secret, packages, root, import_from, files, controls, results}
    the file `results`                          [["node id", "passed" | "failed"], ...]
    last line of the output                     "<secret> <SHA-256 of that file>": no list of tests is too long for it

Two processes. The judge (this file, started first) has the secret, imports nothing of the agent and cannot be read by
others; it starts the runner, which never has the secret, and takes one record for each test from a pipe as it ends. The
worst record of a test counts, so nothing that is said later mends a failure. The job file is gone before any code of
the agent runs; pytest comes from a read-only folder and precedes everything, and the agent's folders come last on the
path, so no file of theirs shadows a module.

Code under test runs in the runner, as in every pytest run, and may look into it and change it. So `controls` are tests
that must fail: they run last, under the names of real tests. Whoever turns failures into passes turns theirs, and a
stream of records without theirs is no result. A module written against this very file could still forge both.
Called by sandbox.verify, as a file inside the sandbox; stands on its own.
"""

import ctypes
import hashlib
import json
import os
import random
import subprocess
import sys

PR_SET_DUMPABLE = 4


def main(job_file: str) -> None:
    """The judge: see the module docstring."""
    with open(job_file) as file:
        job = json.load(file)
    os.unlink(job_file)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    secret, controls = job.pop("secret"), set(job["controls"])
    reader, writer = os.pipe()
    line = [sys.executable, "-I", "-B", os.path.abspath(__file__), "--run", str(writer)]
    runner = subprocess.Popen(line, stdin=subprocess.PIPE, pass_fds=(writer,))
    os.close(writer)
    runner.stdin.write(json.dumps(job).encode())
    runner.stdin.close()
    outcomes, failed = {}, set()
    with open(reader, errors="replace") as records:
        for record in records:
            try:
                name, outcome = json.loads(record)
            except ValueError:
                continue
            if name in controls:
                failed.add((name, outcome))
            elif outcomes.get(name) != "failed":
                outcomes[name] = outcome
    ended = runner.wait() == 0 and failed == {(name, "failed") for name in controls}
    if ended:
        sys.stdout.flush()
        data = json.dumps(list(outcomes.items())).encode()
        if os.path.lexists(job["results"]):
            os.unlink(job["results"])
        with open(job["results"], "xb") as file:
            file.write(data)
        os.write(1, f"\n{secret} {hashlib.sha256(data).hexdigest()}\n".encode())
    os._exit(0 if ended else 1)


def run(writer: int) -> None:
    """The runner: pytest, one record a test."""
    job = json.load(sys.stdin)
    os.set_inheritable(writer, False)
    sys.path[:0] = [job["packages"]]
    sys.path += job["import_from"]
    import pytest

    write, dumps, choice, names = os.write, json.dumps, random.choice, {}
    Function, Module = pytest.Function, pytest.Module

    def unsound(**_: object) -> None:
        raise AssertionError

    class Records:
        """Keeps the worst of set-up, call and tear-down of the test that runs."""

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list) -> None:
            models = [item for item in items if item.getparent(Module)]
            for control in job["controls"] if models else ():
                model = choice(models)
                twin = Function.from_parent(model.getparent(Module), name=model.name, callobj=unsound)
                names[twin] = control
                items.append(twin)

        @pytest.hookimpl(hookwrapper=True, tryfirst=True)
        def pytest_runtest_protocol(self, item: object) -> object:
            self.outcome = None
            yield
            name = names.get(item, getattr(item, "nodeid", ""))
            write(writer, f"{dumps([name, self.outcome or 'failed'])}\n".encode())

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            good = report.passed and not hasattr(report, "wasxfail")
            if report.when == "call" or not good:
                self.outcome = "passed" if good and self.outcome != "failed" else "failed"

    line = ["-q", "-p", "no:cacheprovider", "--rootdir", job["root"], "--import-mode=append"]
    collected = pytest.main([*line, "-o", "pythonpath=", "-o", "addopts=", *job["files"]], plugins=[Records()])
    if not names:
        for control in job["controls"]:  # there was no test that they could stand beside
            write(writer, f"{dumps([control, 'failed'])}\n".encode())
    sys.stdout.flush()
    os._exit(0 if collected in (0, 1, 2, 5) else 1)


if __name__ == "__main__":
    run(int(sys.argv[2])) if sys.argv[1] == "--run" else main(sys.argv[1])
