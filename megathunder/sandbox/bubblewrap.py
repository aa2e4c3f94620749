"""Starts the supervisor of one sandbox under bubblewrap: read-only /usr, nothing else of the host, no network.

    root      bwrap keeps five capabilities for the supervisor (uid 0); each command gets the sandbox's own uid and none
    non-root  bwrap in a user namespace; supervisor and commands share uid 1000 there

New pid, network, IPC, UTS and cgroup namespaces; sized tmpfs for /work, /tmp and /dev/shm, everything else read-only;
cleared environment; seccomp filter; no new privileges. Resource limits are set by the supervisor for each command.

A sandbox ends when the socket to its supervisor closes, however this process dies. bwrap itself must not be killed
while it sets up: its child would wait for its word for ever, deaf to signals and to the socket. So it has a session of
its own, which no signal to a group reaches, and is not asked to die with its parent; `LocalSandbox.close` waits for it.
Called by sandbox.local. Refuses machines without bwrap.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import IsolationError
from megathunder.sandbox.seccomp import build_filter

MB = 1 << 20
READ_ONLY = ("/usr", "/etc/alternatives", "/etc/ld.so.cache", "/etc/nsswitch.conf")
PYTEST_FOLDER = "/opt/pytest"  # in a sandbox: the test runner, for agents and graders
PYTEST_PARTS = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments")
PYTEST_METADATA = ("pytest", "pluggy")  # distributions whose versions are asked for at run time
ROOT_FOLDERS = ("app", "data", "tests", "logs", "solution")  # of terminal tasks: /NAME is /work/NAME
MERGED = ("bin", "sbin", "lib", "lib64")  # symlinks into /usr
ENVIRONMENT = (
    ("PATH", "/usr/local/bin:/usr/bin:/bin:/work/.bin"),
    ("HOME", "/work"),
    ("LANG", "C.UTF-8"),
    ("OMP_NUM_THREADS", "1"),
    ("PYTHONDONTWRITEBYTECODE", "1"),
    ("PYTHONPATH", PYTEST_FOLDER),
    ("GIT_CONFIG_COUNT", "1"),  # the work folder belongs to root and its files to the agent, which git distrusts
    ("GIT_CONFIG_KEY_0", "safe.directory"),
    ("GIT_CONFIG_VALUE_0", "*"),
)
CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_DAC_OVERRIDE")
SCRATCH_MB, SHARED_MEMORY_MB = 16, 4  # sizes of /tmp and /dev/shm
UIDS_PER_PROCESS = 4096
PASSWD = "root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:{uid}:{uid}:agent:/work:/bin/bash\n"
GROUP = "root:x:0:\nagent:x:{uid}:\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who commands run as. `own_uid`: each sandbox has a uid of its own, which needs root."""

    own_uid: bool
    uid: int


