"""tools/evaluate.py against a scripted solver of known success behind the engine's endpoint, in real sandboxes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from transformers import AutoTokenizer

from megathunder.config import Config
from megathunder.config.tasks import TasksConfig
from megathunder.config.toml import to_toml
from megathunder.evaluation import EVALUATION, pass_at_k
from megathunder.metrics.row import encode_row
from megathunder.metrics.run_folder import RunFolder
from megathunder.rollout.agents.builtin_agent import turn_seed
from megathunder.tasks import Task, build_source, heldout_tasks
from megathunder.tasks.swe import Instance, read_instances
from megathunder.tasks.terminal import reference
from megathunder.types import TrajectoryId
from tests.unit.metrics.made_run import made_row
from tools import evaluate as evaluate_tool

ROOT = Path(__file__).resolve().parents[2]
STUDENT = ROOT / "examples" / "policies" / "student"
ATTEMPTS = 5
LOADED = web.AppKey("loaded", list)
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


def solver(scripts: list[tuple[list[str], list[str]]], *rights: tuple[int, ...]) -> web.Application:
    """Knows from a request's seed which turn of which attempt at which task it is; the first right[t] attempts at task
    t are right ones, with the right of rights[n] once the weights have been replaced n times."""
    tokenizer = AutoTokenizer.from_pretrained(STUDENT)
    turns = {
        turn_seed(0, TrajectoryId(EVALUATION, t, a), turn): (t, a, turn)
        for t, script in enumerate(scripts)
        for a in range(ATTEMPTS)
        for turn in range(max(map(len, script)))
    }
    loaded: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        t, a, turn = turns[body["sampling_params"]["sampling_seed"]]
        text = scripts[t][a >= rights[len(loaded)][t]][turn]
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        meta = {
            "finish_reason": {"type": "stop"},
            "weight_version": str(7 + len(loaded)),
            "output_token_logprobs": [[-1.0, i, None] for i in ids],
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"model_path": "", "weight_version": str(7 + len(loaded))})

    async def replace_weights(request: web.Request) -> web.Response:
        loaded.append((await request.json())["model_path"])
        return web.json_response({"success": True, "message": ""})

    async def server_info(_: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.20"})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/generate", generate), web.get("/model_info", info), web.get("/health", health)])
    app.add_routes([web.post("/update_weights_from_disk", replace_weights), web.get("/server_info", server_info)])
    app.add_routes([web.post("/abort_request", health), web.post("/flush_cache", health)])
    app[LOADED] = loaded
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
    """The tool's exit status."""
    line = ["--checkpoint", str(STUDENT), "--tasks", tasks, "--json", str(out), "--tasks.heldout", str(count)]
    return evaluate_tool.main([*line, "--rollout.urls", url, *more])


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


def test_the_policies_of_a_run_are_evaluated_one_after_the_other_on_the_same_servers(tmp_path):
    run, tasks = RunFolder(tmp_path / "run"), build_source(TasksConfig(kinds=("read",))).heldout(3)
    rights = ((0, 1, 0), (2, 1, 3), (5, 4, 5))  # of the policies after 0, 2 and 4 updates
    run.policies.mkdir(parents=True)
    for updates in (2, 4):
        run.policy_after(updates).symlink_to(STUDENT, target_is_directory=True)
    config = Config()
    run.config.write_text(to_toml(replace(config, learner=replace(config.learner, model=str(STUDENT)))))
    run.metrics.write_bytes(b"".join(encode_row(made_row(u, device_hours=0.5 * (u + 1))) for u in range(4)))
    server = solver(answers(tasks), *rights)
    line = ["--runs", str(run.path), "--tasks", "shell", "--tasks.kinds", "read", "--tasks.heldout", "3"]
    with listening(server) as url:
        assert (
            evaluate_tool.main([*line, "--rollout.urls", url, "--json", str(tmp_path / "cost.json"), "--target", "0.9"])
            == 0
        )
    assert server[LOADED] == [str(run.policy_after(updates)) for updates in (2, 4)]
    found = json.loads((tmp_path / "cost.json").read_text())
    (curve,) = found["curves"]
    assert [(e["updates"], e["device_hours"]) for e in curve["evaluations"]] == [(0, 0.0), (2, 1.0), (4, 2.0)]
    assert [e["score"]["right"] for e in curve["evaluations"]] == [sum(right) for right in rights]
    assert [c["runs"][0]["hours_to_target"] for c in found["comparisons"]] == [2.0, 2.0, 1.0]  # pass@1, 3 and 5
    assert (tmp_path / "cost.png").stat().st_size > 1000
