"""Environments of other packages behave as their packages say; skipped where a package is not installed."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from megathunder.config.tasks import TasksConfig
from megathunder.environments.build_environment import check_environment, environment_maker
from megathunder.errors import ConfigError
from megathunder.registry import REWARDS
from megathunder.tasks import Task, build_source


def tasks(**settings: Any) -> list[Task]:
    return build_source(TasksConfig(**{"size": 8, "heldout": 0, **settings})).parts[0]


def test_questions_of_reasoning_gym_are_scored_by_their_own_data_set() -> None:
    pytest.importorskip("reasoning_gym")
    options = {"datasets": "basic_arithmetic, letter_counting", "min_terms": "2"}
    with pytest.raises(ConfigError, match="letter_counting"):
        tasks(source="reasoning_gym", options=options)  # the second has no such option
    options.pop("min_terms")
    found = tasks(source="reasoning_gym", options=options)
    assert {task.kind for task in found} == {"basic_arithmetic", "letter_counting"} and len(found) == 8
    score = REWARDS.get("reasoning_gym")
    for task in found:
        right = task.row["label"]
        assert (
            score(f"so <answer>{right}</answer>", task.row, None) == score(rf"\boxed{{{right}}}", task.row, None) == 1.0
        )
        assert score("<answer>nonsense</answer>", task.row, None) < 0.5
    with pytest.raises(ConfigError, match="without tasks.options.datasets"):
        tasks(source="reasoning_gym")


def test_gymnasium_is_played_with_numbers() -> None:
    pytest.importorskip("gymnasium")
    config = TasksConfig(source="seeds", environment="gymnasium", options={"env": "Blackjack-v1"}, size=8, heldout=0)
    task = build_source(config).parts[0][0]
    assert task.row == {"seed": 0} and check_environment(config, task)
    game = environment_maker(config)()
    assert "Reply with a number from 0 to 1" in game.reset(task.row)
    assert game.step("twist") == ("Reply with a number from 0 to 1.", 0.0, False)
    assert game.step("7")[2] is False
    _, reward, done = game.step("I stick: 0")
    assert done and reward in (-1.0, 0.0, 1.0)
    with pytest.raises(ConfigError, match="no environment 'Blackjak-v1'"):
        check_environment(TasksConfig(environment="gymnasium", options={"env": "Blackjak-v1"}), task)


def test_a_game_of_textarena_ends_with_its_reward() -> None:
    pytest.importorskip("textarena")
    config = TasksConfig(source="seeds", environment="textarena", options={"env": "GuessTheNumber-v0"}, heldout=0)
    game = environment_maker(config)()
    assert "Guess The Number" in game.reset({"seed": 3})
    for number in range(1, 21):
        observation, reward, done = game.step(f"[{number}]")
        if done:
            break
    assert done and reward == 1.0, observation
    with pytest.raises(ConfigError, match="no game 'Nothing'"):
        environment_maker(TasksConfig(environment="textarena", options={"env": "Nothing"}))().reset({})


def test_openenv_sends_the_turn_in_the_field_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    class Client:
        """What is used of openenv's client; the real one needs a server."""

        def __init__(self, base_url: str) -> None:
            sent.append(base_url)

        def sync(self) -> Client:
            return self

        def connect(self) -> None: ...

        def close(self) -> None:
            sent.append("closed")

        def reset(self, **options: Any) -> Any:
            sent.append(options)
            return types.SimpleNamespace(observation={"said": "hello"}, reward=None, done=False)

        def step(self, action: dict[str, str]) -> Any:
            sent.append(action)
            return types.SimpleNamespace(observation={"said": action["words"]}, reward=0.5, done=True)

    module = types.SimpleNamespace(GenericEnvClient=Client)
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", module)
    options = {"url": "http://127.0.0.1:1", "action": "words", "observation": "said"}
    config = TasksConfig(source="seeds", environment="openenv", options=options)
    session = environment_maker(config)()
    assert session.reset({"seed": 4}) == "hello" and session.step("hi") == ("hi", 0.5, True)
    session.close()
    assert sent == ["http://127.0.0.1:1", {"seed": 4}, {"words": "hi"}, "closed"]
    with pytest.raises(ConfigError, match="missing a required argument: 'url'"):
        environment_maker(TasksConfig(environment="openenv"))