def identity(slot: int) -> Identity:
    """The identity of sandbox number `slot` of this process."""
    if os.geteuid() != 0:
        return Identity(own_uid=False, uid=1000)
    mapped = min(mapped_uids(), 1 << 30)
    lowest = mapped // 2
    span = max(1, (mapped - lowest) // UIDS_PER_PROCESS - 1)
    return Identity(own_uid=True, uid=lowest + os.getpid() % span * UIDS_PER_PROCESS + slot % UIDS_PER_PROCESS)


@cache
def mapped_uids() -> int:
    """How many uids exist for this process, from 0 on (fewer in a container with a user namespace)."""
    with open("/proc/self/uid_map") as table:
        rows = [tuple(map(int, line.split())) for line in table]
    return next((length for inside, _, length in rows if inside == 0), 1)


@cache
def filter_file() -> int:
    """A descriptor of the seccomp program; every sandbox reads it through an opening of its own."""
    descriptor = os.memfd_create("seccomp")
    os.write(descriptor, build_filter())
    return descriptor


@cache
def supervisor_script() -> str:
    return files("megathunder.sandbox").joinpath("supervisor.pl").read_text()


@cache
def test_runner() -> tuple[tuple[str, str], ...]:
    """(path here, path in a sandbox) of pytest and what it imports, all pure Python; empty where it is missing."""
    found = []
    for name in PYTEST_PARTS:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            return ()
        origin = Path(spec.origin)
        found.append(origin.parent if origin.name == "__init__.py" else origin)
    for name in PYTEST_METADATA:
        listed = distribution(name).files or ()
        found += [Path(str(file.locate())).parent for file in listed if file.name == "METADATA"]
    return tuple((str(path), f"{PYTEST_FOLDER}/{path.name}") for path in found)


def find_bwrap() -> str:
    """The path of bwrap; raises IsolationError with the command that installs it."""
    path = shutil.which("bwrap")
    if path is None:
        raise IsolationError(
            "bwrap was not found, and commands of a policy never run without isolation",
            expected="bubblewrap on the PATH",
            remedy="apt-get install bubblewrap",
        )
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """Open files that bwrap reads while it sets up."""

    seccomp: int
    passwd: int
    group: int

    @staticmethod
    def open(who: Identity) -> Descriptors:
        return Descriptors(
            seccomp=os.open(f"/proc/self/fd/{filter_file()}", os.O_RDONLY),
            passwd=memory_file(PASSWD.format(uid=who.uid)),
            group=memory_file(GROUP.format(uid=who.uid)),
        )

    @property
    def all(self) -> tuple[int, ...]:
        return self.seccomp, self.passwd, self.group


def memory_file(text: str) -> int:
    """A descriptor that reads `text`."""
    descriptor = os.memfd_create("sandbox")
    os.write(descriptor, text.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def arguments(config: SandboxConfig, who: Identity, given: Descriptors) -> list[str]:
    """The command line of one sandbox, supervisor included."""
    line = [find_bwrap(), "--new-session", "--as-pid-1", "--hostname", "sandbox"]
    line += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    line += ["--cap-drop", "ALL"]
    if who.own_uid:
        line += [x for capability in CAPABILITIES for x in ("--cap-add", capability)]
    else:
        line += ["--unshare-user", "--uid", str(who.uid), "--gid", str(who.uid)]
    line += ["--perms", "0755", "--dir", "/etc"]
    line += [x for path in READ_ONLY for x in ("--ro-bind-try", path, path)]
    line += ["--perms", "0755", "--dir", "/opt", "--perms", "0755", "--dir", PYTEST_FOLDER]
    line += [x for here, there in test_runner() for x in ("--ro-bind", here, there)]
    line += [x for name in ROOT_FOLDERS for x in ("--symlink", f"work/{name}", f"/{name}")]
    line += ["--perms", "0644", "--ro-bind-data", str(given.passwd), "/etc/passwd"]
    line += ["--perms", "0644", "--ro-bind-data", str(given.group), "/etc/group"]
    for name in MERGED:
        if os.path.islink(f"/{name}"):
            line += ["--symlink", f"usr/{name}", f"/{name}"]
        else:
            line += ["--ro-bind-try", f"/{name}", f"/{name}"]
    line += ["--proc", "/proc", "--dev", "/dev"]
    for folder, size_mb in (("/dev/shm", SHARED_MEMORY_MB), ("/tmp", SCRATCH_MB), ("/work", config.disk_mb)):
        line += ["--perms", "1777" if folder != "/work" else "0777", "--size", str(size_mb * MB), "--tmpfs", folder]
    line += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/work", "--clearenv"]
    line += [x for name, value in ENVIRONMENT for x in ("--setenv", name, value)]
    line += ["--seccomp", str(given.seccomp), "--", "/usr/bin/perl", "-e", supervisor_script()]
    limits = (who.uid, config.memory_mb, config.processes, config.cpu_s, config.inodes)
    return line + [*map(str, limits), platform.machine(), str(int(who.own_uid)), owner_mark()]


def owner_mark() -> str:
    """The last argument of bwrap and of the supervisor, by which the processes of this process' sandboxes are found."""
    return f"megathunder-{os.getpid()}"


def spawn(
    config: SandboxConfig, who: Identity, errors: int = subprocess.DEVNULL
) -> tuple[subprocess.Popen, socket.socket]:
    """Starts a sandbox; frames are spoken over the socket. `errors` is where bwrap's complaints go."""
    ours, theirs = socket.socketpair()
    given = Descriptors.open(who)
    try:
        process = subprocess.Popen(
            arguments(config, who, given),
            stdin=theirs,
            stdout=theirs,
            stderr=errors,
            pass_fds=given.all,
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        for descriptor in given.all:
            os.close(descriptor)
    return process, ours
