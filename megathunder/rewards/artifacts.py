"""What an agent left in a folder, as files: regular ones, by name, within limits, nothing followed.

Links, devices and names that lead out of the folder are left behind; so is everything above the limits. The archive is
made with the agent's own rights and read here as data. Called by sandbox.verify.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from pathlib import PurePosixPath

from megathunder.sandbox.interface import Sandbox
from megathunder.tasks import TaskFile

ARCHIVE = "/tmp/.taken.tar.gz"
ARCHIVE_S = 30.0
MAX_ARCHIVE_BYTES = 16 << 20
MAX_FILES, MAX_BYTES = 4096, 64 << 20


async def take_folder(sandbox: Sandbox, folder: str) -> dict[str, TaskFile] | None:
    """{path relative to `folder`: file} of /work/`folder`; None if it cannot be had. Raises InfrastructureFailure.

    Bytes that are not UTF-8 travel as surrogates, which `upload` writes as they were.
    """
    command = (
        f"find /tmp -mindepth 1 -delete 2>/dev/null; cd /work/{folder} && "
        f"tar --exclude=.git --exclude=__pycache__ --hard-dereference -czf {ARCHIVE} ."
    )
    await sandbox.exec(command, ARCHIVE_S)
    data = await sandbox.download(ARCHIVE, MAX_ARCHIVE_BYTES)
    return None if data is None else read_archive(data)


def read_archive(data: bytes) -> dict[str, TaskFile] | None:
    """The regular files of a gzipped tar archive; None if it is damaged or above the limits."""
    files: dict[str, TaskFile] = {}
    room = MAX_BYTES
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                if not member.isreg() or path.is_absolute() or ".." in path.parts:
                    continue
                room -= member.size
                if room < 0 or len(files) >= MAX_FILES:
                    return None
                content = archive.extractfile(member).read().decode(errors="surrogateescape")
                files[str(path)] = TaskFile(path=str(path), content=content, mode=member.mode & 0o755 | 0o600)
    except (tarfile.TarError, zlib.error, EOFError, OSError):
        return None
    return files
