"""An HTTP server with SGLang's update endpoints that records what it is asked, and refuses updates outside a session
where its version has sessions."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace

from aiohttp import web

from megathunder.rollout.servers.command import WEIGHT_LOADER
from megathunder.types import ServerAddress


@contextlib.asynccontextmanager
async def fake_sglang(
    version: str, *, loader: str = WEIGHT_LOADER, api_key: str = ""
) -> AsyncIterator[SimpleNamespace]:
    """`.address`, and `.asked`: paths of the calls that change it, in order. It asks for `api_key`, if there is one.
    `.kept`: those that came on a connection that was meant to be used again."""
    asked: list[str] = []
    kept: list[str] = []
    is_open = version == "0.5.20"

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"version": version, "tp_size": 1, "custom_weight_loader": [loader]})

    async def call(request: web.Request) -> web.Response:
        nonlocal is_open
        kept.extend([request.path] if request.keep_alive else [])
        asked.append(request.path)
        if request.path in ("/begin_weight_update", "/end_weight_update"):
            if version == "0.5.20":
                return web.Response(status=404)
            begin = request.path == "/begin_weight_update"
            if begin and is_open:
                return web.json_response({"success": False, "message": "a session is already open"}, status=400)
            is_open = begin
        elif request.path.startswith("/update_weights_from_") and not is_open:
            return web.json_response({"success": False, "message": "must run between begin and end"}, status=400)
        return web.json_response({"success": True, "message": ""})

    @web.middleware
    async def gate(request: web.Request, handler: Callable[[web.Request], Awaitable[web.Response]]) -> web.Response:
        if api_key and request.headers.get("Authorization") != f"Bearer {api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    app = web.Application(middlewares=[gate])
    app.router.add_get("/server_info", info)
    app.router.add_post("/{name}", call)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    try:
        yield SimpleNamespace(
            address=ServerAddress(name="rollout-0", url=f"http://127.0.0.1:{port}"), asked=asked, kept=kept
        )
    finally:
        await runner.cleanup()
