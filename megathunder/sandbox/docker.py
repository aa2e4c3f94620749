"""Sandboxes that are containers of a Docker daemon, for tasks that come with an image (SWE-smith, SWE-bench, ...).

    lease -> container (no network, no capability, no new privileges, a user that is not root, limits) -> removed

Process 1 waits out `sandbox.lifetime_s` and reaps; commands, files in and files out are `docker exec` as the agent's
user, so that its links lead nowhere that it could not go itself (the daemon's own copies do not see mounted folders
either). After each command everything but process 1 is killed. /work and what else anyone may write are sized tmpfs;
the image's own files belong to root. The daemon removes a container whose process 1 has ended, so none outlives a
coordinator that was killed by more than its lifetime. Called by sandbox.backends. Refuses to start without a daemon,
without the image, and where the isolation does not hold.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import docker
from docker.errors import APIError, DockerException, NotFound
from docker.types import Ulimit
from requests.exceptions import RequestException

from megathunder.config.sandbox import SandboxConfig
from megathunder.config.sandbox_checks import ask_daemon, daemon_settings
from megathunder.errors import InfrastructureFailure, IsolationError
from megathunder.sandbox.bubblewrap import ENVIRONMENT, MB, ROOT_FOLDERS, SCRATCH_MB, SHARED_MEMORY_MB, test_runner
from megathunder.sandbox.interface import ExecResult, Member, too_long
from megathunder.sandbox.local import MAX_COMMAND_BYTES
from megathunder.sandbox.output import Kept
from megathunder.sandbox.streams import archive_of, read_output, send
from megathunder.tasks import TaskFile

Result = TypeVar("Result")
FAULTS = (DockerException, RequestException, OSError)
LABEL = "megathunder.pool"
CALL_S, GRACE_S = 60.0, 10.0
LOOK_EVERY_S = 0.03
ROUNDS = 8
KILLED, CONFLICT = 137, 409  # exit status of SIGKILL; HTTP status
FILES_BYTES = 256 * MB  # of one file
WAIT = "end=$((SECONDS + {s})); while [ $SECONDS -lt $end ]; do sleep $((end - SECONDS)) & wait; done"
END_ALL = ["/bin/bash", "--noprofile", "--norc", "-c", "kill -9 -1"]  # spares process 1, as every kill(-1) does
PATHS = 'export PATH="$PATH:/work/.bin"; '  # programs that a task brings
LINKS = "for n in {names}; do [ -e /$n ] || ln -s work/$n /$n; done"
TAKE = 'cd /work; [ -f "$1" ] && [ "$(stat -Lc %s "$1")" -le {most} ] && exec head -c {most} "$1"; exit 1'
PROBE = """
say() { echo "$1=$2"; }
say uid "$(id -u)"
grep -E '^(CapPrm|CapEff|CapBnd|CapInh|NoNewPrivs):' /proc/self/status | tr -d '\\t ' | tr : =
say interfaces "$(ls /sys/class/net 2>/dev/null | grep -vc '^lo$')"
own="$(stat -c %d /)"  # folders that are mounted are not the image's
say writable "$(find / -xdev -type d -writable -printf '%D %p\\n' 2>/dev/null | grep "^$own " | head -2 | tr '\\n' ' ')"
say sockets "$(find / -xdev -name docker.sock 2>/dev/null | wc -l)"
say work_kb "$(df -k --output=size /work | tail -1 | tr -d ' ')"
"""


class DockerBackend:
    """Containers of one pool, told by a label."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.name = secrets.token_hex(6)
        self.held: set[str] = set()  # containers of open sandboxes
        self._threads = ThreadPoolExecutor(2 * config.max_open + 8, thread_name_prefix="docker")
        self._client: docker.APIClient | None = None
        self.used = False

    @property
    def client(self) -> docker.APIClient:
        """Connected on first use. Raises DockerException."""
        if self._client is None:
            settings, size = daemon_settings(self.config), 4 * self.config.max_open + 16
            self.used = True
            self._client = docker.APIClient(version="auto", timeout=CALL_S, max_pool_size=size, **settings)
        return self._client

    async def call(self, work: Callable[[], Result]) -> Result:
        """`work` in a thread; the daemon's faults become InfrastructureFailure."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except FAULTS as error:
            raise InfrastructureFailure(f"the Docker daemon: {type(error).__name__}: {str(error)[:300]}") from error

    async def probe(self) -> None:
        """A daemon, the image, and one container that tries what must not work."""
        await asyncio.get_running_loop().run_in_executor(self._threads, ask_daemon, self.config)
        sandbox = self.make(0, "")
        try:
            await sandbox.start()
            result = await sandbox.exec(PROBE, GRACE_S)
        except InfrastructureFailure as failure:
            raise IsolationError(
                f"the probe container did not run: {failure}",
                expected="a container that starts",
                remedy=f"docker run --rm --network none {self.config.image} bash -c true, and read what it says",
            ) from failure
        finally:
            await sandbox.close()
        if holes := judge(result.output, self.config):
            raise IsolationError(
                f"the container does not isolate: {'; '.join(holes)}",
                expected="every one of these closed",
                remedy="use another image, or a daemon that applies the limits it is given",
            )

    def make(self, slot: int, image: str) -> Member:
        return DockerSandbox(self, slot, self.image_of(image))

    def image_of(self, image: str) -> str:
        return image or self.config.image

    def leaks(self, slots: int) -> list[str]:
        """Containers with this pool's label that no open sandbox holds."""
        if not self.used:
            return []
        try:
            found = self.client.containers(all=True, filters={"label": f"{LABEL}={self.name}"})
        except FAULTS as error:
            return [f"the Docker daemon does not say: {error}"]
        return [f"container {c['Id'][:12]}: {c.get('Status', '')}" for c in found if c["Id"] not in self.held]

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None


