"""An HTTP server that speaks as much SGLang as the client needs, and a sandbox of plain Python."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace

from aiohttp import web

from megathunder.config.rollout import RolloutConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure
from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.tasks import ExactAnswer, Message, Task
from megathunder.types import ServerAddress

Script = Callable[[dict], Awaitable[web.Response] | web.Response]


def answer(tokens: list[int], *, version: str = "0", finish: str = "stop", **meta: object) -> web.Response:
    """What /generate answers for `tokens`, each with log-probability -1."""
    info = {
        "finish_reason": {"type": finish},
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "input_token_logprobs": [],
        **meta,
    }
    return web.json_response({"text": "", "output_ids": tokens, "meta_info": info})


class FakeEngine:
    """`script(body)` answers POST /generate; `bodies` holds what was asked."""

    def __init__(self, script: Script) -> None:
        self.script, self.bodies, self.parsers = script, [], []
        self.healthy, self.hangs, self.questions = True, False, 0

    async def generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.bodies.append(body)
        result = self.script(body)
        return await result if asyncio.iscoroutine(result) else result

    async def parse(self, request: web.Request) -> web.Response:
        """Calls as Hermes writes them, without the names that no tool has."""
        body = json.loads(await request.read())
        self.parsers.append(body["tool_call_parser"])
        names = {tool["function"]["name"] for tool in body["tools"]}
        head, *found = body["text"].split("<tool_call>")
        calls = []
        for part in found:
            with contextlib.suppress(ValueError):
                call = json.loads(part.partition("</tool_call>")[0])
                calls.append({"name": call["name"], "parameters": json.dumps(call["arguments"]), "tool_index": 0})
        known = [call for call in calls if call["name"] in names]
        return web.json_response({"normal_text": head.strip() if found else body["text"], "calls": known})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def health_generate(self, _: web.Request) -> web.Response:
        self.questions += 1
        return web.Response(status=200 if self.healthy and not self.hangs else 503)


@contextlib.asynccontextmanager
async def serving(script: Script, name: str = "rollout-0") -> AsyncIterator[SimpleNamespace]:
    """A listening fake: `.address`, `.engine`."""
    engine = FakeEngine(script)
    app = web.Application()
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/parse_function_call", engine.parse)
    app.router.add_get("/health", engine.health)
    app.router.add_get("/health_generate", engine.health_generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(engine=engine, address=ServerAddress(name=name, url=f"http://127.0.0.1:{port}"))
    finally:
        await runner.cleanup()


class FakeSandbox:
    """Runs commands as entries of a table of functions; fails on the command numbers in `faults`."""

    def __init__(self, run: Callable[[str], str], faults: set[int]) -> None:
        self.run, self.faults, self.ran, self.closed = run, faults, [], False

    async def exec(self, command: str, deadline_s: float) -> SimpleNamespace:
        if len(self.ran) in self.faults:
            raise InfrastructureFailure("the sandbox died")
        self.ran.append(command)
        return SimpleNamespace(output=self.run(command), exit_status=0, notice="", wall_s=0.01)

    async def close(self) -> None:
        self.closed = True


class FakeSandboxes:
    """`faults[k]` are the faults of the k-th sandbox leased."""

    def __init__(self, run: Callable[[str], str] = str.upper, faults: tuple[set[int], ...] = ()) -> None:
        self.run, self.faults, self.leased = run, list(faults), []

    async def lease(self, files: object, image: str = "") -> FakeSandbox:
        faults = self.faults[len(self.leased)] if len(self.leased) < len(self.faults) else set()
        self.leased.append(FakeSandbox(self.run, faults))
        return self.leased[-1]


class ByteChat:
    """A chat format in which a token is a byte and 0 ends a turn."""

    longest_token = 1  # a byte

    end_token_id, shows_tools = 0, True

    def prompt_ids(self, prompt: str) -> list[int]:
        return [1, *prompt.encode()]

    def observation_ids(self, output: str) -> list[int]:
        return [2, *output.encode(), 3]

    def opening_ids(self, messages: list[Message], tools: tuple[dict, ...] = ()) -> list[int]:
        names = "".join(tool["function"]["name"] + ":" for tool in tools)
        return [1, *(names + "|".join(m.content for m in messages)).encode()]

    def continuation_ids(self, messages: list[Message], *, ended: bool = True) -> list[int]:
        return [*([] if ended else [0]), 2, *"|".join(m.content for m in messages).encode(), 3]

    def action_text(self, token_ids: tuple[int, ...], *, keep_special: bool = False) -> str:
        return bytes(t for t in token_ids if t).decode()


def says(text: str, end: bool = True) -> list[int]:
    """The tokens of a turn in ByteChat."""
    return [*text.encode(), *([0] if end else [])]


def settings(**changes: object) -> RolloutConfig:
    """Short limits, so that a failing test is a quick one."""
    return RolloutConfig(**{"request_timeout_s": 1.0, "startup_timeout_s": 3.0, "deadline_s": 5.0, **changes})


TASK = Task(id="t", kind="k", prompt="go", files=(), grading=ExactAnswer(answer="42"), max_turns=3)


async def exact(task, sandbox, answer_text, pool, budget_s):
    return float(answer_text == task.grading.answer)


def scripted(*turns):
    """The k-th turn of every trajectory, told apart by the length of its context; an Exception is a 503."""

    def script(body):
        if body["sampling_params"]["max_new_tokens"] == 0:
            start = body["logprob_start_len"]
            listed = [[None if t == start else -2.0, i, None] for t, i in enumerate(body["input_ids"]) if t >= start]
            return answer([], input_token_logprobs=listed)
        most = body["sampling_params"]["max_new_tokens"]
        return answer(turns[body["input_ids"].count(2)][:most])  # 2 opens an observation

    return script


def collect(
    script,
    tmp_path,
    *,
    groups=((TASK,),),
    sandboxes=None,
    grade=exact,
    teacher=False,
    version=0,
    logs=None,
    limits=SandboxConfig(),
    **changes,
):
    """(events, sandboxes, request bodies)"""
    sandboxes = sandboxes or FakeSandboxes()
    config = settings(**changes)

    async def main():
        events = []
        async with serving(script) as fake:
            pool = ServerPool(config, tmp_path, folder=tmp_path, urls=(fake.address.url,))
            await pool.start()
            async with Collector(
                config,
                limits,
                servers=pool,
                sandboxes=sandboxes,
                grade=grade,
                chat=ByteChat(),
                seed=1,
                teacher=pool if teacher else None,
                logs=logs,
            ) as collector:
                await asyncio.wait_for(collector.collect(4, version, groups, events.append), 20)
            await pool.close()
            return events, sandboxes, fake.engine.bodies

    return asyncio.run(main())


def only(events, kind):
    return [event for event in events if isinstance(event, kind)]
