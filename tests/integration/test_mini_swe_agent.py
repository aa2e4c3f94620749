"""mini-swe-agent from PyPI behind the endpoint: it mends a shipped repository by a script, and it is trained."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp import web
from jobs import job
from transformers import AutoTokenizer

from megathunder.config.rollout import RolloutConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.rewards.grading import grade
from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.sandbox import SandboxPool
from megathunder.tasks import ChatFormat, Task, build_source
from megathunder.tasks.swe import read_instances, read_repository_tasks
from megathunder.types import EndReason, Rewarded, TrajectoryCompleted, TrajectoryLost

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ROOT / "examples" / "policies" / "student"
TASKS = ROOT / "examples" / "tasks" / "swe"
DRIVER = f"{sys.executable} {ROOT}/examples/agents/mini_swe_agent.py"
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def turn_of(thought: str, command: str) -> str:
    """In mini-swe-agent's own form."""
    return f"THOUGHT: {thought}\n\n```mswea_bash_command\n{command}\n```"


class ScriptedPolicy:
    """What SGLang would sample: turn n of the script answers the n-th request."""

    def __init__(self, turns: list[str]) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(STUDENT)
        self.turns, self.prompts = turns, []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = self.turns[len(self.prompts)]
        self.prompts.append(body["input_ids"])
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0"}
        return web.json_response(
            {"output_ids": ids, "meta_info": meta | {"output_token_logprobs": [[-1.0, i, None] for i in ids]}}
        )


def repository() -> Task:
    """The first shipped one."""
    return read_repository_tasks(TasksConfig(source="swe", path=str(TASKS), max_turns=8))[0][0]


async def attempt(turns: list[str], command: str, tmp_path: Path, task: Task) -> tuple[list, ScriptedPolicy]:
    """The events of one attempt; an empty command is the built-in loop."""
    policy = ScriptedPolicy(turns)
    app = web.Application()
    app.add_routes([web.post("/generate", policy.generate), web.get("/health", lambda _: web.Response())])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = RolloutConfig(
        agent="command" if command else "builtin",
        agent_command=command,
        urls=(url,),
        max_tokens=16000,
        max_new_tokens=4000,
        request_timeout_s=20.0,
    )
    limits = SandboxConfig(warm=1, grading_budget_s=60.0)
    events, servers, sandboxes = [], ServerPool(config, STUDENT, folder=tmp_path, urls=(url,)), SandboxPool(limits)
    await sandboxes.start()
    await servers.start()
    try:
        chat = ChatFormat(policy.tokenizer)
        async with Collector(
            config, limits, servers=servers, sandboxes=sandboxes, grade=grade, chat=chat, seed=0
        ) as collector:
            await collector.collect(0, 0, [[task]], events.append)
    finally:
        await servers.close()
        await sandboxes.close()
        await runner.cleanup()
    assert not sandboxes.leaks()
    return events, policy


def test_mini_swe_agent_mends_a_repository_through_the_endpoint_and_every_token_is_recorded(tmp_path):
    task = repository()
    bug = next(i for i in read_instances(TASKS / "train.jsonl") if i.instance_id == task.id).patch
    turns = [
        turn_of("look around", "ls; id -u"),
        "I forgot how to answer.",
        turn_of("undo the change", f"cat > /tmp/bug.diff <<'END'\n{bug}END\npatch -R -p1 < /tmp/bug.diff"),
        turn_of("done", DONE),
    ]
    events, policy = asyncio.run(attempt(turns, DRIVER, tmp_path, repository()))
    assert not [event for event in events if isinstance(event, TrajectoryLost)], events[-1]
    trajectory = next(e.trajectory for e in events if isinstance(e, TrajectoryCompleted))
    assert next(e.reward for e in events if isinstance(e, Rewarded)) == 1.0
    assert trajectory.end_reason is EndReason.ANSWERED and trajectory.turns == 4 and trajectory.tool_s > 0
    (row,) = trajectory.rows  # the harness's own conversation never made a token anew
    sampled = [policy.tokenizer.encode(t, add_special_tokens=False) + [policy.tokenizer.eos_token_id] for t in turns]
    assert [t for t, m in zip(row.token_ids, row.loss_mask) if m] == [t for turn in sampled for t in turn]
    for prompt in policy.prompts:
        assert list(row.token_ids[: len(prompt)]) == prompt
    seen = policy.tokenizer.decode(row.token_ids)
    assert task.request.splitlines()[0] in seen and "submit done" not in seen
    assert "Format error" in seen and "<returncode>0</returncode>" in seen
    assert row.policy_versions == (0,) * trajectory.sampled_tokens


def test_an_update_is_trained_on_what_mini_swe_agent_did_with_a_real_server(tmp_path):
    settings = {"run.updates": 1, "tasks.size": 4096, "rollout.deadline_s": 60.0}
    with job(tmp_path, "mini", config="mini_swe_agent", **settings) as trained:
        assert trained.end(250) == 0, trained.output()
        rows = trained.rows()
        assert not trained.orphans()
    assert [row["trajectories"] for row in rows] == [12]
    assert sum(row["trained_tokens"] for row in rows) > 0 and sum(row["stepped"] for row in rows) > 0, rows
    assert max(row["policy_lag_max"] for row in rows) == 0
    assert max(row["engine_learner_logprob_diff_max"] for row in rows) < 1e-4


def test_a_policy_that_is_spoken_to_in_its_own_words_meets_the_tokens_of_the_built_in_loop(tmp_path):
    (task,) = build_source(TasksConfig(kinds=("read",), size=1)).take(1)
    turns = ["nonsense", "true", f"cat {task.prompt.split()[-1]}", f"submit {task.grading.answer}"]
    config = f" --config {ROOT}/examples/agents/shell_policy.yaml"
    found = [asyncio.run(attempt(turns, command, tmp_path, task))[0] for command in ("", DRIVER + config)]
    ended = [next(e.trajectory for e in events if isinstance(e, TrajectoryCompleted)) for events in found]
    assert ended[0].rows == ended[1].rows and ended[0].turns == ended[1].turns == 4
    assert [next(e.reward for e in events if isinstance(e, Rewarded)) for events in found] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [(["no"] * 3, EndReason.MALFORMED), ([turn_of("wait", "true")] * 9, EndReason.MAX_TURNS)],
)
def test_a_harness_that_gives_up_or_runs_into_a_limit_ends_with_that_reason(tmp_path, turns, reason):
    events, _ = asyncio.run(attempt(turns, DRIVER, tmp_path, repository()))
    assert not [event for event in events if isinstance(event, TrajectoryLost)], events[-1]
    assert next(e.trajectory for e in events if isinstance(e, TrajectoryCompleted)).end_reason is reason
    assert next(e.reward for e in events if isinstance(e, Rewarded)) == 0.0