class DockerSandbox:
    """One container; never used again by another episode."""

    reusable = False

    def __init__(self, backend: DockerBackend, slot: int, image: str) -> None:
        self.slot, self.healthy = slot, False
        self._backend, self._config, self._image = backend, backend.config, image
        self._container = ""
        self._busy = asyncio.Lock()

    @property
    def alive(self) -> bool:
        return self.healthy

    async def start(self, files: Iterable[TaskFile] = ()) -> None:
        """Creates and starts the container, and writes `files`; raises InfrastructureFailure."""
        client = self._backend.client
        self._container = await self._backend.call(lambda: client.create_container(**self.options())["Id"])
        self._backend.held.add(self._container)
        await self._backend.call(lambda: client.start(self._container))
        self.healthy = True
        links = LINKS.format(names=" ".join(ROOT_FOLDERS))
        await self._run(["/bin/sh", "-c", links], GRACE_S, user="0:0")
        await self.upload(files)

    def options(self) -> dict:
        """The container, as the Engine API takes it."""
        config, client = self._config, self._backend.client
        host = client.create_host_config(
            auto_remove=True,
            network_mode="none",
            privileged=False,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            ipc_mode="private",
            pids_limit=config.processes + 2,  # process 1 and its sleep
            mem_limit=config.memory_mb * MB,
            memswap_limit=config.memory_mb * MB,
            shm_size=SHARED_MEMORY_MB * MB,
            nano_cpus=10**9,
            tmpfs={"/work": sized(config.disk_mb, config.inodes)}
            | {folder: sized(SCRATCH_MB, config.inodes) for folder in ("/tmp", "/var/tmp", "/run")},
            ulimits=[
                Ulimit(name=name, soft=most, hard=most)
                for name, most in (("nofile", 256), ("core", 0), ("fsize", FILES_BYTES), ("cpu", config.cpu_s))
            ],
            binds=[f"{here}:{there}:ro" for here, there in test_runner()],
        )
        wait = WAIT.format(s=int(config.lifetime_s + GRACE_S))
        return {
            "image": self._image,
            "command": ["/bin/bash", "--noprofile", "--norc", "-c", wait],
            "entrypoint": "",
            "user": config.container_user,
            "environment": {name: value for name, value in ENVIRONMENT if name != "PATH"},  # the image has its own
            "working_dir": "/work",
            "hostname": "sandbox",
            "network_disabled": True,
            "labels": {LABEL: self._backend.name},
            "host_config": host,
        }

    async def exec(self, command: str, deadline_s: float) -> ExecResult:
        """Runs `command` with bash for at most `deadline_s`."""
        text = command.replace("\0", "").encode(errors="replace")
        if len(text) > MAX_COMMAND_BYTES:
            return too_long(len(text), MAX_COMMAND_BYTES)
        shell = ["/bin/bash", "--noprofile", "--norc", "-c", PATHS + text.decode(errors="replace")]
        return await self._run(shell, deadline_s)

    async def upload(self, files: Iterable[TaskFile]) -> None:
        """Writes `files` with the agent's rights; raises InfrastructureFailure with tar's words."""
        data = archive_of(files)
        unpack = ["/bin/tar", "--extract", "--unlink-first", "--recursive-unlink", "--no-same-owner", "-C", "/"]
        done = await self._run(unpack, GRACE_S, given=data)
        if done.exit_status or done.fault:
            raise InfrastructureFailure(f"container {self._container[:12]}: {done.output[-300:]}")

    async def download(self, path: str, max_bytes: int) -> bytes | None:
        """The content of a regular file, or None."""
        script = TAKE.format(most=max_bytes)
        taken = bytearray()
        done = await self._run(["/bin/bash", "-c", script, "-", path], GRACE_S, take=taken.extend)
        return None if done.exit_status or done.fault else bytes(taken)

    async def clear(self) -> None:
        raise InfrastructureFailure("a container is not used again")

    async def close(self) -> None:
        """Removes the container with everything in it; one that is gone already is fine."""
        container, self._container, self.healthy = self._container, "", False
        if not container:
            return

        def remove() -> None:
            try:
                self._backend.client.remove_container(container, force=True, v=True)
            except NotFound:
                return
            except APIError as error:  # being removed by the daemon itself
                if error.status_code != CONFLICT:
                    raise

        await self._backend.call(remove)
        self._backend.held.discard(container)

    async def _run(
        self,
        line: list[str],
        limit_s: float,
        *,
        user: str = "",
        given: bytes | None = None,
        take: Callable[[bytes], None] | None = None,
    ) -> ExecResult:
        """One `docker exec`, ended with everything it started."""
        if not self.healthy:
            raise InfrastructureFailure(f"sandbox {self.slot} is not running")
        async with self._busy:
            try:
                return await self._exclusively(line, limit_s, user or self._config.container_user, given, take)
            except (InfrastructureFailure, asyncio.CancelledError):
                self.healthy = False
                raise

    async def _exclusively(
        self, line: list[str], limit_s: float, user: str, given: bytes | None, take: Callable[[bytes], None] | None
    ) -> ExecResult:
        client, call = self._backend.client, self._backend.call
        kept, started_s = Kept(self._config.output_bytes), time.monotonic()
        cpu_s = await call(self._cpu_s)
        wanted = {"user": user, "stdin": given is not None, "workdir": "/work"}
        name = await call(lambda: client.exec_create(self._container, line, **wanted)["Id"])
        raw = await call(lambda: client.exec_start(name, socket=True))
        reading = asyncio.ensure_future(call(lambda: read_output(raw, take or kept.feed)))
        if given is not None:
            await call(lambda: send(raw, given))
        status: int | None = None
        while status is None and time.monotonic() - started_s < limit_s:
            await asyncio.wait((reading,), timeout=LOOK_EVERY_S)
            state = await call(lambda: client.exec_inspect(name))
            status = None if state["Running"] else state["ExitCode"]
        wall_s = time.monotonic() - started_s
        await self._end_all(reading)
        used_s = await call(self._cpu_s) - cpu_s
        fault = "timeout" if status is None else ""
        if status == KILLED and (await call(lambda: client.inspect_container(self._container)))["State"]["OOMKilled"]:
            fault = "memory"
        return ExecResult(
            output=kept.text,
            exit_status=KILLED if status is None else status,
            wall_s=wall_s,
            cpu_s=max(0.0, used_s),
            dropped_bytes=kept.dropped_bytes,
            fault=fault,
        )

    async def _end_all(self, reading: asyncio.Future[None]) -> None:
        """Kill everything but process 1, until the output ends: a fork in flight may outlive one round."""
        client = self._backend.client

        def end() -> None:
            ending = client.exec_create(self._container, END_ALL, user=self._config.container_user)
            client.exec_start(ending["Id"])

        for _ in range(ROUNDS):
            await self._backend.call(end)
            done, _ = await asyncio.wait((reading,), timeout=1.0)
            if done:
                return reading.result()
        raise InfrastructureFailure(f"container {self._container[:12]}: its processes do not end")

    def _cpu_s(self) -> float:
        stats = self._backend.client.stats(self._container, stream=False, one_shot=True)
        return stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9


