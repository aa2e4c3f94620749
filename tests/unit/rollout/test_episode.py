"""The agent loop and the collector: token-exact rows, ends with reasons, replay and loss."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from aiohttp import web
from rollout_fakes import (
    TASK,
    ByteChat,
    FakeEngine,
    FakeSandboxes,
    answer,
    collect,
    exact,
    only,
    says,
    scripted,
    serving,
    settings,
)

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure
from megathunder.rollout.agents.builtin_agent import turn_seed
from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.sandbox import ExecResult
from megathunder.types import (
    EndReason,
    Rewarded,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)


def test_a_row_is_the_exact_chain_of_sampled_and_encoded_tokens(tmp_path):
    events, _, bodies = collect(scripted(says("ls"), says("submit 42")), tmp_path)
    done = only(events, TrajectoryCompleted)[0].trajectory
    expected = [1, *b"go", *says("ls"), 2, *b"LS", 3, *says("submit 42")]
    assert list(done.rows[0].token_ids) == expected
    assert bodies[1]["input_ids"] == expected[: -len(says("submit 42"))]
    mask = [0] * 3 + [1] * 3 + [0] * 4 + [1] * 10
    assert list(done.rows[0].loss_mask) == mask
    assert done.rows[0].policy_versions == (0,) * sum(mask)
    assert done.end_reason is EndReason.ANSWERED and done.turns == 2
    assert only(events, Rewarded)[0].reward == 1.0
    assert [segment for turn in only(events, TurnCompleted) for segment in turn.segments] == list(done.rows[0].segments)


@pytest.mark.parametrize(
    ("turns", "changes", "reason", "ran"),
    [
        ([says("rm -rf x", end=False)], {}, EndReason.MALFORMED, []),
        ([says("a"), says("b"), says("c")], {}, EndReason.MAX_TURNS, ["a", "b", "c"]),
        ([says("a"), says("b"), says("c")], {"max_tokens": 8}, EndReason.MAX_TOKENS, ["a"]),
        ([says("ls", end=False)], {"max_tokens": 5}, EndReason.MAX_TOKENS, []),
    ],
)
def test_every_end_has_its_reason_and_earns_nothing(tmp_path, turns, changes, reason, ran):
    events, sandboxes, _ = collect(scripted(*turns), tmp_path, **changes)
    assert only(events, TrajectoryCompleted)[0].trajectory.end_reason is reason
    assert [command for sandbox in sandboxes.leased for command in sandbox.ran] == ran
    assert only(events, Rewarded)[0].reward == 0.0
    assert all(sandbox.closed for sandbox in sandboxes.leased)


def test_a_row_never_exceeds_max_tokens_and_never_ends_in_an_observation(tmp_path):
    events, _, _ = collect(scripted(says("a"), says("b"), says("c")), tmp_path, max_tokens=8)
    row = only(events, TrajectoryCompleted)[0].trajectory.rows[0]
    assert len(row.token_ids) <= 8 and row.loss_mask[-1] == 1


def test_the_policy_is_told_that_a_limit_ended_its_command_however_much_it_printed(tmp_path):
    class Stopped(FakeSandboxes):
        async def lease(self, files, image):
            sandbox = await super().lease(files)
            whole = sandbox.exec

            async def cut(command, deadline_s):
                result = await whole(command, deadline_s)
                return ExecResult(output=result.output, exit_status=137, wall_s=1.0, cpu_s=0.0, fault="timeout")

            sandbox.exec = cut
            return sandbox

    sandboxes = Stopped(run=lambda command: "x" * 99)
    events, _, _ = collect(
        scripted(says("yes"), says("submit 42")), tmp_path, sandboxes=sandboxes, observation_characters=4
    )
    row = only(events, TrajectoryCompleted)[0].trajectory.rows[0]
    assert bytes(row.segments[2].token_ids) == b"\x02xxxx\nstopped: timeout\x03"


def test_the_deadline_ends_a_trajectory_that_a_slow_server_holds(tmp_path):
    async def slow(body):
        await asyncio.sleep(10)

    events, _, _ = collect(slow, tmp_path, deadline_s=0.4)
    assert only(events, TrajectoryCompleted)[0].trajectory.end_reason is EndReason.DEADLINE


def test_the_deadline_of_a_trajectory_on_a_server_that_hangs_is_the_machinerys_fault(tmp_path, monkeypatch):
    turns, seen = scripted(says("submit 42")), []

    async def script(body):
        seen.append(body)
        await asyncio.sleep(10 if len(seen) == 1 else 0)
        return turns(body)

    async def hangs_once(engine, request):
        engine.questions += 1
        return web.Response(status=503 if engine.questions == 1 else 200)

    monkeypatch.setattr(FakeEngine, "health_generate", hangs_once)
    events, _, _ = collect(script, tmp_path, deadline_s=0.4)
    assert only(events, TrajectoryCompleted)[0].trajectory.end_reason is EndReason.ANSWERED and len(seen) == 2
    assert only(events, Rewarded)[0].reward == 1.0


def test_a_task_may_end_an_attempt_before_the_run_does(tmp_path):
    async def slow(body):
        await asyncio.sleep(10)

    hurried = msgspec.structs.replace(TASK, agent_limit_s=0.4)
    events, _, _ = collect(slow, tmp_path, groups=((hurried,),), deadline_s=30.0)
    assert only(events, TrajectoryCompleted)[0].trajectory.end_reason is EndReason.DEADLINE


def test_a_failed_request_is_repeated_with_the_same_tokens_and_seed(tmp_path):
    turns = scripted(says("ls"), says("submit 42"))
    seen = []

    def script(body):
        seen.append(body)
        return web.Response(status=503) if len(seen) in (2, 3, 4, 5) else turns(body)

    events, _, _ = collect(script, tmp_path)
    assert len(only(events, TurnCompleted)) == 2 and only(events, Rewarded)[0].reward == 1.0
    assert len({(tuple(b["input_ids"]), b["sampling_params"]["sampling_seed"]) for b in seen}) == 2


def test_a_dead_sandbox_is_replayed_when_it_shows_the_same(tmp_path):
    sandboxes = FakeSandboxes(faults=({1}, {2}))
    events, _, _ = collect(scripted(says("a"), says("b"), says("submit 42")), tmp_path, sandboxes=sandboxes)
    assert only(events, Rewarded)[0].reward == 1.0 and not only(events, TrajectoryLost)
    assert [s.ran for s in sandboxes.leased] == [["a"], ["a", "b"]]


def test_a_replay_that_shows_something_else_loses_the_trajectory(tmp_path):
    clock = iter(range(9))
    sandboxes = FakeSandboxes(run=lambda command: str(next(clock)), faults=({1},))
    events, _, _ = collect(scripted(says("a"), says("b"), says("submit 42")), tmp_path, sandboxes=sandboxes)
    assert isinstance(events[-1], TrajectoryLost) and "showed" in events[-1].reason
    assert not only(events, Rewarded) and not only(events, TrajectoryCompleted)


def test_a_grader_that_fails_once_is_asked_again_and_one_that_always_fails_loses_the_trajectory(tmp_path):
    calls = []

    async def grade(task, sandbox, text, pool, budget_s):
        calls.append(sandbox)
        if len(calls) < 2:
            raise InfrastructureFailure("no place")
        return 1.0

    async def never(task, sandbox, text, pool, budget_s):
        calls.append(sandbox)
        raise InfrastructureFailure("no place")

    events, _, _ = collect(scripted(says("submit 42")), tmp_path, grade=grade)
    assert only(events, Rewarded)[0].reward == 1.0 and len(calls) == 2
    asked = len(calls)
    events, _, _ = collect(scripted(says("submit 42")), tmp_path, grade=never, max_retries=9)
    assert len(calls) == asked + 2, "what fails twice in the same way is not tried a third time"
    assert isinstance(events[-1], TrajectoryLost) and not only(events, Rewarded)


@pytest.mark.parametrize("given", [None, float("nan"), float("inf"), "1.0"])
def test_a_reward_is_a_finite_number_or_the_trajectory_is_lost_to_its_grader(tmp_path, given):
    async def grade(task, sandbox, text, pool, budget_s):
        return given

    events, _, _ = collect(scripted(says("submit 42")), tmp_path, grade=grade, max_retries=1)
    assert not only(events, Rewarded) and "not a finite number" in only(events, TrajectoryLost)[0].reason


def test_the_time_of_the_grader_is_measured(tmp_path):
    async def grade(task, sandbox, text, pool, budget_s):
        await asyncio.sleep(0.2)
        return 1.0

    events, _, _ = collect(scripted(says("submit 42")), tmp_path, grade=grade)
    done, rewarded = only(events, TrajectoryCompleted)[0], only(events, Rewarded)[0]
    assert 0.2 <= rewarded.verifier_s < 2 and rewarded.at_s >= done.at_s + 0.2


def test_graders_take_turns_and_waiting_for_one_is_outside_their_limit(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("megathunder.rollout.agents.task_grader.GRADING_GRACE_S", 0.2)
    running, most = 0, 0

    async def grade(task, sandbox, text, pool, budget_s):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.15)
        running -= 1
        return 1.0

    limits = SandboxConfig(max_grading=2, grading_budget_s=0.2)
    events, _, _ = collect(scripted(says("submit 42")), tmp_path, groups=((TASK,) * 8,), grade=grade, limits=limits)
    assert most == 2 and [e.reward for e in only(events, Rewarded)] == [1.0] * 8
    assert not only(events, TrajectoryLost) and not caplog.records


def test_a_grader_that_uses_all_its_time_is_named_once(tmp_path, caplog):
    async def grade(task, sandbox, text, pool, budget_s):
        await asyncio.sleep(1.1 * budget_s)
        return 0.0

    limits = SandboxConfig(grading_budget_s=0.1)
    collect(scripted(says("submit 42")), tmp_path, groups=((TASK,) * 3,), grade=grade, limits=limits)
    (said,) = caplog.messages
    assert TASK.id in said and "sandbox.grading_budget_s = 0.1" in said


@pytest.mark.parametrize(("bad", "trained"), [(1, True), (9, False)])
def test_bad_evidence_is_asked_again_and_twice_in_one_way_loses_the_trajectory(tmp_path, bad, trained, monkeypatch):
    monkeypatch.setattr("megathunder.rollout.servers.engine.RETRY_WAIT_S", 0.01)
    turns, seen = scripted(says("submit 42")), []

    def script(body):
        seen.append(tuple(body["input_ids"]))
        return answer([300]) if len(seen) <= bad else turns(body)

    (tmp_path / "config.json").write_text('{"vocab_size": 300}')
    events, _, _ = collect(script, tmp_path, max_retries=5)
    assert len(seen) == 2 and len(set(seen)) == 1
    if trained:
        assert only(events, Rewarded)[0].reward == 1.0
    else:
        assert "token id 300 of a vocabulary of 300" in only(events, TrajectoryLost)[0].reason


def test_any_end_token_of_the_model_ends_a_turn(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 199]}')
    turns = iter([[*b"ls", 199], [*b"submit 42", 0]])
    events, sandboxes, bodies = collect(lambda body: answer(next(turns)), tmp_path)
    assert only(events, TrajectoryCompleted)[0].trajectory.end_reason is EndReason.ANSWERED
    assert sandboxes.leased[0].ran == ["ls"] and only(events, Rewarded)[0].reward == 1.0
    assert bodies[0]["sampling_params"]["stop_token_ids"] == [0, 199]
    assert bodies[1]["input_ids"][:6] == [1, *b"go", *b"ls", 199], "the token that was sampled stays"


def test_tokens_of_another_version_are_no_result(tmp_path):
    events, _, _ = collect(scripted(says("submit 42")), tmp_path, version=5, max_retries=1)
    assert not only(events, TurnCompleted)
    assert "version [0], wanted 5" in only(events, TrajectoryLost)[0].reason


def test_every_turn_is_scored_by_the_teacher(tmp_path):
    events, _, _ = collect(scripted(says("ls"), says("submit 42")), tmp_path, teacher=True)
    scores = {event.turn: event.teacher_logprobs for event in only(events, TurnScored)}
    assert scores == {0: (-2.0,) * 3, 1: (-2.0,) * 10}


def test_limits_hold_and_no_trajectory_is_forgotten(tmp_path):
    live, peak = [], []

    async def script(body):
        live.append(1)
        peak.append(len(live))
        await asyncio.sleep(0.01)
        live.pop()
        return answer(says("submit 42"))

    groups = tuple((TASK,) * 5 for _ in range(4))
    events, _, _ = collect(script, tmp_path, groups=groups, max_concurrent=3)
    assert max(peak) == 3
    assert {event.id for event in only(events, Rewarded)} == {TrajectoryId(4, b, i) for b in range(4) for i in range(5)}


def test_the_temperature_of_an_evaluation_replaces_the_configured_one(tmp_path):
    async def main():
        async with serving(scripted(says("submit 42"))) as fake:
            pool = ServerPool(settings(), tmp_path, folder=tmp_path, urls=(fake.address.url,))
            await pool.start()
            async with Collector(
                settings(),
                SandboxConfig(),
                servers=pool,
                sandboxes=FakeSandboxes(),
                grade=exact,
                chat=ByteChat(),
                seed=1,
            ) as collector:
                await collector.collect(0, 0, ((TASK,),), lambda event: None, temperature=0.0)
            await pool.close()
            return fake.engine.bodies[0]["sampling_params"]["temperature"]

    assert asyncio.run(main()) == 0.0


def test_seeds_differ_by_run_trajectory_and_turn():
    seeds = {
        turn_seed(seed, TrajectoryId(u, g, i), turn)
        for seed in range(3)
        for u in range(3)
        for g in range(3)
        for i in range(3)
        for turn in range(3)
    }
    assert len(seeds) == 3**5 and max(seeds) < 1 << 62


def test_slow_tools_take_the_same_time_whenever_the_same_trajectory_runs(tmp_path):
    def tool_s(folder, **changes):
        folder.mkdir()
        events, _, _ = collect(scripted(says("ls"), says("submit 42")), folder, **changes)
        return only(events, TrajectoryCompleted)[0].trajectory.tool_s

    first, again = (tool_s(tmp_path / name, command_latency_s=0.01) for name in "ab")
    assert first == again > tool_s(tmp_path / "c")
    assert tool_s(tmp_path / "d", command_latency_s=0.02) > first


def test_any_exception_of_a_grader_costs_its_trajectory_and_not_the_run(tmp_path):
    asked = []

    async def grade(task, sandbox, answer_text, pool, budget_s):
        asked.append(task)
        if len(asked) == 1:
            raise ValueError("cut off")
        return 1.0

    events, _, _ = collect(scripted(says("submit 42")), tmp_path, groups=((TASK,) * 3,), grade=grade)
    (lost,) = only(events, TrajectoryLost)
    assert lost.reason == "ValueError: cut off"
    assert [event.reward for event in only(events, Rewarded)] == [1.0, 1.0]
