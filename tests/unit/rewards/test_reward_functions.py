"""Laws of [reward]: how functions are called, what they may give, and that a fault is never a reward of 0."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from megathunder.config.reward import RewardConfig
from megathunder.errors import ConfigError, InfrastructureFailure, UserError
from megathunder.rewards.check_rewards import check_rewards
from megathunder.rewards.episode import FinishedEpisode, Score
from megathunder.rewards.scorer import RewardScorer
from megathunder.tasks import ExactAnswer, RewardFunction, Task

CODE = """
import asyncio, os, threading, time
calls = []

def plain(completion, row, trajectory):
    calls.append(threading.current_thread().name)
    return float(completion == row["label"])

async def waits(completion, row, trajectory):
    await asyncio.sleep(0.01)
    return 0.5

def parts(completion, row, trajectory):
    return {"right": 1.0, "short": 0.25}

def total(completion, row, trajectory):
    return {"right": 1.0, "short": 0.25, "reward": 2.0}

sizes = []
def batch(completions, rows, trajectories):
    sizes.append(len(completions))
    time.sleep(0.05)
    return [float(len(c)) for c in completions]

def short_batch(completions, rows, trajectories):
    return []

def nan(completion, row, trajectory):
    return float("nan")

def text(completion, row, trajectory):
    return "1.0"

def none(completion, row, trajectory):
    return None

def raises(completion, row, trajectory):
    calls.append("raises")
    return row["no such column"]

def hangs(completion, row, trajectory):
    time.sleep(60)

def kills(completion, row, trajectory):
    os._exit(3)

def pid(completion, row, trajectory):
    print("to standard output, which is no answer")
    return {"pid": os.getpid(), "turns": trajectory.turns}

def two(completion, row):
    return 0.0

def exits(completion, row, trajectory):
    raise SystemExit(0)

async def exits_waiting(completion, row, trajectory):
    raise SystemExit(0)

def cancels(completion, row, trajectory):
    raise asyncio.CancelledError

async def cancels_waiting(completion, row, trajectory):
    raise asyncio.CancelledError

async def cancels_itself(completion, row, trajectory):
    asyncio.current_task().cancel()
    await asyncio.sleep(1)

def forks(completion, row, trajectory):
    return 7.0 if os.fork() == 0 else float(len(completion))

def array(completion, row, trajectory):
    import numpy
    return numpy.array([1.0, 2.0])

def huge(completion, row, trajectory):
    return 10**400

def beyond(completion, row, trajectory):
    return {"a": 1e308, "b": 1e308}

def decimal(completion, row, trajectory):
    import decimal
    return decimal.Decimal("0.5")

def errors(completions, rows, trajectories):
    return [StopIteration() for _ in completions]

def label(completion, row, trajectory):
    return float(row["label"] - 10**30)
