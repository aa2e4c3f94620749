"""One trajectory by the user's own function: `async def run(task, client, sandbox) -> float | None`.

    task       the Task: prompt, messages, row, files
    client     an openai.AsyncOpenAI of this trajectory: what it samples is recorded and trained; model="policy"
    sandbox    await sandbox.exec(command, timeout_s=None) -> output, exit_status, wall_s, notice
    returns    the reward, or None: [reward] or the task's own grader decides, and the last turn's text is the answer

It runs on the event loop of the user's coroutines. An exception is a fault: before the first turn it is tried again,
then the run ends with its traceback; one that follows a limit (turns, time, tokens) ends the trajectory there. Called
by the collector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from megathunder.errors import UserError
from megathunder.rewards.episode import NotAScore, number
from megathunder.rollout.agents.recorder import TrajectoryRecorder
from megathunder.rollout.endpoint.chat_completions import ExecAnswer
from megathunder.rollout.endpoint.server import AgentEndpoint
from megathunder.rollout.endpoint.session import Session
from megathunder.tasks import Task
from megathunder.types import EndReason, Trajectory
from megathunder.user_code import UserCode, UserCodeFailure

MODEL = "policy"
Agent = Callable[[Task, Any, "AgentSandbox"], Awaitable[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSandbox:
    """The sandbox of the trajectory, for code on another event loop."""

    session: Session
    loop: asyncio.AbstractEventLoop

    async def exec(self, command: str, timeout_s: float | None = None) -> ExecAnswer:
        """Run a command; its output, exit status and the limit that ended it, if one did."""
        asked = asyncio.run_coroutine_threadsafe(self.session.execute(command, timeout_s), self.loop)
        return await asyncio.wrap_future(asked)


class PythonAgentEpisode:
    """One attempt. `answer` and `reward` are known once `run` has returned."""

    def __init__(
        self, recorder: TrajectoryRecorder, endpoint: AgentEndpoint, run: Agent, reference: str, code: UserCode
    ) -> None:
        self._recorder, self._endpoint, self._agent, self._code = recorder, endpoint, run, code
        self._what = f"agent {reference!r}"
        self._session = Session(recorder, MODEL)
        self.answer: str | None = None
        self.reward: float | None = None

    async def run(self) -> Trajectory:
        """All tokens of the trajectory."""
        key = self._endpoint.open(self._session)
        try:
            reason = await self._until_end(key)
        finally:
            await self._session.stop()
            self._endpoint.close(key)
            self._recorder.release()
        return self._recorder.trajectory(reason)

    async def _until_end(self, key: str) -> EndReason:
        session, failures = self._session, 0
        while True:
            try:
                given = await self._code.call(
                    self._what,
                    self._with_client,
                    key,
                    AgentSandbox(session=session, loop=asyncio.get_running_loop()),
                    limit_s=max(0.001, self._recorder.clock.remaining_s),
                    setting="rollout.deadline_s",
                )
                break
            except UserCodeFailure as failure:
                if session.failure is not None:
                    raise session.failure from failure
                if ended := self._limit():
                    return ended
                failures += 1
                if self._recorder.turns or failures > self._recorder.settings.rollout.max_retries:
                    raise failure.final(failures) from failure
        if session.failure is not None:
            raise session.failure
        self.reward = self._number(given)
        self.answer = session.last_text if session.answer is None else session.answer
        return self._limit() or EndReason.ANSWERED

    def _limit(self) -> EndReason | None:
        """The limit that ended the attempt, if one did."""
        if self._session.reason or self._session.limit:
            return self._session.reason or self._session.limit
        return EndReason.DEADLINE if self._recorder.clock.remaining_s <= 0 else None

    async def _with_client(self, key: str, sandbox: AgentSandbox) -> Any:
        import httpx
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient  # half a second, for such agents only

        http = DefaultAsyncHttpxClient(trust_env=False, timeout=httpx.Timeout(None))
        async with AsyncOpenAI(base_url=self._endpoint.url, api_key=key, max_retries=0, http_client=http) as client:
            return await self._agent(self._recorder.task, client, sandbox)

    def _number(self, given: Any) -> float | None:
        try:
            return None if given is None else number(given, "it returned ")
        except NotAScore as wrong:
            raise UserError(
                f"{self._what} on task {self._recorder.task.id}: {wrong}",
                expected="a finite number, or None where [reward] or the task decides",
                remedy="return a float or nothing",
            ) from None
