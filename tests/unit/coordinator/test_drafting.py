"""What an update's row says of speculation: differences between two rows, servers that come, fail and go."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec

from megathunder.coordinator.speculation_monitor import Drafting, drafting
from megathunder.errors import InfrastructureFailure
from megathunder.metrics.row import MetricsRow
from megathunder.rollout.servers.protocol import SpeculationCounts
from megathunder.types import ServerAddress
from tests.unit.metrics.made_run import made_row

ZERO = SpeculationCounts(**dict.fromkeys(SpeculationCounts.__struct_fields__, 0))
FIRST = msgspec.structs.replace(
    ZERO, steps=10, steps_drafted=4, requests=20, drafted_tokens=30, accepted_tokens=12, emitted_tokens=32
)
SECOND = msgspec.structs.replace(
    FIRST, steps=20, steps_drafted=4, requests=40, drafted_tokens=30, accepted_tokens=12, emitted_tokens=52
)
A, B = (ServerAddress(name=name, url="") for name in ("a", "b"))


class Control:
    """Servers whose counts are scripted; None: it does not answer."""

    def __init__(self, **said: list[SpeculationCounts | None]) -> None:
        self._said = said

    async def speculation(self, server: ServerAddress) -> SpeculationCounts:
        counts = self._said[server.name].pop(0)
        if counts is None:
            raise InfrastructureFailure("no answer")
        return counts


def rows(control: Control, *ready: tuple[ServerAddress, ...]) -> list[MetricsRow]:
    servers = SimpleNamespace(ready=())
    made = Drafting(control, servers)

    async def main() -> list[MetricsRow]:
        filled = []
        for now in ready:
            servers.ready = now
            filled.append(await made.filled(made_row()))
        return filled

    return asyncio.run(main())


def said(row: MetricsRow) -> tuple[float | None, ...]:
    drafted, kept = row.speculation_drafted_tokens, row.speculation_accepted_tokens
    return row.speculation_accept_length, drafted, kept, row.speculation_off_share


def test_a_row_has_what_was_drafted_since_the_last_one_over_all_servers():
    first, second = rows(Control(a=[FIRST, SECOND], b=[ZERO, FIRST]), (A, B), (A, B))
    assert said(first) == (1.6, 30, 12, 0.6)
    assert said(second) == (52 / 40, 30, 12, 0.8)


def test_a_restarted_server_counts_from_zero_and_a_silent_one_is_left_out():
    again = ServerAddress(name="a", url="", incarnation=1)
    first, second, third = rows(Control(a=[SECOND, FIRST, None]), (A,), (again,), (again,))
    assert said(first)[1:3] == said(second)[1:3] == (30, 12)
    assert said(third) == (None, None, None, None)


def test_without_speculation_nothing_is_asked_and_rows_stay_as_they_are():
    async def main() -> None:
        async with drafting(None, SimpleNamespace(ready=()), "") as made:
            assert made is None

    asyncio.run(main())
