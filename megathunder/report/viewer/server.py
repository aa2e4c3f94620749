"""`megathunder view runs/NAME [--port N]`: a page on this machine alone that shows every trajectory of a run.

    GET /                    the page (`page.html`: no other address is asked for anything)
    GET /api/index           the list, one array per column
    GET /api/find?q=WORDS    numbers of the trajectories that hold the words
    GET /api/trajectory/N    one in full: segments with the text, log-probability and teacher gap of each token

It listens on 127.0.0.1 and answers requests to that address alone. The run may still be going on: reloading shows more.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from tokenizers import Tokenizer

from megathunder.errors import UserError
from megathunder.metrics.run_folder import RunFolder, open_folder
from megathunder.metrics.trajectories import TrajectoryRecord
from megathunder.process_exit import INTERRUPTED
from megathunder.report.viewer.token_text import load_tokenizer, token_pieces
from megathunder.report.viewer.trajectory_index import TrajectoryIndex
from megathunder.types import Role, Segment

PAGE = Path(__file__).parent / "page.html"
LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")


class Viewer:
    """The answers to the requests of one page."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._index = folder, TrajectoryIndex(folder)
        self._config = folder.read_config()
        self._tokenizer: Tokenizer | None = None
        self._lock = asyncio.Lock()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(middlewares=[_loopback_only])
        app.router.add_get("/", self._page)
        app.router.add_get("/api/index", self._list)
        app.router.add_get("/api/find", self._find)
        app.router.add_get(r"/api/trajectory/{number:\d+}", self._trajectory)
        return app

    async def read(self) -> None:
        """Read the files of trajectories that are new or have changed."""
        async with self._lock:
            await asyncio.to_thread(self._index.refresh)

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text(), content_type="text/html", headers={"Cache-Control": "no-store"})

    async def _list(self, _: web.Request) -> web.Response:
        await self.read()
        table = await asyncio.to_thread(self._index.table)
        return _json({"run": self._config.run.name, "objective": self._config.objective, "table": table})

    async def _find(self, request: web.Request) -> web.Response:
        return _json(await asyncio.to_thread(self._index.find, request.query.get("q", "")))

    async def _trajectory(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        if number >= len(self._index):
            raise web.HTTPNotFound(text=f"there are {len(self._index)} trajectories, counted from 0")
        record = await asyncio.to_thread(self._index.record, number)
        return _json(await asyncio.to_thread(self._described, record))

    def _described(self, record: TrajectoryRecord) -> dict[str, object]:
        self._tokenizer = self._tokenizer or load_tokenizer(self._config.learner.model)
        rewards, trajectory = self._index.group_rewards(record), record.trajectory
        rows = range(len(trajectory.rows)) if trajectory else ()
        return {
            "id": str(record.id),
            "reward": record.reward,
            "reward_parts": record.reward_parts,
            "group_rewards": rewards,
            "advantage": None if record.reward is None else record.reward - fmean(rewards),
            "lost": record.lost,
            "task": trajectory.task_id if trajectory else "",
            "end": trajectory.end_reason.value if trajectory else "",
            "timings": _timings(record),
            "rows": [list(self._segments(record, row)) for row in rows],
        }

    def _segments(self, record: TrajectoryRecord, row: int) -> Iterator[dict[str, object]]:
        """Segments of a row. Turns follow the rows, so a teacher's scores are found by counting actions."""
        assert record.trajectory is not None
        before = sum(s.role is Role.ACTION for r in record.trajectory.rows[:row] for s in r.segments)
        segments = record.trajectory.rows[row].segments
        if self._tokenizer is None:  # the model folder is gone: the text that was kept, as a whole
            yield {"role": "text", "pieces": [record.text[row] if row < len(record.text) else ""]}
            return
        for segment in segments:
            described = {"role": segment.role.value, "pieces": token_pieces(self._tokenizer, segment.token_ids)}
            if segment.role is Role.ACTION:
                described |= {"logprobs": segment.logprobs, "versions": sorted(set(segment.policy_versions))}
                described["teacher_gaps"] = _teacher_gaps(record, before, segment)
                before += 1
            yield described


def _teacher_gaps(record: TrajectoryRecord, turn: int, segment: Segment) -> list[float]:
    """log p - log q of each token; empty without a teacher."""
    scored = next((t.teacher_logprobs for t in record.turns if t.turn == turn), ())
    return [p - q for p, q in zip(segment.logprobs, scored)] if len(scored) == len(segment.logprobs) else []


def _timings(record: TrajectoryRecord) -> dict[str, object]:
    """Seconds since the first request."""
    if record.trajectory is None:
        return {}
    start = record.trajectory.started_s
    return {
        "turns": [turn.completed_s - start for turn in record.turns],
        "completed": record.trajectory.completed_s - start,
        "tools": record.trajectory.tool_s,
        "verifier": record.verifier_s,
        "rewarded": None if record.rewarded_s is None else record.rewarded_s - start,
    }


@web.middleware
async def _loopback_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A page of another origin that resolves its name to this machine reads nothing."""
    if request.host.rpartition(":")[0] not in NAMES and request.host not in NAMES:
        raise web.HTTPForbidden(text=f"open http://{LOOPBACK}:PORT/")
    return await handler(request)


def _json(content: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(content), content_type="application/json")


async def serve(folder: RunFolder, port: int) -> None:
    """Serve until cancelled; prints the address."""
    viewer = Viewer(folder)
    await viewer.read()
    runner = web.AppRunner(viewer.application(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, LOOPBACK, port)
        await site.start()
        address = runner.addresses[0]
        print(f"trajectories of {folder.path}: http://{address[0]}:{address[1]}/ (Ctrl-C ends it)", flush=True)
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 2 where the folder has no trajectories or the port is taken."""
    parser = argparse.ArgumentParser(prog="megathunder view", description="Look at the trajectories of a run.")
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: a free one)")
    options = parser.parse_args(argv)
    try:
        asyncio.run(serve(_folder_with_trajectories(options.run), options.port))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: port {options.port}: {error.strerror}; choose another --port", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _folder_with_trajectories(path: Path) -> RunFolder:
    folder = open_folder(path)
    if not any(folder.trajectories.glob("update_*.jsonl")):
        raise UserError(
            f"{folder.trajectories} holds no trajectories",
            expected="a run that kept them (metrics.trajectories)",
            remedy="train with metrics.trajectories = true",
        )
    return folder


if __name__ == "__main__":
    sys.exit(main())
