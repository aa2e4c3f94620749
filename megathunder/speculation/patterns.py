"""A suffix cache in plain Python: every place where the last two tokens occurred before is a guess of what follows.

    (t[-2], t[-1]) -> places -> those with the longest match backwards -> of the nearest kin -> vote on every next token

Kin: the same group (its own trajectory included), else the same task, else any. Only the newest places of a pair are
looked at, those within the task and those anywhere: pairs such as the opening of a turn are everywhere, and places of
other tasks would hide those of kin. A place's estimate is its share of the votes times m / (m + 1) for a match of m
tokens, so that one long match weighs more than one short.
Trajectories that ended go, oldest first, beyond `max_tokens`. 0.1 to 0.25 kB a token.
Called by the drafter; the oracle of the adapter to arctic-inference (`arctic.py`) in tests.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence

from megathunder.speculation.drafts import NOTHING, Draft
from megathunder.speculation.origin import Origin
from megathunder.speculation.trajectories import TOKEN, Told, TrajectoryCache

ANCHOR = 2
DEPTH = 16  # tokens compared backwards
PLACES = 12  # newest occurrences of an anchor that are looked at
PLACE_BITS = 32
ANYBODY = 2


class PatternCache(TrajectoryCache):
    """`SuffixCache` over an index of token pairs."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._places: dict[int, int | list[int]] = {}  # by indexed pair; a lone place is no list: most occur once

    def draft(self, request: str, limit: int) -> Draft:
        own = self._requests[request]
        found = self._matches(own)
        if not found or limit < 1:
            return NOTHING
        longest = max(match for match, _, _ in found)
        near = [place for place in found if 2 * place[0] >= longest]
        nearest = min(_distance(place[1].origin, own.origin) for place in near)
        kin = [(s.tokens, at) for _, s, at in near if _distance(s.origin, own.origin) == nearest]
        return _vote(kin, longest, limit)

    def _added(self, told: Told, had: int) -> None:
        held, places, stamp, within = told.tokens, self._places, told.serial << PLACE_BITS, _index(told.origin)
        for at in range(max(had, ANCHOR), len(held)):
            pair = _pair(held[at - 2], held[at - 1])
            for key in (pair, within | pair):
                known = places.get(key)
                if known is None:
                    places[key] = stamp | at
                elif isinstance(known, int):
                    places[key] = [known, stamp | at]
                else:
                    known.append(stamp | at)
                    if len(known) > 2 * PLACES:
                        del known[:PLACES]

    def _known(self, pair: int) -> list[int]:
        """FusedLayout of an indexed pair, oldest first."""
        known = self._places.get(pair, [])
        return [known] if isinstance(known, int) else known

    def _matches(self, own: Told) -> list[tuple[int, Told, int]]:
        """(tokens that match backwards, where, position of the token that followed) for the newest places."""
        held = own.tokens
        if len(held) < ANCHOR:
            return []
        pair, tail = _pair(held[-2], held[-1]), held[-DEPTH:]
        kin = self._known(_index(own.origin) | pair)[: -PLACES - 1 : -1]
        found = list(self._compared(kin, tail))
        if any(2 * match >= DEPTH and _distance(s.origin, own.origin) < ANYBODY for match, s, _ in found):
            return found  # no match elsewhere can be more than twice as long
        others = [place for place in self._known(pair)[: -PLACES - 1 : -1] if place not in kin]
        return found + list(self._compared(others, tail))

    def _compared(self, places: Sequence[int], tail: array) -> Iterator[tuple[int, Told, int]]:
        for place in places:
            sequence, at = self._held.get(place >> PLACE_BITS), place & ((1 << PLACE_BITS) - 1)
            if sequence is not None and at < len(sequence.tokens):
                yield _match(sequence.tokens, at, tail), sequence, at

    def _dropped(self, told: Told) -> None:
        tokens, within = told.tokens, _index(told.origin)
        pairs = {_pair(tokens[i], tokens[i + 1]) for i in range(len(tokens) - 1)}
        for pair in pairs | {within | pair for pair in pairs}:
            left = [place for place in self._known(pair) if place >> PLACE_BITS in self._held]
            if left:
                self._places[pair] = left if len(left) > 1 else left[0]
            else:
                self._places.pop(pair, None)


def _pair(first: int, second: int) -> int:
    return first << PLACE_BITS | second


def _index(origin: Origin) -> int:
    """What is added to a pair where it is looked up within a task (a group or trajectory, if that is all that is
    known). Two tasks may share an index: what is found there is ranked by origin."""
    return 1 + zlib.crc32((origin.task or origin.group or origin.trajectory).encode()) << 2 * PLACE_BITS


def _match(tokens: array, at: int, tail: array) -> int:
    """How many tokens before position `at` equal the end of `tail`."""
    length = len(tail)
    if at >= length and tokens[at - length : at] == tail:
        return length
    match = 0
    while match < min(length, at) and tokens[at - 1 - match] == tail[-1 - match]:
        match += 1
    return match


def _distance(theirs: Origin, ours: Origin) -> int:
    """0: same group (or trajectory), 1: same task, ANYBODY: neither."""
    if theirs.trajectory == ours.trajectory or (ours.group and theirs.group == ours.group):
        return 0
    return 1 if ours.task and theirs.task == ours.task else ANYBODY


def _vote(places: list[tuple[array, int]], match: int, limit: int) -> Draft:
    """Follow the most frequent next token, the newest on a tie, as long as a place goes on."""
    told = Counter(held[at : at + limit].tobytes() for held, at in places)  # siblings often say the same
    rows = [(array(TOKEN, text), count) for text, count in told.items()]
    tokens, paths, path = [], [], 1.0
    for step in range(limit):
        votes: Counter[int] = Counter()
        for row, count in rows:
            if step < len(row):
                votes[row[step]] += count
        if not votes:
            break
        token = max(votes, key=votes.__getitem__)
        path *= votes[token] / votes.total() * (match + step) / (match + step + 1)
        tokens.append(token)
        paths.append(path)
        rows = [(row, count) for row, count in rows if step < len(row) and row[step] == token]
    return Draft(tuple(tokens), tuple(paths))
