"""Whether a decode step has drafts, and of how many tokens: as many as raise tokens a second, measured, or none.

    chance(p)   how often tokens came true whose path the cache gave probability p (a moving share by bin)
    choose      tokens by chance, likeliest first, r of them: (b + sum chance) / (plain(b) + excess(b, r)), max over r
                none unless that beats b / plain(b) by MARGIN
    open        every request is looked up before every step; shut after the seconds that speculation saved, lookups
                paid, fall below zero
    shut        plain steps. Lookups for at most PEEKING of the time, compared with what is then sampled, feed `chance`
                and tell whether drafting would pay: then it opens

What pays is in seconds of the clock given (the scheduler thread's CPU time on a CPU, wall time on a GPU), scheduling
and result handling included. Ungated: drafts whenever the cache has some. Counts what it does (`Decisions`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megathunder.config.speculation import SpeculationConfig
from megathunder.speculation.costs import OUTLIER, StepCosts
from megathunder.speculation.drafts import NOTHING, Draft

BINS = 8
PRIOR_WEIGHT, SHARE_RATE = 4.0, 1 / 32
MARGIN = 0.03
PEEKING = 0.005
FIRST_CREDIT_S = 1e-3
SAVED_RATE = 1 / 32
AROUND_RATE = 1 / 16
PLAIN_EVERY = 64  # drafted steps of one size without a plain one to compare with
UNGATED_PATH = 0.1


@dataclass(slots=True)
class Decisions:
    """Counted since the server started."""

    steps: int = 0  # that decode, or read prompts while drafts are looked up
    steps_drafted: int = 0
    steps_shut: int = 0
    requests: int = 0  # summed over steps
    lookups: int = 0
    peeks: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    emitted_tokens: int = 0
    openings: int = 0
    lookup_s: float = 0.0


class Chance:
    """Share of tokens that came true, by the probability the cache gave them."""

    def __init__(self) -> None:
        self._shares = [(bin + 0.5) / BINS for bin in range(BINS)]
        self._counts = [PRIOR_WEIGHT] * BINS

    def of(self, path: float) -> float:
        return self._shares[_bin(path)]

    def saw(self, path: float, came_true: bool) -> None:
        place = _bin(path)
        self._counts[place] += 1
        rate = max(SHARE_RATE, 1 / self._counts[place])
        self._shares[place] += rate * (came_true - self._shares[place])


def _bin(path: float) -> int:
    return min(BINS - 1, int(path * BINS))


class Gate:
    """One server's gate. `clock` gives seconds."""

    def __init__(self, settings: SpeculationConfig, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.gated, self.most = settings.gate, settings.max_draft_tokens
        self._limit = settings.max_draft_tokens
        self.costs, self.chance = StepCosts(), Chance()
        self.decisions = Decisions()
        self.open = False
        self._saved_s = 0.0  # moving mean a step, while open; of peeks, while shut
        self._credit_s = FIRST_CREDIT_S
        self._lookup_s = 0.0
        self._since_plain: dict[int, int] = {}
        self._decoding = 0  # requests of the last decode step
        self._step: tuple[float, int, list[Draft], float] | None = None  # start, size, drafts, lookups
        self._ended_s = 0.0
        self._around_s: float | None = None  # between the end of a step and the start of the next, moving mean
        self._looked_up_s = 0.0  # for the step to come

    def control(self, values: dict[str, float]) -> bool:
        """Settings changed from outside; False, and nothing changed, when one is unknown or out of range."""
        known = {"max_draft_tokens": range(self._limit + 1), "gate": (0, 1), "forget": (0, 1)}
        if any(name not in known or value not in known[name] for name, value in values.items()):
            return False
        self.most = int(values.get("max_draft_tokens", self.most))
        self.gated = bool(values.get("gate", self.gated))
        return True

    def asks(self, size: int) -> bool:
        """Whether to look up drafts for the `size` requests of the next step."""
        if not self.most:
            return False
        if not self.gated:
            return True
        return self.open and self.costs.knows(size)

    def asks_after_prompts(self, size: int) -> bool:
        """Whether to look up drafts for the `size` requests whose prompts the next step reads."""
        if not self.most:
            return False
        return not self.gated or (self.open and self.costs.plain(self._beside(size)) > 0)

    def choose(self, drafts: Sequence[Draft], *, room: int, spent_s: float) -> list[Draft]:
        """`drafts`, cut to what pays and to `room` rows in all; `spent_s` is what looking them up took."""
        size = len(drafts)
        if self.gated and self._since_plain.get(size, 0) >= PLAIN_EVERY:
            self._spent(size, spent_s)
            return [NOTHING] * size
        return self._choose(drafts, size, room, spent_s)

    def choose_after_prompts(self, drafts: Sequence[Draft], *, room: int, spent_s: float) -> list[Draft]:
        """The same beside prompts: worth what it is in a decode step of these requests and those that decode now."""
        return self._choose(drafts, self._beside(len(drafts)), room, spent_s)

    def _choose(self, drafts: Sequence[Draft], size: int, room: int, spent_s: float) -> list[Draft]:
        self._spent(len(drafts), spent_s)
        drafts = [Draft(d.tokens[: self.most], d.paths[: self.most]) for d in drafts]
        if self.gated:
            order = self._best(drafts, size, room)
        else:
            widths = [sum(path >= UNGATED_PATH for path in d.paths) for d in drafts]
            order = sorted((j, i) for i, width in enumerate(widths) for j in range(width))[:room]
        chosen = [0] * len(drafts)
        for _, i in order:
            chosen[i] += 1
        return [Draft(d.tokens[:width], d.paths[:width]) for d, width in zip(drafts, chosen)]

    def _beside(self, size: int) -> int:
        """Requests that will decode once `size` prompts are read: about as many as did last."""
        return max(size, self._decoding)

    def _best(self, drafts: Sequence[Draft], size: int, room: int) -> list[tuple[float, int]]:
        """The (-chance, request) of the rows to draft in a step of `size`; those of a request are its first tokens."""
        ranked = []
        for i, draft in enumerate(drafts):
            least = 1.0
            for path in draft.paths:
                least = min(least, self.chance.of(path))
                ranked.append((-least, i))
        ranked.sort()
        plain = self.costs.plain(size)
        best, rows, tokens = (1 + MARGIN) * size / max(plain, 1e-9), 0, float(size)
        for r, (loss, _) in enumerate(ranked[:room], 1):
            tokens -= loss
            rate = tokens / (plain + self.costs.excess(size, r))
            if rate > best:
                best, rows = rate, r
        return ranked[:rows]

    def begin(self, size: int, drafts: list[Draft]) -> None:
        """A step of `size` requests starts; this is also where the one before it ended."""
        now = self._clock()
        if self._step is not None:
            around_s = now - self._ended_s - self._looked_up_s
            self._around_s = around_s if self._around_s is None else self._around_s
            self._around_s += AROUND_RATE * (min(around_s, OUTLIER * self._around_s) - self._around_s)
            self._took(self._ended_s - self._step[0] + around_s)
        self._step, self._decoding = (now, size, drafts, self._looked_up_s), size
        self._looked_up_s = 0.0

    def interrupted(self) -> None:
        """Something other than a decode step comes: the time between steps is taken to be what it mostly is."""
        if self._step is not None and self._around_s is not None:
            self._took(self._ended_s - self._step[0] + self._around_s)
        self._step = None

    def _took(self, seconds: float) -> None:
        """The step that began took `seconds`."""
        _, size, drafts, _ = self._step
        rows = sum(len(draft.tokens) for draft in drafts)
        if rows:
            self.costs.saw_drafted(size, rows, seconds)
        else:
            self.costs.saw_plain(size, seconds)

    def end(self, counts: Sequence[int]) -> None:
        """The step that began emitted `counts` tokens a request."""
        _, size, drafts, paid_s = self._step
        self._ended_s = self._clock()
        rows = sum(len(d.tokens) for d in drafts)
        self._since_plain[size] = self._since_plain.get(size, 0) + 1 if rows else 0
        self._verified(drafts, counts, size, paid_s)

    def prompts_read(self, drafts: Sequence[Draft], counts: Sequence[int]) -> None:
        """A step that read prompts verified `drafts` and emitted `counts` tokens a request."""
        self._verified(drafts, counts, self._beside(len(drafts)), self._looked_up_s)
        self._looked_up_s = 0.0

    def _verified(self, drafts: Sequence[Draft], counts: Sequence[int], size: int, paid_s: float) -> None:
        """What it saved is what the accepted tokens would have taken in plain steps of `size`."""
        rows, accepted = sum(len(d.tokens) for d in drafts), sum(counts) - len(drafts)
        for draft, count in zip(drafts, counts) if rows else ():
            for j, path in enumerate(draft.paths[:count]):  # after the first miss the rest is not known
                self.chance.saw(path, j < count - 1)
        self._count(len(drafts), rows, accepted)
        if self.open and self.gated and self.most and self.costs.plain(size):
            plain = self.costs.plain(size)
            saved = accepted * plain / size - (self.costs.excess(size, rows) if rows else 0.0) - paid_s
            self._weigh(saved)

    def _weigh(self, saved_s: float) -> None:
        self._saved_s += SAVED_RATE * (saved_s - self._saved_s)
        if self._saved_s < 0:
            self.open, self._saved_s = False, 0.0

    def may_peek(self, size: int) -> bool:
        """While shut: whether one request may be looked up now."""
        plain = self.costs.plain(size)
        if self.open or not (self.gated and self.most and plain):
            return False
        self._credit_s = min(self._credit_s + PEEKING * plain, FIRST_CREDIT_S)
        return self._credit_s > 0

    def set_aside(self, seconds: float, *, peeking: bool = False) -> None:
        """Feeding the cache, or peeking, took `seconds` before the step to come, while shut."""
        self._credit_s -= seconds * peeking
        self.decisions.lookup_s += seconds
        self._looked_up_s += seconds

    def would_have(self, size: int, draft: Draft, accepted: int) -> None:
        """What a peek at one of `size` requests drafted, and how many of its tokens then came true."""
        self.decisions.peeks += 1
        for j, path in enumerate(draft.paths[: accepted + 1]):
            self.chance.saw(path, j < accepted)
        if self.open:
            return
        self.costs.doubt()
        plain = self.costs.plain(size)
        rows = len(self._best([draft] * size, size, size * len(draft.tokens)))
        saved = min(rows / size, accepted) * plain - (self.costs.excess(size, rows) if rows else 0.0)
        saved -= self._lookup_s * size
        self._saved_s += 4 * SAVED_RATE * (saved - self._saved_s)
        if self._saved_s > MARGIN * plain:
            self.open = True
            self.decisions.openings += 1

    def report(self) -> dict[str, float]:
        """The counts, and the state, as numbers."""
        state = {"open": int(self.open), "gate": int(self.gated), "max_draft_tokens": self.most}
        return dataclasses.asdict(self.decisions) | state

    def _spent(self, lookups: int, seconds: float) -> None:
        self.decisions.lookups += lookups
        self.decisions.lookup_s += seconds
        self._looked_up_s += seconds
        each = seconds / max(lookups, 1)
        self._lookup_s += (each - self._lookup_s) * (0.1 if self._lookup_s else 1.0)

    def _count(self, size: int, rows: int, accepted: int) -> None:
        counted = self.decisions
        counted.steps += 1
        counted.steps_drafted += bool(rows)
        counted.steps_shut += not (self.open and self.most) and self.gated
        counted.requests += size
        counted.drafted_tokens += rows
        counted.accepted_tokens += accepted
        counted.emitted_tokens += size + accepted
