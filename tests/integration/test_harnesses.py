"""Unmodified harnesses from PyPI at a tool-calling task: a real SGLang server parses their calls, and the rows of their
trajectories are the tokens that were sampled. What is sampled is scripted, so that the task is solved."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from transformers import AutoTokenizer

from megathunder.config.rollout import RolloutConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.rewards.grading import grade
from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.sandbox import SandboxPool
from megathunder.tasks import ChatFormat, ExactAnswer, Task, TaskFile
from megathunder.types import EndReason, Event, Rewarded, Role, TrajectoryCompleted, TrajectoryLost

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ROOT / "examples" / "policies" / "student"
TASK = Task(
    id="sum",
    kind="tools",
    prompt="How many lines has data.txt?",
    files=(TaskFile(path="data.txt", content="a\nb\nc\n"),),
    grading=ExactAnswer(answer="3"),
    max_turns=4,
)


def call(name: str, **arguments: str) -> str:
    """A tool call as Qwen and Hermes write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedServer:
    """SGLang with a script in place of what it samples: turn n answers the n-th request, every other path is real."""

    def __init__(self, turns: list[str], server: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(STUDENT)
        self.turns, self.server = turns, server
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []
        self.parsed: list[dict] = []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer.encode(self.turns[len(self.prompts)], add_special_tokens=False)
        ids.append(self.tokenizer.eos_token_id)
        self.prompts.append(body["input_ids"])
        self.sampled.append(ids)
        meta = {"finish_reason": {"type": "stop"}, "weight_version": "0"}
        meta["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def parse(self, request: web.Request) -> web.Response:
        url, headers = self.server + "/parse_function_call", {"Content-Type": "application/json"}
        data = await request.read()
        async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers) as answer:
            self.parsed.append(await answer.json())
            return web.json_response(self.parsed[-1], status=answer.status)


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory):
    """The address of one SGLang server for all harnesses."""
    loop = asyncio.new_event_loop()
    config = RolloutConfig(device="cpu", max_total_tokens=4096)
    pool = ServerPool(config, STUDENT, folder=tmp_path_factory.mktemp("server"))
    loop.run_until_complete(pool.start())
    yield pool.ready[0].url
    loop.run_until_complete(pool.close())
    loop.close()


async def attempt(scripted: ScriptedServer, script: str, folder: Path) -> list[Event]:
    """The events of one trajectory by the harness `script`."""
    app = web.Application()
    app.add_routes([web.post("/generate", scripted.generate), web.post("/parse_function_call", scripted.parse)])
    app.add_routes([web.get("/health", lambda _: web.Response())])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    command = f"{sys.executable} {ROOT}/examples/agents/{script}"
    config = RolloutConfig(agent="command", agent_command=command, urls=(url,), max_tokens=64000, max_new_tokens=4000)
    limits = SandboxConfig(warm=1)
    events: list[Event] = []
    servers, sandboxes = ServerPool(config, STUDENT, folder=folder, urls=(url,)), SandboxPool(limits)
    await sandboxes.start()
    await servers.start()
    try:
        async with Collector(
            config,
            limits,
            servers=servers,
            sandboxes=sandboxes,
            grade=grade,
            chat=ChatFormat(scripted.tokenizer),
            seed=0,
            logs=folder / "logs",
        ) as collector:
            await collector.collect(0, 0, [[TASK]], events.append)
    finally:
        await servers.close()
        await sandboxes.close()
        await runner.cleanup()
    return events


DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT = call("bash", command=f"{DONE} && wc -l < data.txt")
COUNT = call("run_command", command="wc -l < data.txt")


@pytest.mark.parametrize(
    ("package", "script", "turns", "rows"),
    [
        ("agents", "openai_agents.py", ["Let me look. " + COUNT, "3"], 1),
        ("smolagents", "smolagents_agent.py", [COUNT, call("final_answer", answer="3")], 2),
        ("minisweagent", "mini_swe_agent.py --tools", [COUNT.replace("run_command", "bash"), SUBMIT], 1),
    ],
)
def test_a_harness_solves_a_task_by_tool_calls_and_its_rows_are_the_sampled_tokens(
    package: str, script: str, turns: list[str], rows: int, tmp_path: Path, real_server: str
) -> None:
    pytest.importorskip(package)
    scripted = ScriptedServer(turns, real_server)
    events = asyncio.run(attempt(scripted, script, tmp_path))
    assert not [event for event in events if isinstance(event, TrajectoryLost)], events[-1]
    trajectory = next(event.trajectory for event in events if isinstance(event, TrajectoryCompleted))
    assert next(event.reward for event in events if isinstance(event, Rewarded)) == 1.0
    assert trajectory.end_reason is EndReason.ANSWERED and trajectory.turns == len(turns) and trajectory.tool_s > 0
    assert len(trajectory.rows) == rows and not trajectory.side_rows
    segments = [segment for row in trajectory.rows for segment in row.segments]
    assert [list(s.token_ids) for s in segments if s.role is Role.ACTION] == scripted.sampled
    before = []
    for row in trajectory.rows:
        for at, segment in enumerate(row.segments):
            if segment.role is Role.ACTION:
                before.append([token for earlier in row.segments[:at] for token in earlier.token_ids])
    assert before == scripted.prompts, "each turn was sampled after the row's own tokens"
    assert scripted.parsed[0]["calls"][0]["parameters"] == json.dumps({"command": "wc -l < data.txt"})
    prompt = scripted.tokenizer.decode(scripted.prompts[0])
    assert "<tools>" in prompt and TASK.prompt in prompt
