"""Laws of environments: state, several turns, tools, and that a fault is never a reward."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.guess_number import steps, tools
from megathunder.config.tasks import TasksConfig
from megathunder.environments import EnvironmentSession, ToolError
from megathunder.environments.build_environment import check_environment
from megathunder.environments.tools import tool_calls, tool_definitions, tool_methods
from megathunder.errors import ConfigError, UserError
from megathunder.tasks import Message, RewardFunction, Task
from megathunder.user_code import UserCode

TASK = Task(id="g-0", kind="g", prompt="", files=(), grading=RewardFunction(), row={"number": 50})


def play(
    make: Callable[[], Any], *turns: str, retries: int = 1, limit_s: float = 60.0
) -> tuple[str, list, float | None]:
    """(first observation, replies, reward)"""

    async def main() -> tuple[str, list, float | None]:
        code = UserCode()
        session = EnvironmentSession(make, TASK, reference="e.py:E", code=code, limit_s=limit_s, retries=retries)
        first = await session.begin()
        replies = [await session.act(turn) for turn in turns]
        await session.close()
        code.close()
        return first, replies, session.reward

    return asyncio.run(main())


def test_steps_keep_state_and_their_rewards_add_up() -> None:
    first, replies, reward = play(steps.GuessNumber, "hm", "guess 40", "60?", "50")
    assert first == "guess the number in 1 to 99"
    assert [reply.messages for reply in replies] == [
        (Message("user", words),) for words in ("say a number", "higher", "lower", "right")
    ]
    assert [reply.done for reply in replies] == [False, False, False, True]
    assert reward == pytest.approx(0.09 + 0.09 + 1.0)


def call(number: object) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'


def test_methods_are_tools_and_wrong_calls_are_told_to_the_policy() -> None:
    turns = (call(40), call('"60"'), call('"many"'), '<tool_call>{"name": "gess", "arguments": {}}</tool_call>',
             "<tool_call>{guess</tool_call>", call(50))  # fmt: skip
    first, replies, reward = play(tools.GuessNumber, *turns)
    assert first.startswith("Find the number")
    texts = [reply.messages[0].content for reply in replies]
    assert texts[:2] == ["higher", "lower"] and texts[-1] == "right"
    assert "Expected `int`" in texts[2] and "there is no function 'gess'; there are guess" in texts[3]
    assert "the call is no JSON" in texts[4]
    assert all(message.role == "tool" for reply in replies for message in reply.messages)
    assert [reply.done for reply in replies] == [False] * 5 + [True] and reward == 1.0


def test_a_turn_without_a_call_ends_the_episode() -> None:
    _, (reply,), reward = play(tools.GuessNumber, "I give up")
    assert reply.done and not reply.messages and reward == 0.0


def test_definitions_come_from_hints_and_docstrings() -> None:
    (definition,) = tool_definitions(tool_methods(tools.GuessNumber()), "environment")
    assert definition["function"]["name"] == "guess"
    assert definition["function"]["parameters"]["properties"]["number"]["type"] == "integer"

    class Bare:
        def guess(self, number):
            return "x"

    with pytest.raises(ConfigError, match=r"guess\(number\) is no tool"):
        tool_definitions(tool_methods(Bare()), "environment")
    assert [c.name for c in tool_calls(call(1) + call(2))] == ["guess", "guess"]


def test_a_tool_may_refuse_and_gymnasiums_five_values_are_taken() -> None:
    class Shop:
        reward = 0.5

        def buy(self, item: str) -> str:
            """
            Buy something.

            Args:
                item: What to buy.
            """
            raise ToolError(f"no {item} left")

    said = '<tool_call>{"name": "buy", "arguments": {"item": "tea"}}</tool_call>'
    _, (reply,), reward = play(Shop, said)
    assert reply.messages == (Message("tool", "error: no tea left"),) and reward == 0.5

    class Gym:
        def reset(self, row: dict) -> tuple[str, dict]:
            return "begin", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
            return "end", 2.0, False, True, {}

    assert play(Gym, "a")[2] == 2.0 and play(Gym, "a")[1][0].done


def test_a_fault_is_replayed_and_then_ends_the_run_with_its_traceback() -> None:
    made: list[Any] = []

    class Flaky:
        def __init__(self) -> None:
            made.append(self)
            self.seen: list[str] = []

        def reset(self, row: dict) -> str:
            return "begin"

        def step(self, action: str) -> tuple[str, float, bool]:
            self.seen.append(action)
            if action == "b" and len(made) < self.fails:
                raise KeyError("broken")
            return f"{action} {len(self.seen)}", 1.0, action == "b"

    Flaky.fails = 2
    _, replies, reward = play(Flaky, "a", "b")
    assert replies[1].messages == (Message("user", "b 2"),) and reward == 2.0
    assert made[1].seen == ["a", "b"], "the new instance saw what the first one saw"
    Flaky.fails = 99
    with pytest.raises(UserError, match=r"environment 'e.py:E' raised KeyError: 'broken' \(2 times\)\n.*test_env"):
        play(Flaky, "a", "b")

    class Random(Flaky):
        def step(self, action: str) -> tuple[str, float, bool]:
            if action == "b":
                raise KeyError("broken")
            return f"{len(made)}", 0.0, False

    with pytest.raises(UserError, match="on a new instance"):
        play(Random, "a", "b", retries=5)


def test_an_environment_that_hangs_or_gives_nonsense_ends_the_run() -> None:
    class Hangs:
        def reset(self, row: dict) -> str:
            return "begin"

        def step(self, action: str) -> tuple[str, float, bool]:
            import time

            time.sleep(30 if action == "hang" else 0)
            return "x"  # type: ignore[return-value]

    with pytest.raises(UserError, match="did not end within 0.2 s"):
        play(Hangs, "hang", retries=0, limit_s=0.2)
    with pytest.raises(UserError, match="step gave 'x'"):
        play(Hangs, "go")


def test_an_environment_is_tried_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "envs.py"
    path.write_text(
        "class Fails:\n    def reset(self, row): return row['nothing']\n    def step(self, a): return '', 0.0, True\n"
        "class Empty: pass\n"
        "class Silent:\n    def step(self, a): return '', 0.0, True\n"
    )
    for name, words in (
        ("Fails", "KeyError"),
        ("Empty", "neither step nor"),
        ("Silent", "says nothing"),
        ("Fail", "Fails"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_environment(TasksConfig(environment=f"{path}:{name}"), TASK)
    assert check_environment(TasksConfig(environment=f"{Path(steps.__file__)}:GuessNumber"), TASK)
    assert "examples.guess_number.steps" in sys.modules


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    class Steps:
        def step(self, action: str) -> tuple[str, float, bool]:
            return "", reward, True

    class Tools:
        def look(self) -> str:
            """Look around."""
            return ""

    Tools.reward = reward
    for kind in (Steps, Tools):
        with pytest.raises(UserError, match="finite number"):
            play(kind, "x")


def test_what_is_no_class_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("NUMBER = 5\n")
    with pytest.raises(ConfigError, match="is 5"):
        check_environment(TasksConfig(environment=f"{tmp_path}/env.py:NUMBER"), TASK)
