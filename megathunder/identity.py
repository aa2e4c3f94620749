"""Which megathunder a process runs: its version, where it was imported from, and a digest of its sources.

Every process of a run must have the same: with an environment that two checkouts share, one process would otherwise
take the installed package and another one the working folder, in silence.
"""

from __future__ import annotations

import functools
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from megathunder.errors import UserError

PACKAGE = Path(__file__).resolve().parent


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """`path` is for messages; two machines may hold one package at different places."""

    version: str
    path: str
    digest: str

    def __str__(self) -> str:
        return f"megathunder {self.version} ({self.digest}) at {self.path}"


@functools.cache
def this_package() -> Identity:
    """Of the package that this process imported."""
    try:
        installed = version("megathunder")
    except PackageNotFoundError:  # run from a checkout that nobody installed
        installed = "not installed"
    return Identity(version=installed, path=str(PACKAGE), digest=digest_of(PACKAGE))


def digest_of(package: Path) -> str:
    """Of every source file below `package`, by name and content."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def require_same_package(who: str, theirs: Identity) -> None:
    """Raise UserError where the process `who` runs other sources than this one."""
    ours = this_package()
    if theirs.digest != ours.digest:
        raise UserError(
            f"{who} runs {theirs}, this process {ours}",
            expected="one package in every process of a run",
            remedy="install one checkout on every machine (pip install -e .), and start the tools of that checkout",
        )
