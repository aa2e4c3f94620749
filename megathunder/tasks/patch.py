"""Unified diffs applied to files in memory, strictly: every context line must be where the diff says.

    apply_patch({path: text}, diff) -> {path: text}        make_patch(path, before, after) -> diff

Called by tasks.swe and the tools that make tasks. Refuses binary patches, renames and hunks that do not fit.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megathunder.errors import UserError

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
LINE = re.compile(r"[^\n]*\n|[^\n]+")
NONE = "/dev/null"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hunk:
    """Lines with their marks (" ", "-", "+"), from line `start` (1-based) of the old file on."""

    start: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePatch:
    """What a diff does to one file; `old` or `new` is /dev/null for a new or deleted one."""

    old: str
    new: str
    hunks: tuple[Hunk, ...]


def lines_of(text: str) -> list[str]:
    """The lines of `text` with their ends, as diff and patch see them: a form feed, say, ends none."""
    return LINE.findall(text)


def make_patch(path: str, before: str, after: str) -> str:
    """The unified diff from one text of a file to another."""
    diff = difflib.unified_diff(lines_of(before), lines_of(after), f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in diff)


def apply_patch(files: Mapping[str, str], diff: str) -> dict[str, str]:
    """`files` after `diff`; raises UserError where it does not fit."""
    result = dict(files)
    for patch in parse_patch(diff):
        before = "" if patch.old == NONE else result.get(patch.old)
        if before is None:
            raise _misfit(patch.old, "no such file")
        if patch.old != NONE:
            del result[patch.old]
        if patch.new != NONE:
            result[patch.new] = _patched(before, patch)
    return result


def parse_patch(diff: str) -> list[FilePatch]:
    """The files of a diff; `a/` and `b/` are taken off their names."""
    lines, found, at = lines_of(diff), list[FilePatch](), 0
    while at < len(lines):
        if lines[at].startswith(("GIT binary patch", "rename from")):
            raise _misfit(lines[at].strip(), "binary patches and renames are not applied")
        if not (lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")):
            at += 1
            continue
        old, new = (_name(lines[at + i]) for i in range(2))
        at, hunks = at + 2, list[Hunk]()
        while at < len(lines) and (match := HUNK.match(lines[at])):
            at, hunk = _hunk(lines, at + 1, match)
            hunks.append(hunk)
        found.append(FilePatch(old=old, new=new, hunks=tuple(hunks)))
    return found


def _hunk(lines: list[str], at: int, match: re.Match[str]) -> tuple[int, Hunk]:
    left, right = (int(match[i] or 1) for i in (2, 4))
    body: list[str] = []
    while at < len(lines) and (left > 0 or right > 0 or lines[at].startswith("\\")):
        line = f" {lines[at]}" if lines[at] in ("\n", "\r\n") else lines[at]  # some tools strip an empty context line
        at += 1
        if line.startswith("\\") and body:
            body[-1] = body[-1].removesuffix("\n")
            continue
        if line[0] not in " -+":
            raise _misfit(match[0], f"{line.strip()!r} is no line of a hunk")
        left -= line[0] in " -"
        right -= line[0] in " +"
        body.append(line)
    return at, Hunk(start=int(match[1]), lines=tuple(body))


def _patched(text: str, patch: FilePatch) -> str:
    lines, result, at = lines_of(text), list[str](), 0
    for hunk in patch.hunks:
        old = [line[1:] for line in hunk.lines if line[0] in " -"]
        start = max(hunk.start - 1, 0) if old else hunk.start
        if start < at or lines[start : start + len(old)] != old:
            raise _misfit(patch.new, f"the hunk at line {hunk.start} does not fit")
        result += lines[at:start] + [line[1:] for line in hunk.lines if line[0] in " +"]
        at = start + len(old)
    return "".join(result + lines[at:])


def _name(line: str) -> str:
    name = line[4:].split("\t")[0].strip()
    return name if name == NONE else name.split("/", 1)[-1] if name[:2] in ("a/", "b/") else name


def _misfit(where: str, why: str) -> UserError:
    return UserError(
        f"a patch does not apply to {where}: {why}",
        expected="a unified diff of text files against the repository beside it",
        remedy="check that the repository is at the commit the task names",
    )
