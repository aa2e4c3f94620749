"""The file a tool will write, refused before the tool has worked for it."""

from __future__ import annotations

from pathlib import Path

from megathunder.errors import UserError


def output_file(file: Path) -> Path:
    """`file`, in a folder that exists now; UserError where it cannot be written. What it holds already stays."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        there = file.exists()
        with file.open("ab"):
            pass
        if not there:
            file.unlink()
    except OSError as error:
        raise UserError(
            f"{file}: {error.strerror or error}",
            expected="a file that this process may write",
            remedy="name one in a folder of your own",
        ) from None
    return file
