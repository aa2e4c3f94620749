"""Generation on whichever server is ready: routing, retries across restarts, and the check of the policy version.

    wait until a server is ready -> assign -> generate -> every token of `policy_version`?  -> Generation
              ^------------------ not reached, died, aborted, another version ------|

A request is repeated with the same exact token ids, so nothing that was sampled is lost when a server dies. One that
got no answer in time is a deadline of its trajectory only if the server still samples for others; a server that hangs
is restarted. Called by the agent loop and the collector.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from megathunder.config.rollout import RolloutConfig
from megathunder.config.routing import RoutingConfig
from megathunder.errors import InfrastructureFailure
from megathunder.rollout.routing import Assignment, RequestRouter, build_router
from megathunder.rollout.servers.client import EngineClient, Generation, NoAnswer, Unavailable
from megathunder.rollout.servers.evidence import BadEvidence, vocab_size
from megathunder.rollout.servers.protocol import ParseAnswer, SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.rollout.servers.tool_parsers import choose_tool_parser
from megathunder.types import TrajectoryId

Result = TypeVar("Result")
log = logging.getLogger(__name__)
RETRY_WAIT_S = 1.5  # a server whose scheduler died takes seconds to end


class EpisodeClock:
    """The wall-clock limit of one trajectory. Time lost to the machinery does not count against the policy."""

    def __init__(self, limit_s: float) -> None:
        self._ends_s = time.monotonic() + limit_s

    @property
    def remaining_s(self) -> float:
        return self._ends_s - time.monotonic()

    def forgive(self, since_s: float) -> None:
        """Do not count the time since `since_s`."""
        self._ends_s += time.monotonic() - since_s


class DeadlinePassed(Exception):
    """The trajectory's own time is used up; an outcome of the policy, not a fault."""


class Engine:
    """The servers of one model behind one call. One for the policy; one for the teacher."""

    def __init__(
        self, pool: ServerPool, client: EngineClient, config: RolloutConfig, router: RequestRouter | None = None
    ) -> None:
        self._pool, self._client, self._config = pool, client, config
        self._vocab_size = vocab_size(pool.model)
        self.tool_parser = choose_tool_parser(config.tool_parser, pool.model)
        self._router = router or build_router(RoutingConfig(policy="session"), config, pool)

    async def generate(
        self,
        trajectory: TrajectoryId,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        policy_version: int,
        clock: EpisodeClock,
    ) -> Generation:
        """Sample one turn. Raises DeadlinePassed, or InfrastructureFailure once the retries are used up."""

        async def once(assignment: Assignment, timeout_s: float) -> Generation:
            generation = await self._client.generate(
                assignment.server, prompt_ids, sampling, timeout_s=timeout_s, vocab_size=self._vocab_size
            )
            others = set(generation.policy_versions) - {policy_version}
            if others:
                name = assignment.server.name
                raise Unavailable(f"{name} sampled with version {sorted(others)}, wanted {policy_version}")
            assignment.tokens = len(prompt_ids) + len(generation.token_ids)
            return generation

        return await self._somewhere(trajectory, len(prompt_ids), policy_version, once, clock)

    async def score(
        self, trajectory: TrajectoryId, token_ids: Sequence[int], start: int, clock: EpisodeClock
    ) -> tuple[float, ...]:
        """Log-probabilities of token_ids[start:], [T - start]. Raises as `generate` does."""

        async def once(assignment: Assignment, timeout_s: float) -> tuple[float, ...]:
            logprobs = await self._client.score(assignment.server, token_ids, start, timeout_s=timeout_s)
            assignment.tokens = len(token_ids)
            return logprobs

        return await self._somewhere(trajectory, len(token_ids), 0, once, clock)

    async def parse_tool_calls(self, text: str, tools: Sequence[dict[str, Any]], parser: str) -> ParseAnswer:
        """The tool calls in a sampled text, by `parser` on a ready server. Raises InfrastructureFailure once the
        retries are used up."""
        for attempt in range(self._config.max_retries + 1):
            ready = await self._pool.wait_ready(self._config.startup_timeout_s)
            server = ready[attempt % len(ready)]
            try:
                return await self._client.parse_tool_calls(server, text, tools, parser)
            except Unavailable:
                self._pool.probe_now(server)
                if attempt == self._config.max_retries:
                    raise
            await asyncio.sleep(RETRY_WAIT_S * 2**attempt)
        raise InfrastructureFailure("max_retries is negative")

    def release(self, trajectory: TrajectoryId) -> None:
        """The trajectory ended: its place is free."""
        self._router.release(trajectory)

    async def close(self) -> None:
        """No request is under way any more. Idempotent."""
        await self._router.close()

    async def _somewhere(
        self,
        trajectory: TrajectoryId,
        tokens: int,
        version: int,
        once: Callable[[Assignment, float], Awaitable[Result]],
        clock: EpisodeClock,
    ) -> Result:
        said = ""  # the same bad answer twice will be the same a third time
        for attempt in range(self._config.max_retries + 1):
            started_s = time.monotonic()
            await self._pool.wait_ready(self._config.startup_timeout_s)
            assignment = await self._router.assign(trajectory, tokens, version)
            clock.forgive(started_s)
            try:
                limit_s = min(self._config.request_timeout_s, clock.remaining_s)
                if limit_s <= 0:
                    raise DeadlinePassed
                started_s = time.monotonic()
                return await once(assignment, limit_s)
            except BadEvidence as failure:
                if attempt == self._config.max_retries or str(failure) == said:
                    raise
                said = str(failure)
                log.warning("%s; asking again", failure)
            except Unavailable as failure:
                hangs = isinstance(failure, NoAnswer) and not await self._pool.can_generate(assignment.server)
                if not hangs and clock.remaining_s <= 0 and limit_s < self._config.request_timeout_s:
                    raise DeadlinePassed from None
                self._pool.probe_now(assignment.server)
                if attempt == self._config.max_retries:
                    raise
            finally:
                self._router.done(assignment)
            await asyncio.sleep(RETRY_WAIT_S * 2**attempt)
            clock.forgive(started_s)
        raise InfrastructureFailure("max_retries is negative")
