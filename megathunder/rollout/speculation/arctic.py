"""A suffix cache over arctic-inference's suffix trees (C++): one tree a group, one a task, one of everything.

    the trajectory's tokens go into its group's, its task's and the common tree; a draft is the nearest tree's whose
    match is at least half as long as the longest

Same interface and same preferences as `patterns.py`, which is its oracle. Trajectories that ended go, oldest first,
beyond `max_tokens`; a tree goes with its last trajectory. Three trees take about 0.3 kB a token.
Built by `settings.py` where `speculation.cache = "arctic"`. The package is optional and compiled when it is installed:
pip install --no-deps -r requirements/speculation.txt
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from arctic_inference.suffix_decoding._C import SuffixTree

from megathunder.rollout.speculation.drafts import NOTHING, Draft
from megathunder.rollout.speculation.origin import Origin

DEPTH = 24
LEAST_SHARE = 0.1  # of a token among those that followed
FACTOR = 4.0  # tokens drafted for one that matched
EVERYTHING = ("", "")


@dataclass(slots=True, eq=False)
class Told:
    """One trajectory: its tokens, the trees they are in, nearest kin first."""

    serial: int
    origin: Origin
    trees: tuple[tuple[str, str], ...]
    tokens: array = field(default_factory=lambda: array("i"))
    running: int = 0


class ArcticCache:
    """`SuffixCache` over suffix trees."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._trees: dict[tuple[str, str], SuffixTree] = {EVERYTHING: SuffixTree(DEPTH)}
        self._held: dict[int, Told] = {}
        self._by_name: dict[str, Told] = {}
        self._requests: dict[str, Told] = {}
        self._serial = 0
        self._tokens = 0

    @property
    def tokens(self) -> int:
        return self._tokens

    def begin(self, request: str, origin: Origin, context: Sequence[int]) -> None:
        context = array("i", context)
        known = self._by_name.get(origin.trajectory)
        if known is None or known.running or context[: len(known.tokens)] != known.tokens:
            self._serial += 1
            near = (("group", origin.group or origin.trajectory), *([("task", origin.task)] if origin.task else ()))
            known = self._held[self._serial] = Told(self._serial, origin, (*near, EVERYTHING))
            self._by_name[origin.trajectory] = known
        known.running += 1
        self._requests[request] = known
        self._append(known, context[len(known.tokens) :])

    def extend(self, request: str, tokens: Sequence[int]) -> None:
        self._append(self._requests[request], tokens)

    def end(self, request: str) -> None:
        self._requests.pop(request).running -= 1
        while self._tokens > self._max_tokens:
            oldest = next((told for told in self._held.values() if not told.running), None)
            if oldest is None:
                return
            self._drop(oldest)

    def draft(self, request: str, limit: int) -> Draft:
        own = self._requests[request]
        if limit < 1 or len(own.tokens) < 2:
            return NOTHING
        context = own.tokens[-DEPTH:].tolist()
        found = [self._trees[k].speculate(context, limit, FACTOR, 0.0, LEAST_SHARE, False) for k in own.trees]
        longest = max(guess.match_len for guess in found)
        for guess in found:
            if guess.token_ids and 2 * guess.match_len >= longest:
                certain = guess.match_len / (guess.match_len + 1)
                return Draft(tuple(guess.token_ids), tuple(certain * p for p in guess.probs))
        return NOTHING

    def _append(self, told: Told, tokens: Sequence[int]) -> None:
        if not len(tokens):
            return
        told.tokens.extend(tokens)
        self._tokens += len(tokens)
        for key in told.trees:
            self._trees.setdefault(key, SuffixTree(DEPTH)).extend(told.serial, list(tokens))

    def _drop(self, told: Told) -> None:
        del self._held[told.serial]
        self._tokens -= len(told.tokens)
        if self._by_name.get(told.origin.trajectory) is told:
            del self._by_name[told.origin.trajectory]
        for key in told.trees:
            tree = self._trees[key]
            tree.remove(told.serial)
            if key != EVERYTHING and tree.num_seqs() == 0:
                del self._trees[key]
