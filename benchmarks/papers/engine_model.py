"""A model of one rollout server: first come first served, whole prompts before decoding, one step at a time.

    step = the waiting requests that fit, computed together          base + per computed token
         | one token for each running request                        base + per running request

Times come from `EngineCosts`, counts from `radix_cache.py`. A request that finds no room for its next token is taken
back: it waits in front and is computed again. Driven by `placement.py` on a virtual clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from benchmarks.papers.radix_cache import RadixCache, Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCosts:
    """Seconds of a step."""

    prefill_base_s: float = 0.006
    prefill_token_s: float = 4.0e-4
    decode_base_s: float = 0.007
    decode_request_s: float = 5.0e-4


@dataclass(eq=False, slots=True, kw_only=True)
class Job:
    """A request at a server: its prompt and the tokens it will sample."""

    prompt: tuple[int, ...]
    samples: tuple[int, ...]
    done: int = 0
    held: Reservation | None = None
    computed_tokens: int = 0  # prompt tokens that were not cached


@dataclass(slots=True)
class EngineModel:
    """`advance` runs one step and says how long it took and what ended with it."""

    cache: RadixCache
    costs: EngineCosts
    max_running: int
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def advance(self) -> tuple[float, list[Job]]:
        """(seconds, jobs that ended with this step)."""
        started = self._start_waiting()
        if started:
            computed = sum(job.computed_tokens for job in started)
            return self.costs.prefill_base_s + computed * self.costs.prefill_token_s, self._end_complete()
        seconds = self.costs.decode_base_s + len(self.running) * self.costs.decode_request_s
        for job in list(self.running):
            if self.cache.grow(job.held):
                job.done += 1
            else:
                self._take_back(job)
        return seconds, self._end_complete()

    def _start_waiting(self) -> list[Job]:
        started: list[Job] = []
        while self.waiting and len(self.running) < self.max_running:
            held = self._begin(self.waiting[0])
            if held is None:
                break
            job = self.waiting.popleft()
            job.held, job.done = held, 1  # computing the prompt samples the first token
            job.computed_tokens += len(job.prompt) - held.cached_tokens
            self.running.append(job)
            started.append(job)
        return started

    def _begin(self, job: Job) -> Reservation | None:
        """Its place, if there is room for it and for what all that run may still sample."""
        reserved = sum(len(other.samples) - other.done for other in self.running)
        held = self.cache.begin(job.prompt, len(job.samples) + reserved if self.running else 0)
        if held is None and not self.running:
            raise ValueError(f"a prompt of {len(job.prompt)} tokens in a cache of {self.cache.capacity}")
        return held

    def _end_complete(self) -> list[Job]:
        ended = [job for job in self.running if job.done >= len(job.samples)]
        for job in ended:
            self.running.remove(job)
            self.cache.end(job.held, job.prompt + job.samples)
        return ended

    def _take_back(self, job: Job) -> None:
        self.running.remove(job)
        self.cache.end(job.held, job.prompt + job.samples[: job.done])
        job.held, job.done = None, 0
        self.waiting.appendleft(job)
