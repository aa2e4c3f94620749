"""A suffix cache over arctic-inference's suffix trees (C++): one tree a group, one a task, one of everything.

    the trajectory's tokens go into its group's, its task's and the common tree; a draft is the nearest tree's whose
    match is at least half as long as the longest

Same interface and same preferences as `patterns.py`, which is its oracle. Trajectories that ended go, oldest first,
beyond `max_tokens`; a tree goes with its last trajectory. Three trees take about 0.3 kB a token.
Built by `settings.py` where `speculation.cache = "arctic"`. The package is optional and compiled when it is installed:
pip install --no-deps -r requirements/speculation.txt
"""

from __future__ import annotations

from arctic_inference.suffix_decoding._C import SuffixTree

from megathunder.speculation.drafts import NOTHING, Draft
from megathunder.speculation.origin import Origin
from megathunder.speculation.trajectories import Told, TrajectoryCache

DEPTH = 24
LEAST_SHARE = 0.1  # of a token among those that followed
FACTOR = 4.0  # tokens drafted for one that matched
EVERYTHING = ("", "")
Key = tuple[str, str]


class ArcticCache(TrajectoryCache):
    """`SuffixCache` over suffix trees."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._trees: dict[Key, SuffixTree] = {EVERYTHING: SuffixTree(DEPTH)}

    def draft(self, request: str, limit: int) -> Draft:
        own = self._requests[request]
        if limit < 1 or len(own.tokens) < 2:
            return NOTHING
        context, trees = own.tokens[-DEPTH:].tolist(), (self._trees[key] for key in _keys(own.origin))
        found = [tree.speculate(context, limit, FACTOR, 0.0, LEAST_SHARE, False) for tree in trees]
        longest = max(guess.match_len for guess in found)
        for guess in found:
            if guess.token_ids and 2 * guess.match_len >= longest:
                certain = guess.match_len / (guess.match_len + 1)
                return Draft(tuple(guess.token_ids), tuple(certain * p for p in guess.probs))
        return NOTHING

    def _added(self, told: Told, had: int) -> None:
        for key in _keys(told.origin):
            self._trees.setdefault(key, SuffixTree(DEPTH)).extend(told.serial, told.tokens[had:].tolist())

    def _dropped(self, told: Told) -> None:
        for key in _keys(told.origin):
            tree = self._trees[key]
            tree.remove(told.serial)
            if key != EVERYTHING and tree.num_seqs() == 0:
                del self._trees[key]


def _keys(origin: Origin) -> tuple[Key, ...]:
    """The trees of a trajectory, nearest kin first."""
    near = (("group", origin.group or origin.trajectory), *([("task", origin.task)] if origin.task else ()))
    return (*near, EVERYTHING)
