"""tools/evaluate.py against a scripted solver of known success behind the engine's endpoint, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from megathunder.config.tasks import TasksConfig
from megathunder.evaluation import EVALUATION, pass_at_k
from megathunder.rollout.agent import turn_seed
from megathunder.tasks import build_source
from megathunder.types import TrajectoryId

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ROOT / "examples" / "policies" / "student"
TASKS, ATTEMPTS = 6, 5
KINDS = ("read", "count", "sum", "chase", "find")
RIGHT = (0, 1, 2, 3, 4, 5)  # of the five attempts at task t, the first RIGHT[t] are right


def solver() -> web.Application:
    """Knows from a request's seed which attempt at which task it is; looks around once, then answers."""
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    tasks = build_source(TasksConfig(kinds=KINDS)).heldout(TASKS)
    turns = {
        turn_seed(0, TrajectoryId(EVALUATION, t, a), turn): (t, a, turn)
        for t in range(TASKS)
        for a in range(ATTEMPTS)
        for turn in range(2)
    }

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        t, a, turn = turns[body["sampling_params"]["sampling_seed"]]
        answer = tasks[t].grading.answer if a < RIGHT[t] else "0 wrong"
        text = "ls" if turn == 0 else f"submit {answer}"
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": "7",
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "", "weight_version": "7"})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/model_info", info), web.get("/health", health)])
    return app


@contextmanager
def listening(app: web.Application) -> Iterator[str]:
    """The address of `app`, served by a thread."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    runner, address = web.AppRunner(app), []

    async def begin() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        ready.set()

    thread = threading.Thread(target=lambda: (loop.run_until_complete(begin()), loop.run_forever()))
    thread.start()
    ready.wait(20)
    try:
        yield address[0]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def evaluate(out: Path, url: str, *more: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "tools/evaluate.py", "--checkpoint", str(STUDENT), "--tasks", "shell", "--json", str(out)]
    line += ["--tasks.heldout", str(TASKS), "--tasks.kinds", *KINDS, "--rollout.urls", url, *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)


def test_pass_at_k_of_a_solver_of_known_success_is_the_closed_form(tmp_path):
    out = tmp_path / "out.json"
    with listening(solver()) as url:
        first = evaluate(out, url, "--attempts", "3")
        assert first.returncode == 0, first.stderr
        second = evaluate(out, url, "--attempts", str(ATTEMPTS))
    assert second.returncode == 0, second.stderr
    assert f"{TASKS * (ATTEMPTS - 3)} to make, {TASKS * 3} kept" in second.stdout
    result = json.loads(out.read_text())
    tasks = build_source(TasksConfig(kinds=KINDS)).heldout(TASKS)
    assert {task["task_id"]: task["right"] for task in result["by_task"]} == dict(zip((t.id for t in tasks), RIGHT))
    for row in result["pass_at"]:
        closed = sum(pass_at_k(ATTEMPTS, right, row["k"]) for right in RIGHT) / TASKS
        assert row["over_all"]["value"] == pytest.approx(closed)
        assert row["over_all"]["low"] <= closed <= row["over_all"]["high"]
    assert [row["k"] for row in result["pass_at"]] == [1, 3, 5]
    assert result["sent"] == result["completed"] == TASKS * ATTEMPTS
