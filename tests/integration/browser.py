"""A headless Chromium driven over its DevTools protocol: what a page looks like and what it complains of."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

LIMIT_S = 60.0
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-sync",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    """Chromium, under the names that distributions give it."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(slots=True, kw_only=True)
class Seen:
    """`answer` is what the script returned, `errors` what the console said, `requests` every address asked for."""

    answer: object = None
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    screenshot: bytes = b""


def look_at(page: Path | str, script: str, *, width: int = 1280, height: int = 2400) -> Seen:
    """Open `page`, a file or an address, wait until it has loaded, evaluate `script` and take a picture of `width` x
    `height`."""

    async def look() -> Seen:
        async with _devtools() as tools:
            address = page if isinstance(page, str) else page.resolve().as_uri()
            return await _look(tools, address, script, width, height)

    return asyncio.run(asyncio.wait_for(look(), LIMIT_S))


class _Tools:
    """Calls with answers, and the events between them, over one websocket."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers, self.events = socket, itertools.count(1), []

    async def call(self, method: str, **parameters: object) -> dict:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json()
            if message.get("id") == number:
                return message["result"]
            self.events.append(message)

    async def until(self, method: str) -> None:
        while all(event["method"] != method for event in self.events):
            self.events.append(await self._socket.receive_json())


@contextlib.asynccontextmanager
async def _devtools() -> AsyncIterator[_Tools]:
    with tempfile.TemporaryDirectory(prefix="mt-browser-", ignore_cleanup_errors=True) as profile:
        arguments = [*QUIET, f"--user-data-dir={profile}", "about:blank"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(find_browser(), *arguments, **silent)
        try:
            announcement = Path(profile) / "DevToolsActivePort"
            while not (announcement.exists() and announcement.read_text().strip()):
                await asyncio.sleep(0.05)
            port = announcement.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    address = (await response.json())[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield _Tools(socket)
        finally:
            process.kill()
            await process.wait()


async def _look(tools: _Tools, address: str, script: str, width: int, height: int) -> Seen:
    for domain in ("Page", "Runtime", "Log", "Network"):
        await tools.call(f"{domain}.enable")
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    await tools.call("Emulation.setDeviceMetricsOverride", **size)
    await tools.call("Page.navigate", url=address)
    await tools.until("Page.loadEventFired")
    evaluated = await tools.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
    picture = await tools.call("Page.captureScreenshot", format="png")
    seen = Seen(answer=evaluated["result"].get("value"), screenshot=base64.b64decode(picture["data"]))
    for event in tools.events:
        detail = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            seen.errors.append(detail["exceptionDetails"]["text"])
        elif event["method"] == "Runtime.consoleAPICalled" and detail["type"] in ("error", "warning"):
            seen.errors.append(str([part.get("value") for part in detail["args"]]))
        elif event["method"] == "Log.entryAdded" and detail["entry"]["level"] in ("error", "warning"):
            seen.errors.append(detail["entry"]["text"])
        elif event["method"] == "Network.requestWillBeSent":
            seen.requests.append(detail["request"]["url"])
    return seen
