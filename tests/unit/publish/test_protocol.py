"""What is asked of a server depends on its version of SGLang; a version that is not known is refused."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_sglang import fake_sglang

from megathunder.errors import InfrastructureFailure, UserError
from megathunder.publish.acknowledge import deliver
from megathunder.publish.envelope import Inline
from megathunder.publish.publish_session import PublishSession
from megathunder.rollout.servers.command import WEIGHT_LOADER


def paths(version: str) -> list[str]:
    async def update() -> list[str]:
        async with (
            fake_sglang(version) as fake,
            PublishSession((fake.address,), api_key="", timeout_s=5.0).control as control,
        ):
            info = await control.open_update(fake.address)
            await control.update_from_tensors(fake.address, tensors=b"x", loader=WEIGHT_LOADER, ranks=1)
            await control.close_update(fake.address, info)
            assert not fake.kept, "an idle connection may be closed by the server as the next call is sent"
            return fake.asked

    return asyncio.run(update())


def test_an_update_stands_between_begin_and_end_where_the_version_has_them() -> None:
    tensor, idle = "/update_weights_from_tensor", ["/abort_request", "/flush_cache"]
    assert paths("0.5.20") == [*idle, tensor]
    assert paths("0.5.23") == [*idle, "/begin_weight_update", tensor, "/end_weight_update"]


def test_a_session_that_a_dead_learner_left_open_is_ended() -> None:
    async def update() -> list[str]:
        async with (
            fake_sglang("0.5.23") as fake,
            PublishSession((fake.address,), api_key="", timeout_s=5.0).control as control,
        ):
            await control.open_update(fake.address)
            fake.asked.clear()
            await control.open_update(fake.address)
            return fake.asked[-3:]

    begin, end = "/begin_weight_update", "/end_weight_update"
    assert asyncio.run(update()) == [begin, end, begin]


def test_an_unknown_version_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"(?s)SGLang 0\.5\.99.*0\.5\.20 or 0\.5\.23"):
        paths("0.5.99")


def test_a_server_without_our_loader_is_sent_nothing() -> None:
    async def update() -> list[str]:
        async with fake_sglang("0.5.20", loader="another") as fake:
            round = PublishSession((fake.address,), api_key="", timeout_s=5.0)
            async with round.control:
                await round.open_update(fake.address)
                with pytest.raises(UserError, match="custom-weight-loader"):
                    await deliver(round, fake.address, Inline(data=b""))
            return fake.asked

    assert "/update_weights_from_tensor" not in asyncio.run(update())


def test_every_call_carries_the_key_and_a_wrong_one_is_told() -> None:
    async def update(key: str) -> list[str]:
        async with fake_sglang("0.5.23", api_key="right") as fake:
            async with PublishSession((fake.address,), api_key=key, timeout_s=5.0).control as control:
                info = await control.open_update(fake.address)
                await control.update_from_tensors(fake.address, tensors=b"x", loader=WEIGHT_LOADER, ranks=1)
                await control.close_update(fake.address, info)
            return fake.asked

    assert asyncio.run(update("right"))[-1] == "/end_weight_update"
    for wrong in ("", "wrong"):
        with pytest.raises(InfrastructureFailure, match=r"server_info answered 401.*Unauthorized"):
            asyncio.run(update(wrong))
