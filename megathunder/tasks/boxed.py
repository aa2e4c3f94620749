"""Answers of mathematics: the last \\boxed{...} of a text against the right one, compared as expressions (math-verify).

    1/2 = 0.5 = \\frac{1}{2}       "the answer is 3" earns nothing without a box, unless the last number may do

Called by sandbox.grading. Anything that cannot be parsed, or takes too long, is wrong.
"""

from __future__ import annotations

import re

NUMBER = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")
BOX = "\\boxed{"
MAX_CHARACTERS = 200


def last_boxed(text: str) -> str | None:
    """The content of the last box whose braces close; None without one."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth, begin = 1, start + len(BOX)
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


def last_number(text: str) -> str | None:
    """The last whole or decimal number of a text."""
    found = NUMBER.findall(text)
    return found[-1] if found else None


def boxed_reward(text: str, right: str, *, or_last_number: bool = False) -> float:
    """1.0 or 0.0. With `or_last_number` a text without a box answers with its last number."""
    given = last_boxed(text) or (last_number(text) if or_last_number else None)
    if not given or len(given) > MAX_CHARACTERS:
        return 0.0
    if given == right.strip():
        return 1.0
    from math_verify import parse, verify  # half a second to import, and only needed where texts differ

    # no time limits of its own: they need signals, which only a main thread gets; the text is short
    known, found = (parse(f"${text}$", parsing_timeout=None) for text in (right, given))
    return float(verify(known, found, timeout_seconds=None))
