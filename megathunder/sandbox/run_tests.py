"""Runs pytest inside a sandbox and reports each test's outcome on a line that only this process can write.

    /usr/bin/python3 -I run_tests.py JOB        JOB: JSON {secret, packages, root, import_from, files}
    last line of the output                     "<secret> {"node id": "passed" | "failed", ...}"

The job file is gone, and this process not readable by others, before any code of the agent runs. pytest comes from a
read-only folder and precedes everything; the agent's folders come last on the path, so no file of theirs shadows a
module. Outcomes are kept here, not read from a log: printed result lines mean nothing. Code under test runs in this
process, as in every pytest run: a module that goes looking for this file's own variables is not stopped.
Called by sandbox.verify, as a file inside the sandbox; stands on its own.
"""

import ctypes
import json
import os
import sys

PR_SET_DUMPABLE = 4


def main(job_file: str) -> None:
    """See the module docstring."""
    with open(job_file) as file:
        job = json.load(file)
    os.unlink(job_file)
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    secret, write, report = job.pop("secret"), os.write, json.dumps
    out = os.dup(1)
    sys.path[:0] = [job["packages"]]
    sys.path += job["import_from"]
    import pytest

    outcomes: dict[str, str] = {}

    class Outcomes:
        """Keeps the worst of set-up, call and tear-down."""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            good = report.passed and not hasattr(report, "wasxfail")
            if report.when == "call" or not good:
                worse = outcomes.get(report.nodeid) == "failed"
                outcomes[report.nodeid] = "passed" if good and not worse else "failed"

    line = ["-q", "-x" if job.get("first") else "-q", "-p", "no:cacheprovider", "--rootdir", job["root"]]
    line += ["--import-mode=append", "-o", "pythonpath=", "-o", "addopts=", *job["files"]]
    pytest.main(line, plugins=[Outcomes()])
    sys.stdout.flush()
    write(out, f"\n{secret} {report(outcomes)}\n".encode())
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
