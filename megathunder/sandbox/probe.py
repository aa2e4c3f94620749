"""Measures whether the sandbox isolates on this machine, and refuses with the reasons where it does not.

One sandbox tries what must not work: a connection to a listener of the host, a file and the processes of the host,
writes outside its folders, a new user namespace; it reads its own uid, capabilities, filter, limits and disk size.
Called by SandboxPool.start; takes well under five seconds.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile

from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import InfrastructureFailure, IsolationError
from megathunder.sandbox.local import LocalSandbox

PROBE_S = 4.0
REMEDY = (
    "run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container also --security-opt seccomp=unconfined)"
)
SCRIPT = """
say() { echo "$1=$2"; }
(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && say network open || say network closed
[ -e {marker} ] && say host_file visible || say host_file hidden
say processes "$(ls -d /proc/[0-9]* | wc -l)"
for path in /usr/.probe /etc/.probe /.probe /dev/.probe /proc/sys/kernel/hostname; do
  (: > $path) 2>/dev/null && say written $path
done
say uid "$(id -u)"
grep -E '^(CapPrm|CapEff|CapBnd|CapInh|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t ' | tr : =
unshare --user true 2>/dev/null && say namespace new || say namespace refused
say nproc "$(ulimit -u)"
say memory_kb "$(ulimit -v)"
say work_kb "$(df -k --output=size /work | tail -1 | tr -d ' ')"
"""


async def probe(config: SandboxConfig) -> None:
    """Raises IsolationError if anything that must be closed is open, within five seconds."""
    with tempfile.TemporaryFile() as errors, tempfile.NamedTemporaryFile() as marker, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        script = SCRIPT.replace("{port}", str(listener.getsockname()[1])).replace("{marker}", marker.name)
        sandbox = LocalSandbox(config, 0)
        try:
            async with asyncio.timeout(PROBE_S):
                await sandbox.start(errors=errors.fileno())
                result = await sandbox.exec(script, PROBE_S)
        except (InfrastructureFailure, TimeoutError, OSError) as error:
            errors.seek(0)
            said = errors.read(500).decode(errors="replace").strip() or str(error)
            raise IsolationError(
                f"the probe sandbox did not run: {said}", expected="a bubblewrap sandbox that starts", remedy=REMEDY
            ) from error
        finally:
            await sandbox.close()
    holes = judge(result.output, config, sandbox.identity.uid)
    if holes:
        raise IsolationError(
            f"the sandbox does not isolate: {'; '.join(holes)}", expected="every one of these closed", remedy=REMEDY
        )


def judge(output: str, config: SandboxConfig, uid: int) -> list[str]:
    """What is open according to the probe's lines; a line that is missing counts as open."""
    pairs = [line.partition("=")[::2] for line in output.splitlines() if "=" in line]
    seen, written = dict(pairs), [value for name, value in pairs if name == "written"]
    zero = "0" * 16
    checks = {
        "the network is reachable": seen.get("network") == "closed",
        "files of the host are visible": seen.get("host_file") == "hidden",
        f"{seen.get('processes')} processes are visible": 1 <= int(seen.get("processes", 0)) <= 8,
        f"{', '.join(written)} can be written": not written,
        f"commands run as uid {seen.get('uid')}": seen.get("uid") == str(uid) and uid != 0 and os.getuid() != uid,
        "capabilities remain": all(seen.get(c) == zero for c in ("CapPrm", "CapEff", "CapBnd", "CapInh")),
        "new privileges can be gained": seen.get("NoNewPrivs") == "1",
        "there is no seccomp filter": seen.get("Seccomp") == "2",
        "namespaces can be made": seen.get("namespace") == "refused",
        f"the process limit is {seen.get('nproc')}": seen.get("nproc") == str(config.processes),
        f"the memory limit is {seen.get('memory_kb')} kB": seen.get("memory_kb") == str(config.memory_mb * 1024),
        f"the work folder has {seen.get('work_kb')} kB": seen.get("work_kb") == str(config.disk_mb * 1024),
    }
    return [hole for hole, closed in checks.items() if not closed]
