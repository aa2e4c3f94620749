"""What rank 0 tells the other ranks of a job before there are process groups: the settings, or why there is no run.

    rank 0   checks, makes the run folder, `tell(config)`            or   `refuse(reason)`
    others   `hear()`: the settings of rank 0                        or   its refusal, within a second

Settings are read once: other ranks neither parse a command line nor a file, so that no two machines can train with
different ones. Messages are JSON in torch's key-value store, the one that the ranks meet at anyway. A rank that waits
polls, since a wait inside the store would hear no signal. Not used where there is one rank.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from megathunder.config import Config
from megathunder.errors import InfrastructureFailure
from megathunder.identity import Identity, require_same_package, this_package

if TYPE_CHECKING:
    from torch.distributed import Store

KEY, HEARD = "megathunder/settings", "megathunder/heard"
POLL_S = 0.2
LIMIT_S = 1800.0  # rank 0 may have a model to download
HEARD_S = 3.0  # rank 0 gives the others this long to hear a refusal
JOIN_S = 300.0


class Refused(Exception):
    """Rank 0 has refused the run; the text is what it said."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's word. `refusal` empty: go on with `config`."""

    package: Identity
    arguments: tuple[str, ...] = ()
    config: Config | None = None
    refusal: str = ""


class Rendezvous:
    """This rank's end. `store` is for process groups too: it must live as long as they do."""

    def __init__(self, store: Store, world: int) -> None:
        self.store, self._world, self.told = store, world, False

    @classmethod
    def join(cls) -> Rendezvous:
        """Meet at the address in torchrun's environment; InfrastructureFailure where nobody answers."""
        from torch.distributed import DistError  # a second that a run of one rank does not spend
        from torch.distributed.rendezvous import rendezvous

        try:
            store, _, world = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
        except (DistError, OSError, ValueError) as error:
            raise InfrastructureFailure(f"the ranks do not meet: {error}") from error
        return cls(store, world)

    def tell(self, config: Config, arguments: list[str]) -> None:
        """Rank 0: the other ranks start with these settings."""
        self.told = True
        self._set(Told(package=this_package(), config=config, arguments=tuple(arguments)))

    def refuse(self, reason: str) -> None:
        """Rank 0: there is no run. Returns when the others have heard it, or after HEARD_S."""
        self._set(Told(package=this_package(), refusal=reason or "rank 0 has ended"))
        deadline = time.monotonic() + HEARD_S
        while self.store.add(HEARD, 0) < self._world - 1 and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def hear(self, arguments: list[str]) -> tuple[Config, str]:
        """Other ranks: rank 0's settings, and a remark where this machine's command line asked for others.

        Raises Refused with rank 0's reason, UserError where this rank runs another package, InfrastructureFailure where
        rank 0 is gone.
        """
        told = self._wait()
        if told.refusal or told.config is None:
            self.store.add(HEARD, 1)
            raise Refused(told.refusal)
        require_same_package("rank 0", told.package)
        differs = tuple(arguments) != told.arguments
        remark = "the command line of this machine is not that of rank 0, whose settings hold" if differs else ""
        return told.config, remark

    def _wait(self) -> Told:
        from torch.distributed import DistError

        deadline = time.monotonic() + LIMIT_S
        try:
            while not self.store.check([KEY]):
                if time.monotonic() > deadline:
                    raise InfrastructureFailure(f"rank 0 has told nothing for {LIMIT_S:.0f} s")
                time.sleep(POLL_S)
            return msgspec.json.decode(self.store.get(KEY), type=Told)
        except DistError as error:
            raise InfrastructureFailure(f"rank 0's machine is gone: {error}") from error

    def _set(self, told: Told) -> None:
        self.store.set(KEY, msgspec.json.encode(told))
