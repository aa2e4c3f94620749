"""One trajectory by a harness: a process of its own, told where the policy is, ended when its session is.

    start -> (requests, commands, ...) -> end(answer), exit, a limit, the deadline -> ended with all it started

    it calls end                    ANSWERED (with an answer) or MALFORMED
    it exits with status 0          ANSWERED with "" (its work lies in the sandbox), or the limit it ran into
    it exits otherwise              the limit it ran into; without one HarnessFailed: the collector starts it anew, in a
                                    clean sandbox, as often as `rollout.max_retries` allows
    the time is used up             DEADLINE

The harness is trusted code, like the servers, and runs here: outside the sandbox, where no command of the policy can
read its memory, end it or speak in its assignment. What the policy says is executed only through the session, in the
sandbox. It gets a cleared environment, a home that is removed afterwards, and dies with this process. What it prints
goes to a log. Called by the collector. Raises InfrastructureFailure.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from pathlib import Path

from megathunder.errors import InfrastructureFailure
from megathunder.processes import guarded, kill_family
from megathunder.rollout.agents.recorder import TrajectoryRecorder
from megathunder.rollout.endpoint.server import AgentEndpoint
from megathunder.rollout.endpoint.session import Session
from megathunder.types import EndReason, Trajectory

INHERITED = ("LANG", "LC_ALL", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
EXIT_S = 2.0  # from the end of a session to the harness's own exit
MODEL = "policy"  # what harnesses call it
LOG_KEPT_BYTES = 1 << 20  # of its output, for those who read it
LOG_TAIL_BYTES = 2000  # of its last output, for error messages


class HarnessFailed(InfrastructureFailure):
    """The harness ended by itself with an error status."""


class HarnessEpisode:
    """One attempt. `answer` is what was submitted, if anything was, once `run` has returned; `reward` what the harness
    gave itself. Its output is added to the file `log`."""

    def __init__(
        self, recorder: TrajectoryRecorder, endpoint: AgentEndpoint, command: str, log: Path | None = None
    ) -> None:
        self._recorder, self._endpoint, self._command, self._log = recorder, endpoint, command, log
        self._session = Session(recorder, MODEL)
        self.answer: str | None = None
        self.reward: float | None = None

    async def run(self) -> Trajectory:
        """All tokens of the trajectory."""
        key = self._endpoint.open(self._session)
        try:
            with tempfile.TemporaryDirectory(prefix="mt-harness-", ignore_cleanup_errors=True) as home:
                reason = await self._until_end(key, Path(home))
        finally:
            await self._session.stop()
            self._endpoint.close(key)
            self._recorder.release()
            self._trim_log()
        self.answer, self.reward = self._session.answer, self._session.reward
        return self._recorder.trajectory(reason)

    async def _until_end(self, key: str, home: Path) -> EndReason:
        session, log = self._session, self._log or home / "output"
        log.parent.mkdir(parents=True, exist_ok=True)
        printed = log.stat().st_size if log.exists() else 0  # by an earlier attempt
        command = self._command.replace("{model}", session.model).replace("{base_url}", self._endpoint.url)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *guarded(shlex.split(command)),
                env=environment(self._endpoint.url, key, session.model, home),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            await self._wait(process)
        finally:
            await asyncio.shield(kill_family(process))
        if session.failure is not None:
            raise session.failure
        if session.reason is not None:
            return session.reason
        if self._recorder.clock.remaining_s <= 0:
            return EndReason.DEADLINE
        if session.limit is not None:
            return session.limit
        if process.returncode:
            tail = log.read_bytes()[printed:][-LOG_TAIL_BYTES:].decode(errors="replace").strip()
            raise HarnessFailed(f"the harness exited with status {process.returncode}: {tail}")
        session.answer = ""
        return EndReason.ANSWERED

    def _trim_log(self) -> None:
        """Keep the end of a long log, and none that is empty."""
        if self._log is None or not self._log.exists():
            return
        size = self._log.stat().st_size
        if size == 0:
            self._log.unlink()
        elif size > LOG_KEPT_BYTES:
            with self._log.open("rb") as full:
                full.seek(size - LOG_KEPT_BYTES)
                kept = full.read()
            self._log.write_bytes(kept)

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        """Until the harness exits, its session is over (then a moment longer), or its time is used up."""
        exited, over = asyncio.create_task(process.wait()), asyncio.create_task(self._session.over.wait())
        try:
            while not exited.done() and (left_s := self._recorder.clock.remaining_s) > 0:  # which failures extend
                await asyncio.wait((exited, over), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if over.done():
                    await asyncio.wait((exited,), timeout=EXIT_S)
                    return
        finally:
            exited.cancel()
            over.cancel()


def environment(url: str, key: str, model: str, home: Path) -> dict[str, str]:
    """All that a harness is told. `python` is this interpreter."""
    kept = {name: os.environ[name] for name in INHERITED if name in os.environ}
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    return kept | {
        "PATH": path,
        "HOME": str(home),
        "TMPDIR": str(home),
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
        "NO_PROXY": "127.0.0.1",
    }
