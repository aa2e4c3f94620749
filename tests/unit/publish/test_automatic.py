"""`auto` measures full weights, then changes, keeps the faster, and says why."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest

from megathunder.publish.transports.automatic import AutomaticTransport


class Timed:
    """Sends `sizes` bytes one after the other (the last one for good), in `seconds` each."""

    def __init__(self, sizes: list[int], seconds: list[float]) -> None:
        self.sizes, self.seconds, self.calls = sizes, seconds, 0

    def send(self, *_: object) -> int:
        at = min(self.calls, len(self.sizes) - 1)
        self.calls += 1
        time.sleep(self.seconds[at])
        return self.sizes[at]


@pytest.mark.parametrize(
    ("sizes", "seconds", "chosen", "reason"),
    [
        ([9_000_000, 500_000], [0.06, 0.01], "delta", r"full weights 9.00 MB in 0.\d\d s, changes 0.50 MB .* changes"),
        ([9_000_000, 500_000], [0.01, 0.06], "full", r"changes 0.50 MB in 0.\d\d s; from now on full weights"),
        ([9_000_000, 9_000_000], [0.01, 0.01], "full", r"are no smaller than"),
    ],
    ids=["changes are faster", "changes are slower", "changes are no smaller"],
)
def test_the_faster_of_two_measured_publications_is_kept(
    sizes: list[int], seconds: list[float], chosen: str, reason: str
) -> None:
    said: list[str] = []
    ways = {"full": Timed([9_000_000], [0.0]), "delta": Timed(sizes, seconds)}
    transport = AutomaticTransport(ways["full"], ways["delta"], said.append)
    round = SimpleNamespace(live=lambda servers: servers)
    for version in range(4):
        transport.send(round, ("server",), version, ())
    assert len(said) == 1 and re.search(reason, said[0]), said
    assert ways["full"].calls == (2 if chosen == "full" else 0) and ways["delta"].calls == 4 - ways["full"].calls
