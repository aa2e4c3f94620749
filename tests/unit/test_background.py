"""A background task that ends by an exception ends what supervises it, at once and with its error."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from megathunder import background
from megathunder.errors import InfrastructureFailure, UserError


async def die_after(seconds: float, error: Exception) -> None:
    await asyncio.sleep(seconds)
    raise error


def test_a_death_ends_the_block_within_a_second_with_the_name_and_the_traceback() -> None:
    async def scenario() -> None:
        async with background.supervised():
            background.start(die_after(0.05, KeyError("lost")), "the watch over the clock")
            await asyncio.sleep(30)

    began = time.monotonic()
    with pytest.raises(
        InfrastructureFailure, match="the watch over the clock ended by an error(.|\\n)*KeyError: 'lost'"
    ):
        asyncio.run(scenario())
    assert time.monotonic() - began < 1.0


def test_an_error_that_a_person_can_act_on_comes_as_it_is() -> None:
    async def scenario() -> None:
        async with background.supervised():
            background.start(die_after(0.0, UserError("a", expected="b", remedy="c")), "x")
            await asyncio.sleep(30)

    with pytest.raises(UserError, match="remedy:   c"):
        asyncio.run(scenario())


def test_cancelling_a_task_or_its_end_is_no_death_and_the_block_goes_on() -> None:
    async def scenario() -> str:
        async with background.supervised():
            background.start(asyncio.sleep(0), "short")
            background.start(asyncio.sleep(30), "long").cancel()
            await asyncio.sleep(0.05)
        return "done"

    assert asyncio.run(scenario()) == "done"


def test_a_block_that_is_cancelled_from_outside_stays_cancelled() -> None:
    async def block() -> None:
        async with background.supervised():
            await asyncio.sleep(30)

    async def scenario() -> None:
        task = asyncio.create_task(block())
        await asyncio.sleep(0.01)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(scenario())


def test_outside_a_block_a_death_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        background.start(die_after(0.0, ValueError("unseen")), "nobody's task")
        await asyncio.sleep(0.05)

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())
    assert "nobody's task ended by an error" in caplog.text and "unseen" in caplog.text
