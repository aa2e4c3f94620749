"""The page of trajectories: what its server answers, and that it answers this machine alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import Tokenizer

from megathunder.metrics.run_folder import RunFolder
from megathunder.report.viewer.server import Viewer, main
from megathunder.report.viewer.token_text import token_pieces
from megathunder.report.viewer.trajectory_index import TrajectoryIndex
from tests.unit.metrics.made_run import made_run
from tests.unit.report.made_trajectories import STUDENT, write_trajectories


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return made_run(tmp_path, updates=2, model=str(STUDENT))


def asking(folder: RunFolder, ask: Callable[[TestClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with TestClient(TestServer(Viewer(folder).application())) as client:
            await ask(client)

    asyncio.run(run())


def test_the_list_has_every_trajectory_and_grows_with_the_run(folder: RunFolder) -> None:
    index = TrajectoryIndex(folder)
    index.refresh()
    assert len(index) == 0
    count = write_trajectories(folder)
    index.refresh()
    table = index.table()
    assert len(index) == count == len(table["reward"])
    assert table["update"] == [0] * 12 + [1] * 12 and table["group"][:5] == [0, 0, 0, 0, 1]
    assert table["reward"][:4] == [0.0, 1.0, 0.0, 1.0] and table["advantage"][:4] == [-0.5, 0.5, -0.5, 0.5]
    assert (table["end"][11], table["reward"][11], table["end"][0]) == ("lost", None, "answered")
    sampled = index.record(0).trajectory.sampled_tokens
    assert table["tokens"][:2] == [sampled, sampled] and table["tokens"][11] == 0
    assert index.find("SEVEN") == [n for n in range(count) if n % 12 != 11] and index.find("answered 500") == [11, 23]


def test_a_trajectory_in_full_has_text_numbers_and_times(folder: RunFolder) -> None:
    write_trajectories(folder, teacher=True)

    async def ask(client: TestClient) -> None:
        assert (await (await client.get("/api/index")).json())["table"]["task"][0] == "task-0"
        found = await (await client.get("/api/trajectory/1")).json()
        assert (found["id"], found["reward"], found["advantage"]) == ("u0/g0/t1", 1.0, 0.5)
        assert found["reward_parts"] == {"format": 1.0, "answer": 1.0} and found["group_rewards"] == [0, 1, 0, 1]
        segments = found["rows"][0]
        assert [segment["role"] for segment in segments] == ["prompt", "action", "observation", "action"]
        assert "".join(segments[1]["pieces"]).strip() == "cat a.txt" and segments[1]["versions"] == [0]
        assert len(segments[1]["logprobs"]) == len(segments[1]["pieces"])
        assert segments[3]["teacher_gaps"] == pytest.approx([0.5] * len(segments[3]["pieces"]))
        assert found["timings"] == {
            "turns": [0.5, 1.0],
            "completed": 1.5,
            "tools": 0.25,
            "verifier": 0.5,
            "rewarded": 2,
        }
        assert (await client.get("/api/trajectory/24")).status == 404

    asking(folder, ask)


def test_a_model_that_is_gone_leaves_the_text_that_was_kept(tmp_path: Path) -> None:
    folder = made_run(tmp_path, updates=1, model=str(tmp_path / "gone"))
    write_trajectories(folder, updates=1)

    async def ask(client: TestClient) -> None:
        await client.get("/api/index")
        (segment,) = (await (await client.get("/api/trajectory/0")).json())["rows"][0]
        assert segment["role"] == "text" and "cat a.txt" in segment["pieces"][0]

    asking(folder, ask)


def test_a_page_under_another_name_reads_nothing(folder: RunFolder) -> None:
    write_trajectories(folder)

    async def ask(client: TestClient) -> None:
        for path in ("/", "/api/index", "/api/find?q=a", "/api/trajectory/0"):
            assert (await client.get(path, headers={"Host": "evil.example:80"})).status == 403
            assert (await client.get(path, headers={"Host": "127.0.0.1.evil.example"})).status == 403

    asking(folder, ask)


def test_pieces_add_up_where_characters_are_spread_over_tokens() -> None:
    tokenizer = Tokenizer.from_file(str(STUDENT / "tokenizer.json"))
    ids = tokenizer.encode("printf 'é 漢字 🙂'; cat a.txt").ids
    pieces = token_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


def test_a_run_without_trajectories_is_refused(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder.path)]) == 2
    assert "metrics.trajectories = true" in capsys.readouterr().err
