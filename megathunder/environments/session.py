"""One instance of the user's environment for one trajectory.

    session = EnvironmentSession(make, task, ...)
    await session.begin()            the first observation ("" where there is none), and `tools`
    await session.act(text)          messages for the policy, and whether the episode is over
    session.reward                   sum of the steps' rewards, or the instance's own; None: it gives none

The class has `step` (Gymnasium's words; its five values are taken as well as three), or public methods that are tools.
An exception is a fault: the actions are replayed on a new instance, and if that shows something else, or fails again,
the run ends with the traceback. Runs off the event loop. Called by rollout/.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megathunder.environments.tools import call_tool, tool_calls, tool_definitions, tool_methods
from megathunder.errors import UserError
from megathunder.tasks import Message, Task
from megathunder.user_code import UserCode, UserCodeFailure

SETTING = "tasks.environment_timeout_s"
NO_STEP = "an observation (text), a reward (a finite number) and whether it is done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the environment says to a turn."""

    messages: tuple[Message, ...]
    done: bool


@dataclass(slots=True)
class _State:
    """An instance and what it has given so far."""

    instance: Any
    first: str
    total: float
    steps: int = 0


class EnvironmentSession:
    """`make()` gives a new instance; `reference` names it in errors."""

    def __init__(
        self, make: Callable[[], Any], task: Task, *, reference: str, code: UserCode, limit_s: float, retries: int
    ) -> None:
        self._make, self._task, self._what = make, task, f"environment {reference!r}"
        self._code, self._limit_s, self._retries_left = code, limit_s, retries
        self._failures = 0
        self._state: _State | None = None
        self._past: list[tuple[str, Reply]] = []
        self.tools: list[dict[str, Any]] = []
        self.reward: float | None = None

    async def begin(self) -> str:
        """Make the instance and reset it with the task's row. Raises UserError."""
        state = await self._again(self._fresh)
        self.tools = await self._run(self._tools, state)
        return state.first

    async def act(self, text: str) -> Reply:
        """The answer to one turn of the policy. Raises UserError."""

        async def replay_and_act() -> Reply:
            state = self._state or await self._replayed()
            return await self._run(self._act, state, text)

        reply = await self._again(replay_and_act)
        self._past.append((text, reply))
        return reply

    async def close(self) -> None:
        """Read the instance's own reward and end it. Raises UserError."""
        if self._state is not None:
            state = self._state
            self.reward = await self._again(lambda: self._run(self._total, state))
            self._state = None

    async def _again(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return await work()
            except UserCodeFailure as failure:
                self._state, self._failures = None, self._failures + 1
                if self._retries_left == 0:
                    raise failure.final(self._failures) from failure
                self._retries_left -= 1

    async def _run(self, function: Callable[..., Any], *arguments: object) -> Any:
        return await self._code.call(self._what, function, *arguments, limit_s=self._limit_s, setting=SETTING)

    async def _fresh(self) -> _State:
        self._state = await self._run(self._reset)
        return self._state

    async def _replayed(self) -> _State:
        """A new instance in the state that the past actions left, if they show what they showed."""
        state = await self._fresh()
        for text, shown in self._past:
            reply = await self._run(self._act, state, text)
            if reply != shown:
                self._retries_left = 0
                raise UserCodeFailure(
                    self._what,
                    f"showed {reply.messages!r:.120} to {text!r:.60} on a new instance, {shown.messages!r:.120} before",
                    "",
                    "mend its first fault above, or make it depend on its row and its actions alone",
                )
        return state

    def _reset(self) -> _State:
        instance = self._make()
        given = instance.reset(dict(self._task.row)) if hasattr(instance, "reset") else None
        first = given[0] if isinstance(given, tuple) else given  # Gymnasium: (observation, info)
        return _State(instance, "" if first is None else str(first), 0.0)

    def _tools(self, state: _State) -> list[dict[str, Any]]:
        if hasattr(state.instance, "step"):
            return []
        methods = tool_methods(state.instance)
        if not methods:
            raise UserError(
                f"{self._what} has neither step nor a public method",
                expected="step(action) -> observation, reward, done; or methods that are tools",
                remedy="add one of them",
            )
        return tool_definitions(methods, self._what)

    def _act(self, state: _State, text: str) -> Reply:
        state.steps += 1
        if hasattr(state.instance, "step"):
            observation, reward, done = self._step(state.instance.step(text))
            state.total += reward
            return Reply(messages=(Message("user", observation),), done=done)
        calls = tool_calls(text)
        methods = tool_methods(state.instance)
        shown = tuple(Message("tool", call_tool(methods, call)) for call in calls)
        return Reply(messages=shown, done=not calls or bool(getattr(state.instance, "done", False)))

    def _step(self, given: Any) -> tuple[str, float, bool]:
        if isinstance(given, tuple) and len(given) in (3, 5) and _finite(given[1]):
            done = bool(given[2]) or (len(given) == 5 and bool(given[3]))  # Gymnasium: terminated or truncated
            return str(given[0]), float(given[1]), done
        raise UserError(f"{self._what}: step gave {given!r:.80}", expected=NO_STEP, remedy="return these three")

    def _total(self, state: _State) -> float | None:
        instance = state.instance
        if hasattr(instance, "step"):
            total: Any = state.total
        else:
            total = getattr(instance, "reward", None)
            total = total() if callable(total) else total
        if hasattr(instance, "close"):
            instance.close()
        if total is None or math.isfinite(float(total)):
            return None if total is None else float(total)
        raise UserError(
            f"{self._what}: its reward is {total!r:.80}", expected="a finite number, or None", remedy="return a float"
        )


def _finite(value: Any) -> bool:
    return isinstance(value, numbers.Real) and math.isfinite(value)
