"""tools/evaluate.py against a scripted solver of known success behind the engine's endpoint, in real sandboxes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
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
from megathunder.tasks import Task, build_source, heldout_tasks
from megathunder.tasks.swe import Instance, read_instances
from megathunder.tasks.terminal import reference
from megathunder.types import TrajectoryId

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ROOT / "examples" / "policies" / "student"
ATTEMPTS = 5
KINDS = ("read", "count", "sum", "chase", "find")


def answers(tasks: list[Task]) -> list[tuple[list[str], list[str]]]:
    """For each shell task the turns of a right attempt and of a wrong one."""
    return [(["ls", f"submit {task.grading.answer}"], ["ls", "submit 0 wrong"]) for task in tasks]


def repairs(tasks: list[Task], instances: list[Instance]) -> list[tuple[list[str], list[str]]]:
    """The same for repositories: mend it and say so, or look around and say so."""
    patches = {instance.instance_id: instance.patch for instance in instances}
    mend = "cat > /tmp/bug.diff <<'END'\n{}END\npatch -R -p1 < /tmp/bug.diff || git apply -R /tmp/bug.diff"
    return [([mend.format(patches[task.id]), "submit done"], ["ls", "submit done"]) for task in tasks]


def solutions(tasks: list[Task], folder: Path) -> list[tuple[list[str], list[str]]]:
    """The same for terminal tasks: the reference solution, which is never submitted, or nothing."""
    return [([reference(folder / task.id).script, *["true"] * 9], ["ls", "submit done"]) for task in tasks]


def solver(scripts: list[tuple[list[str], list[str]]], right: tuple[int, ...]) -> web.Application:
    """Knows from a request's seed which turn of which attempt at which task it is; the first right[t] attempts at task
    t are right ones."""
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    turns = {
        turn_seed(0, TrajectoryId(EVALUATION, t, a), turn): text
        for t, script in enumerate(scripts)
        for a in range(ATTEMPTS)
        for turn, text in enumerate(script[a >= right[t]])
    }

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        text = turns[body["sampling_params"]["sampling_seed"]]
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


def evaluate(out: Path, url: str, tasks: str, count: int, *more: str) -> int:
    """The tool's exit status, in this process: another one would spend its time on imports."""
    spec = importlib.util.spec_from_file_location("evaluate_tool", ROOT / "tools" / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    line = ["--checkpoint", str(STUDENT), "--tasks", tasks, "--json", str(out), "--tasks.heldout", str(count)]
    return module.main([*line, "--rollout.urls", url, *more])


def assert_closed_form(out: Path, tasks: list[Task], right: tuple[int, ...]) -> dict:
    """Every figure is what the solver's success says."""
    result = json.loads(out.read_text())
    assert {row["task_id"]: row["right"] for row in result["by_task"]} == dict(zip((t.id for t in tasks), right))
    for row in result["pass_at"]:
        closed = sum(pass_at_k(ATTEMPTS, r, row["k"]) for r in right) / len(right)
        assert row["over_all"]["value"] == row["over_completed"]["value"] == pytest.approx(closed)
        assert row["over_all"]["low"] <= closed <= row["over_all"]["high"]
    assert [row["k"] for row in result["pass_at"]] == [1, 3, 5]
    assert result["sent"] == result["completed"] == len(tasks) * ATTEMPTS
    return result


def test_pass_at_k_of_a_solver_of_known_success_is_the_closed_form(tmp_path, capsys):
    out, tasks = tmp_path / "out.json", build_source(TasksConfig(kinds=KINDS)).heldout(6)
    right = (0, 1, 2, 3, 4, 5)
    with listening(solver(answers(tasks), right)) as url:
        assert evaluate(out, url, "shell", 6, "--tasks.kinds", *KINDS, "--attempts", "3") == 0
        assert evaluate(out, url, "shell", 6, "--tasks.kinds", *KINDS, "--attempts", str(ATTEMPTS)) == 0
    assert f"{6 * (ATTEMPTS - 3)} to make, {6 * 3} kept" in capsys.readouterr().out
    assert_closed_form(out, tasks, right)


ROOM = ("--rollout.max_new_tokens", "8192", "--rollout.max_tokens", "16384")
DEVELOPMENT = {"swe": (0, 2, 5), "terminal": (3,)}


@pytest.mark.parametrize("family", DEVELOPMENT)
def test_so_it_is_on_the_shipped_development_tasks(tmp_path, family):
    out, right, folder = tmp_path / "out.json", DEVELOPMENT[family], ROOT / "examples" / "tasks" / family
    tasks = heldout_tasks(TasksConfig(source=family, path=str(folder)), len(right))
    scripts = repairs(tasks, read_instances(folder / "dev.jsonl")) if family == "swe" else solutions(tasks, folder)
    with listening(solver(scripts, right)) as url:
        assert evaluate(out, url, str(folder), len(right), "--attempts", str(ATTEMPTS), *ROOM) == 0
    assert_closed_form(out, tasks, right)
    attempts = [json.loads(line) for line in (tmp_path / "out.json.attempts.jsonl").read_text().splitlines()[1:]]
    ends = {a["end_reason"] for a in attempts if a["reward"] == 1.0}
    assert ends == ({"answered"} if family == "swe" else {"max_turns"})