"""
TASK = Task(id="t-0", kind="t", prompt="q", files=(), grading=RewardFunction(), row={"label": "5"}, single_turn=True)


def episode(completion: str = "5", **changes: object) -> FinishedEpisode:
    known = {"task_id": "t-0", "kind": "t", "prompt": "q", "completion": completion, "answer": None, "messages": ()}
    return FinishedEpisode(**{**known, "turns": 2, "end_reason": "answered", "sampled_tokens": 8, **changes})


@pytest.fixture
def code(tmp_path: Path) -> str:
    path = tmp_path / "rewards.py"
    path.write_text(CODE)
    return str(path)


async def no_grader() -> float:
    raise AssertionError("functions decide")


def scores(
    *functions: str, episodes: tuple[FinishedEpisode, ...] = (episode(),), retries: int = 1, **settings: object
) -> list[Score]:
    async def main() -> list[Score]:
        async with RewardScorer(RewardConfig(function=functions, **settings), retries=retries) as scorer:
            return await asyncio.gather(*(scorer.score(TASK, lambda e=e: e, None, no_grader) for e in episodes))

    return asyncio.run(main())


def test_functions_give_numbers_or_parts_and_several_are_weighted(code: str) -> None:
    assert scores(f"{code}:plain") == [Score(1.0, {})]
    assert scores(f"{code}:waits") == [Score(0.5, {})]
    assert scores(f"{code}:parts") == [Score(1.25, {"right": 1.0, "short": 0.25})]
    assert scores(f"{code}:total")[0].reward == 2.0
    (both,) = scores(f"{code}:plain", f"{code}:parts", weights=(2.0, -1.0))
    assert both == Score(0.75, {"plain": 1.0, "parts": 1.25, "parts.right": 1.0, "parts.short": 0.25})


def test_a_batch_function_is_asked_for_all_that_wait(code: str) -> None:
    episodes = tuple(episode("x" * i) for i in range(9))
    assert [s.reward for s in scores(f"{code}:batch", episodes=episodes, batch_size=4)] == [*map(float, range(9))]
    from megathunder.registry import REWARDS

    assert max(REWARDS.get(f"{code}:batch").__globals__["sizes"]) == 4
    with pytest.raises(UserError, match="asked for 1 trajectories and gave list of 0"):
        scores(f"{code}:short_batch")


def test_user_code_never_runs_on_the_event_loop(code: str) -> None:
    scores(f"{code}:plain")
    from megathunder.registry import REWARDS

    names = REWARDS.get(f"{code}:plain").__globals__["calls"]
    assert names and threading.main_thread().name not in names


@pytest.mark.parametrize("name", ["nan", "text", "none", "array", "huge", "beyond", "errors"])
def test_what_is_no_finite_number_ends_the_run(code: str, name: str) -> None:
    with pytest.raises(UserError, match=r"rewards.py:\w+' on task t-0: (it gave|the sum of)"):
        scores(f"{code}:{name}")


@pytest.mark.parametrize("processes", [0, 1])
def test_an_exception_ends_the_run_after_the_retries_with_its_traceback(code: str, processes: int) -> None:
    with pytest.raises(UserError, match=r"KeyError: 'no such column' \(3 times\)\n.*rewards.py") as raised:
        scores(f"{code}:raises", retries=2, processes=processes)
    assert 'return row["no such column"]' in str(raised.value)


def test_decimals_are_numbers_and_a_weighted_sum_must_be_one(code: str) -> None:
    assert scores(f"{code}:decimal")[0].reward == 0.5
    with pytest.raises(UserError, match="the sum of"):
        scores(f"{code}:plain", f"{code}:plain", weights=(1e308, 1e308))


@pytest.mark.parametrize("name", ["exits", "exits_waiting", "cancels", "cancels_waiting", "cancels_itself"])
def test_what_would_end_a_process_or_cancel_a_task_is_a_fault_of_one_call(code: str, name: str) -> None:
    started_s = time.monotonic()
    with pytest.raises(UserError, match=r"raised RuntimeError: (SystemExit: 0|CancelledError) \(2 times\)"):
        scores(f"{code}:{name}", timeout_s=30.0)
    assert time.monotonic() - started_s < 20


def test_a_process_whose_function_exits_or_forks_answers_once_per_call(code: str) -> None:
    with pytest.raises(UserError, match="raised SystemExit: 0"):
        scores(f"{code}:exits", processes=1, retries=0)
    many = tuple(episode("x" * length) for length in range(6))
    assert [score.reward for score in scores(f"{code}:forks", episodes=many, processes=1)] == [*range(6)]


def test_integers_of_any_size_reach_a_reward_process(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASK.row, "label", 10**30 + 2**60)
    assert scores(f"{code}:label", processes=1)[0].reward == 2.0**60


@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_that_hangs_is_a_fault_and_keeps_nothing_alive(code: str, processes: int) -> None:
    from megathunder.rewards import processes as module

    started_s, module.START_S = time.monotonic(), 2.0
    with pytest.raises(UserError, match="did not end within"):
        scores(f"{code}:hangs", retries=0, processes=processes, timeout_s=0.2)
    assert time.monotonic() - started_s < 10


def test_functions_run_in_processes_where_that_is_asked(code: str) -> None:
    import os

    (score,) = scores(f"{code}:pid", processes=1)
    assert score.parts["pid"] != os.getpid() and score.parts["turns"] == 2
    assert scores(f"{code}:batch", processes=1)[0].reward == 1.0
    with pytest.raises(UserError, match="ended its process with status 3"):
        scores(f"{code}:kills", processes=1, retries=0)


def test_without_functions_the_environment_or_the_grader_decides() -> None:
    async def grade() -> float:
        return 0.25

    async def main() -> list[float]:
        async with RewardScorer(RewardConfig()) as scorer:
            return [
                (await scorer.score(TASK, episode, None, grade, 3.0)).reward,
                (await scorer.score(TASK, episode, None, grade)).reward,
            ]

    assert asyncio.run(main()) == [3.0, 0.25]


# ------------------------------------------------------------------------------------- built-in functions


def builtin(name: str, completion: str, row: dict, **settings: object) -> float:
    async def main() -> float:
        task = Task(id="t", kind="t", prompt="q", files=(), grading=ExactAnswer(answer="5"), row=row)
        async with RewardScorer(RewardConfig(function=(name,), **settings)) as scorer:
            return (await scorer.score(task, lambda: episode(completion), None, no_grader)).reward

    return asyncio.run(main())


def test_built_in_functions(tmp_path: Path) -> None:
    assert builtin("exact", " 5\n", {"label": 5}) == 1.0
    assert builtin("exact", "6", {"answer": "5"}) == 0.0
    assert builtin("exact", "5", {"reward_model": {"ground_truth": "5"}}) == 1.0
    assert builtin("exact", "5", {"gold": {"a": "5"}}, label="gold.a") == 1.0
    assert builtin("boxed", r"so \boxed{1/2}", {"answer": r"We halve it. #### \frac{1}{2}"}) == 1.0
    assert builtin("boxed", "1/2", {"answer": "1/2"}) == 0.0
    assert builtin("regex", "Answer: 4. Answer: 5.", {"label": "5"}, pattern=r"Answer: (\d+)") == 1.0
    assert builtin("regex", "<think>", {}, pattern="<think>") == 1.0
    assert builtin("length", "", {}, target_tokens=4) == 0.5
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "required": ["x"]}')
    assert builtin("json_schema", 'here:\n```json\n{"x": 1}\n```', {}, json_schema=str(schema)) == 1.0
    assert builtin("json_schema", "{}", {}, json_schema=str(schema)) == 0.0
    assert builtin("json_schema", "[" * 100000, {}, json_schema=str(schema)) == 0.0
    with pytest.raises(UserError, match="no label; its columns are x"):
        builtin("exact", "5", {"x": 1})


def test_a_judge_is_asked_once_and_its_silence_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from aiohttp import web

    from megathunder.rewards import judge

    monkeypatch.setattr(judge, "WAIT_S", 0.0)
    asked: list[str] = []

    async def complete(request: web.Request) -> web.Response:
        text = (await request.json())["messages"][0]["content"]
        asked.append(text)
        if "silent" in text:
            await asyncio.sleep(5)
        said = "I cannot say" if "odd" in text else "0.75"
        return web.json_response({"choices": [{"message": {"content": said}}]})

    async def main() -> tuple[list[Score], list[str]]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        settings = RewardConfig(function=("judge",), judge_url=url, judge_model="m", judge_timeout_s=0.3)
        async with RewardScorer(settings) as scorer:
            good = await asyncio.gather(
                *(scorer.score(TASK, lambda: episode("fine"), None, no_grader) for _ in range(4))
            )
            failures = []
            for text in ("odd", "silent"):
                with pytest.raises(InfrastructureFailure) as failure:
                    await scorer.score(TASK, lambda text=text: episode(text), None, no_grader)
                failures.append(str(failure.value))
        await runner.cleanup()
        return good, failures

    good, failures = asyncio.run(main())
    assert [s.reward for s in good] == [0.75] * 4
    assert sum("fine" in text for text in asked) == 1, "equal questions are asked once"
    assert "without a number" in failures[0] and "TimeoutError" in failures[1]


# ---------------------------------------------------------------------------------- before anything starts

REFUSED = {
    "missing file": ("nowhere.py:score", r"does not exist"),
    "missing name": ("{code}:plan", r"did you mean 'plain'"),
    "signature": ("{code}:two", r"has the signature \(completion, row\)"),
    "not a name": ("exct", r"did you mean 'exact'"),
    "NaN": ("{code}:nan", r"tried with an empty completion: it gave nan"),
    "text": ("{code}:text", r"it gave '1.0'"),
    "None": ("{code}:none", r"it gave None"),
    "raises": ("{code}:raises", r"KeyError"),
    "hangs": ("{code}:hangs", r"did not end within 1 s"),
    "short batch": ("{code}:short_batch", r"0 results for 1 completion"),
    "no label": ("boxed", r"no label"),
    "no pattern": ("regex", r"without reward.pattern"),
    "no judge": ("judge", r"without reward.judge_url"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_reward_is_refused_within_two_seconds(case: str, code: str) -> None:
    reference, words = REFUSED[case]
    task = Task(id="t", kind="t", prompt="q", files=(), grading=RewardFunction(), row={"x": 1})
    started_s = time.monotonic()
    with pytest.raises(ConfigError, match=words):
        check_rewards(RewardConfig(function=(reference.format(code=code),)), task, decides_elsewhere=False)
    assert time.monotonic() - started_s < 2.0


def test_tasks_without_any_reward_and_wrong_weights_are_refused(code: str) -> None:
    with pytest.raises(ConfigError, match="function is empty"):
        check_rewards(RewardConfig(), TASK, decides_elsewhere=False)
    check_rewards(RewardConfig(), TASK, decides_elsewhere=True)
    with pytest.raises(ConfigError, match="2 numbers, reward.function 1"):
        check_rewards(RewardConfig(function=("exact",), weights=(1.0, 2.0)), TASK, decides_elsewhere=False)
