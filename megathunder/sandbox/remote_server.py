"""A pool of this machine, served to pools of others over HTTP. One verb a request (`remote_protocol.py`).

A lease belongs to the client that asked for it and ends with its Close, with the client's End, or with its lifetime,
whichever comes first: a client that dies leaves nothing for longer than that. A client that goes away while it waits
gives its place back. Answers: 200, 401 (key), 404 (no such lease: closed or expired), 503 (the machinery failed).
Called by tools/serve_sandboxes.py.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from dataclasses import dataclass

import msgspec
from aiohttp import web

from megathunder.errors import InfrastructureFailure
from megathunder.sandbox import remote_protocol
from megathunder.sandbox.interface import Pool, Sandbox

MAX_BODY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    client: str
    sandbox: Sandbox


class SandboxServer:
    """`app` answers for `pool`, whose leases end after `lifetime_s`; an empty `api_key` asks for none."""

    def __init__(self, pool: Pool, *, api_key: str, lifetime_s: float) -> None:
        self._pool, self._api_key, self._lifetime_s = pool, api_key, lifetime_s
        self._leases: dict[str, Entry] = {}
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.router.add_post("/sandbox", self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._api_key and not hmac.compare_digest(given.encode(), self._api_key.encode()):
            return web.Response(status=401, text="not the key of this server (sandbox.api_key)")
        try:
            asked = msgspec.msgpack.decode(await request.read(), type=remote_protocol.Request)
            return web.Response(body=msgspec.msgpack.encode(await self._do(asked)))
        except msgspec.DecodeError as error:
            return web.Response(status=400, text=str(error))
        except KeyError as error:
            return web.Response(status=404, text=f"no lease {error}: closed, or its lifetime is over")
        except InfrastructureFailure as failure:
            return web.Response(status=503, text=str(failure))

    async def _do(self, asked: remote_protocol.Request) -> object:
        match asked:
            case remote_protocol.Hello():
                return remote_protocol.Nothing()
            case remote_protocol.Lease():
                sandbox = await self._pool.lease(remote_protocol.unpacked(asked.files), asked.image)
                name = secrets.token_urlsafe(12)
                self._leases[name] = Entry(client=asked.client, sandbox=sandbox)
                asyncio.get_running_loop().call_later(self._lifetime_s, self._leases.pop, name, None)
                return remote_protocol.Leased(lease=name)
            case remote_protocol.Exec():
                sandbox = self._leases[asked.lease].sandbox
                return await sandbox.exec(asked.command.decode(errors="replace"), asked.deadline_s)
            case remote_protocol.Upload():
                await self._leases[asked.lease].sandbox.upload(remote_protocol.unpacked(asked.files))
                return remote_protocol.Nothing()
            case remote_protocol.Download():
                sandbox = self._leases[asked.lease].sandbox
                return remote_protocol.Content(data=await sandbox.download(asked.path, asked.max_bytes))
            case remote_protocol.Close():
                await self._close(asked.lease)
                return remote_protocol.Nothing()
            case remote_protocol.End():
                for name in [name for name, entry in self._leases.items() if entry.client == asked.client]:
                    await self._close(name)
                return remote_protocol.Left(leaks=[] if self._leases else self._pool.leaks())

    async def _close(self, name: str) -> None:
        entry = self._leases.pop(name, None)
        if entry is not None:
            await entry.sandbox.close()
