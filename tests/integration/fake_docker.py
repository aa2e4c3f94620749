"""A stand-in for a Docker daemon: the Engine API calls that the SDK makes here, on a unix socket, with real processes.

A container is a bubblewrap with namespaces of its own (pid, network, mounts); `exec` enters them with nsenter as the
user that is asked for. Resource limits are recorded (`created`) and not applied. Needs root, bwrap and nsenter.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import secrets
import struct
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

ROOT = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--perms", "0755", "--dir", "/etc"]
LINKS = [x for name in ("bin", "sbin", "lib", "lib64") for x in ("--symlink", f"usr/{name}", f"/{name}")]
NAMESPACES = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--as-pid-1", "--die-with-parent", "--new-session"]


@dataclass(slots=True)
class Container:
    body: dict
    process: asyncio.subprocess.Process | None = None
    pid: int = 0


@dataclass(slots=True)
class Exec:
    container: str
    body: dict
    process: asyncio.subprocess.Process | None = None


@dataclass(slots=True)
class FakeDaemon:
    """`created` holds the body of every container that was made, `images` what is pulled."""

    images: tuple[str, ...]
    created: list[dict] = field(default_factory=list)
    containers: dict[str, Container] = field(default_factory=dict)
    execs: dict[str, Exec] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Requests of one connection, until one of them takes it over."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while line := await reader.readline():
                method, target, _ = line.decode().split()
                headers = {}
                while (header := (await reader.readline()).decode().strip()) != "":
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
                url = urlsplit(target)
                parts = [p for p in url.path.split("/") if p and not p.startswith("v1.")]
                if parts[0] == "exec" and parts[2] == "start":
                    await self.hijack(parts[1], reader, writer)
                    break
                status, answer = await self.answer(method, parts, parse_qs(url.query), body)
                data = b"" if answer is None else json.dumps(answer).encode()
                head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
                writer.write(head.encode() + data)
                await writer.drain()
        writer.close()

    async def answer(self, method: str, parts: list[str], query: dict, body: dict) -> tuple[int, object]:
        match method, parts:
            case "GET", ["version"]:
                return 200, {"ApiVersion": "1.45", "MinAPIVersion": "1.24"}
            case "GET", ["_ping"]:
                return 200, "OK"
            case "GET", ["images", *name, "json"]:
                known = "/".join(name) in self.images
                return (200, {}) if known else (404, {"message": f"No such image: {'/'.join(name)}"})
            case "POST", ["containers", "create"]:
                if body["Image"] not in self.images:
                    return 404, {"message": f"No such image: {body['Image']}"}
                name = secrets.token_hex(16)
                self.containers[name] = Container(body)
                self.created.append(body)
                return 201, {"Id": name, "Warnings": []}
            case "GET", ["containers", "json"]:
                wanted = json.loads(query["filters"][0])["label"][0].partition("=")[::2]
                found = [n for n, c in self.containers.items() if wanted in c.body["Labels"].items()]
                return 200, [{"Id": name, "Status": "Up"} for name in found]
            case "GET", ["exec", name, "json"]:
                process = self.execs[
                    name
                ].process  # whose status is known before all who hold its pipes have closed them
                code = None if process is None else process.returncode
                return 200, {"Running": code is None, "ExitCode": 128 - code if code and code < 0 else code}
            case _, ["containers", name, *_] if name not in self.containers:
                return 404, {"message": f"No such container: {name}"}
            case "POST", ["containers", name, "start"]:
                await self.start(name)
                return 204, None
            case "POST", ["containers", name, "exec"]:
                self.execs[made := secrets.token_hex(16)] = Exec(name, body)
                return 201, {"Id": made}
            case "GET", ["containers", name, "json"]:
                return 200, {"State": {"OOMKilled": False}}
            case "GET", ["containers", name, "stats"]:
                return 200, {"cpu_stats": {"cpu_usage": {"total_usage": self.cpu_ns()}}}
            case "DELETE", ["containers", name]:
                await self.remove(name)
                return 204, None
        return 404, {"message": f"not in this stand-in: {method} {parts}"}

    async def start(self, name: str) -> None:
        body, (read, write) = self.containers[name].body, os.pipe()
        host = body["HostConfig"]
        line = ["bwrap", *NAMESPACES, *ROOT, *LINKS, "--info-fd", str(write)]
        for bind in host.get("Binds") or ():
            here, there, _ = bind.rsplit(":", 2)
            line += ["--ro-bind", here, there]
        for folder, options in host["Tmpfs"].items():
            settings = dict(option.partition("=")[::2] for option in options.split(","))
            size = int(settings["size"].removesuffix("m")) << 20
            line += ["--perms", settings["mode"], "--size", str(size), "--tmpfs", folder]
        line += ["--remount-ro", "/dev", "--chdir", body["WorkingDir"], "--", *body["Cmd"]]
        container = self.containers[name]
        container.process = await asyncio.create_subprocess_exec(*line, pass_fds=(write,), env={"PATH": os.defpath})
        os.close(write)
        with os.fdopen(read) as info:
            container.pid = json.loads(await asyncio.to_thread(info.read))["child-pid"]
        while b"bash" not in Path(f"/proc/{container.pid}/cmdline").read_bytes()[:16]:  # bwrap still sets it up
            await asyncio.sleep(0.005)

    async def hijack(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The connection becomes standard input and, in frames, output of the process."""
        run = self.execs[name]
        container = self.containers[run.container]
        uid, gid = run.body["User"].split(":")
        enter = ["nsenter", "-t", str(container.pid), "-p", "-m", "-n", "-i"]
        drop = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"]
        drop += ["--bounding-set=-all", "--inh-caps=-all", "env", "-C"]
        drop.append(run.body.get("WorkingDir") or container.body["WorkingDir"])
        environment = dict(pair.split("=", 1) for pair in ("PATH=/usr/bin:/bin", *container.body["Env"]))
        writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
        with_stdin = bool(run.body.get("AttachStdin"))
        run.process = await asyncio.create_subprocess_exec(
            *enter, *drop, *run.body["Cmd"],
            env=environment,
            stdin=asyncio.subprocess.PIPE if with_stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        if with_stdin:
            run.process.stdin.write(await reader.read())
            run.process.stdin.close()
        with contextlib.suppress(ConnectionError):
            while data := await run.process.stdout.read(65536):
                writer.write(struct.pack(">BxxxL", 1, len(data)) + data)
                await writer.drain()
        await run.process.wait()

    def cpu_ns(self) -> int:
        """Of everything this process has started and reaped: grows by what a command took."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return int((used.ru_utime + used.ru_stime) * 1e9)

    async def remove(self, name: str) -> None:
        container = self.containers.pop(name)
        if container.process is not None and container.process.returncode is None:
            container.process.kill()
            await container.process.wait()


@contextlib.contextmanager
def daemon(folder: Path, *images: str) -> Iterator[tuple[FakeDaemon, str]]:
    """(the stand-in, its address), served by a thread; whatever it still runs at the end is killed."""
    fake, path, loop = FakeDaemon(images), folder / "docker.sock", asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def here(work: Coroutine) -> object:
        return asyncio.run_coroutine_threadsafe(work, loop).result(20)

    async def end() -> None:
        server.close()
        for name in list(fake.containers):
            await fake.remove(name)
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    server = here(asyncio.start_unix_server(fake.serve, path))
    try:
        yield fake, f"unix://{path}"
    finally:
        here(end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