def sized(size_mb: int, inodes: int) -> str:
    """Options of a tmpfs that anyone may write."""
    return f"rw,exec,nosuid,nodev,mode=1777,size={size_mb}m,nr_inodes={inodes}"


def judge(output: str, config: SandboxConfig) -> list[str]:
    """What is open according to the probe's lines; a line that is missing counts as open."""
    seen = dict(line.partition("=")[::2] for line in output.splitlines() if "=" in line)
    none, uid = {"0" * 16}, config.container_user.partition(":")[0]
    checks = {
        f"commands run as uid {seen.get('uid')}": seen.get("uid") == uid and uid != "0",
        "capabilities remain": {seen.get(c) for c in ("CapPrm", "CapEff", "CapBnd", "CapInh")} == none,
        "new privileges can be gained": seen.get("NoNewPrivs") == "1",
        f"{seen.get('interfaces')} network interfaces": seen.get("interfaces") == "0",
        f"folders of the image can be written: {seen.get('writable')}": seen.get("writable", "?").strip() == "",
        "the daemon's socket is visible": seen.get("sockets") == "0",
        f"the work folder has {seen.get('work_kb')} kB": seen.get("work_kb") == str(config.disk_mb * 1024),
    }
    return [hole for hole, closed in checks.items() if not closed]
