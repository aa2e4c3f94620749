"""Which sandbox a lease gets when some have died."""

from __future__ import annotations

import asyncio

import pytest

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure
from megathunder.sandbox.pool import SandboxPool
from megathunder.tasks import TaskFile

FILES = (TaskFile(path="a", content="x"),)


class Member:
    """A sandbox without isolation: `dying` ones look alive until they are asked for something."""

    def __init__(self, slot: int, *, refuses: bool = False) -> None:
        self.slot, self.healthy, self.alive, self.reusable = slot, False, False, True
        self.dying, self.closed, self.refuses, self.files = False, False, refuses, None

    async def start(self) -> None:
        self.healthy = self.alive = True

    async def upload(self, files) -> None:
        if self.dying:
            self.healthy = False
            raise InfrastructureFailure("died")
        if self.refuses:
            raise InfrastructureFailure("cannot write a")
        self.files = tuple(files)

    async def clear(self) -> None:
        self.files = None

    async def close(self) -> None:
        self.closed = True


class Backend:
    def __init__(self, **how) -> None:
        self.made, self.how = [], how

    async def probe(self) -> None: ...

    def make(self, slot: int, image: str) -> Member:
        self.made.append(Member(slot, **self.how))
        return self.made[-1]

    def image_of(self, image: str) -> str:
        return ""

    def leaks(self, slots: int) -> list[str]:
        return []

    def close(self) -> None: ...


def test_a_lease_passes_over_warm_sandboxes_that_died_unnoticed() -> None:
    async def main() -> None:
        backend = Backend()
        pool = SandboxPool(SandboxConfig(warm=3, max_open=4), backend)
        await pool.start()
        for member in backend.made:
            member.dying = True
        leases = [await pool.lease(iter(FILES)) for _ in range(4)]
        assert [m.files for m in backend.made if not m.dying][:4] == [FILES] * 4
        assert all(m.closed for m in backend.made if m.dying)
        for lease in leases:
            await lease.close()
        await asyncio.wait_for(asyncio.gather(*(pool.lease() for _ in range(4))), 5)  # no place was lost
        await pool.close()

    asyncio.run(main())


def test_files_that_cannot_be_written_cost_no_second_sandbox_and_no_place() -> None:
    async def main() -> None:
        backend = Backend(refuses=True)
        pool = SandboxPool(SandboxConfig(warm=1, max_open=1), backend)
        await pool.start()
        for _ in range(3):
            with pytest.raises(InfrastructureFailure, match="cannot write"):
                await asyncio.wait_for(pool.lease(FILES), 5)
        assert len(backend.made) == 1
        await pool.close()

    asyncio.run(main())
