"""The pages about data, rewards, environments and agents of one's own: every file they show is written and used."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from megathunder.config.cross_checks import check_batch_size
from megathunder.config.load import load_config
from megathunder.environments.build_environment import environment_maker, open_environment
from megathunder.registry import REWARDS
from megathunder.rollout.agents.check_user_code import check_user_code, first_task
from megathunder.user_code import UserCode

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("train_on_your_data", "write_a_reward", "write_an_environment", "bring_an_agent", "coming_from_trl_verl_slime")
FILE = re.compile(r"^<!-- file: (\S+) -->\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^```(?:python|toml|json)$", re.MULTILINE)


def written(page: str, folder: Path) -> list[Path]:
    """The files of a page, in `folder`."""
    text = (DOCS / f"{page}.md").read_text()
    found = FILE.findall(text)
    assert len(found) == len(CODE.findall(text)), "every block of the page is a file"
    for name, content in found:
        (folder / name).write_text(content)
    return [folder / name for name, _ in found]


@pytest.mark.parametrize("page", PAGES)
def test_the_files_of_a_page_work_together(page: str, tmp_path: Path) -> None:
    files = written(page, tmp_path)
    configs = [path for path in files if path.suffix == ".toml"]
    assert configs
    for path in configs:
        config = load_config(["--config", str(path)])
        check_batch_size(config)
        check_user_code(config)
        assert first_task(config).row


def test_the_games_of_the_environment_page_are_won(tmp_path: Path) -> None:
    written("write_an_environment", tmp_path)
    right = {"steps": "I say 7", "tools": '<tool_call>{"name": "guess", "arguments": {"number": 7}}</tool_call>'}
    wrong = {"steps": "3", "tools": '<tool_call>{"name": "guess", "arguments": {"number": 300}}</tool_call>'}
    said = {"steps": "Higher.", "tools": "error: from 1 to 99 only"}

    async def play(name: str) -> tuple[str, float | None]:
        config = load_config(["--config", str(tmp_path / f"{name}.toml")])
        make = environment_maker(config.tasks)
        assert make is not None
        code = UserCode()
        session = open_environment(make, config.tasks, first_task(config), code, 0)
        await session.begin()
        first = await session.act(wrong[name])
        assert (await session.act(right[name])).done
        await session.close()
        code.close()
        return first.messages[0].content, session.reward

    for name in ("steps", "tools"):
        assert asyncio.run(play(name)) == (said[name], 1.0)


def test_rewards_of_the_peers_give_what_they_gave(tmp_path: Path) -> None:
    written("coming_from_trl_verl_slime", tmp_path)
    for name in ("verl", "trl", "slime"):
        row = first_task(load_config(["--config", str(tmp_path / f"{name}.toml")])).row
        function = REWARDS.get(f"{tmp_path}/adapted.py:from_{name}")
        if name == "trl":
            assert function(["5", "6"], [row, row], [None, None]) == [1.0, 0.0]
        elif name == "slime":
            assert asyncio.run(function("5", row, None)) == 1.0
        else:
            assert function("5", row, None) == 1.0
