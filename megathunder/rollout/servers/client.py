"""Generation and scoring on a rollout server, by exact token ids.

    generate    prompt ids -> sampled ids, their log-probabilities at the sampling temperature, a policy version each
    parse       sampled text -> the tool calls in it, by SGLang's parsers
    score       given ids -> log-probabilities of ids[start:], one forward, nothing sampled (a teacher)

Transport errors, 404, 408, 429 and 5xx are sent again with bounded backoff, other 4xx are not; both end as
InfrastructureFailure. An answer that cannot be true (`evidence.py`) is BadEvidence, which the engine asks for again.
Every call ends within its limit, tries and waits included. A cancelled call is aborted on the server (it notices the
closed connection). Called by the agent loop and the collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.servers.evidence import BadEvidence, sampled_logprobs, scored_logprobs, token_versions
from megathunder.rollout.servers.protocol import (
    GenerateAnswer,
    GenerateRequest,
    ParseAnswer,
    ParseRequest,
    SamplingParams,
)
from megathunder.rollout.servers.server import authorization
from megathunder.types import ServerAddress

FIRST_WAIT_S = 0.1
RETRIED_STATUS = frozenset({404, 408, 429})  # and every 5xx
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(GenerateAnswer).decode


class Unavailable(InfrastructureFailure):
    """The server did not do it, another (or the same one later) may: not reached, overloaded, dying."""


class NoAnswer(Unavailable):
    """Nothing came within the limit: the server is slow, or its scheduler hangs behind an HTTP side that lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """T sampled tokens (the stop token included), their log-probabilities and the policy version of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    finish_reason: str  # "stop", "length"
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class EngineClient:
    """`async with EngineClient(...) as client:`. `timeout_s` limits one call, `attempts` its tries on one server."""

    def __init__(self, *, timeout_s: float, attempts: int = 3, api_key: str = "") -> None:
        self._timeout_s, self._attempts, self._api_key = timeout_s, attempts, api_key
        self._session: aiohttp.ClientSession | None = None
        self._serial = itertools.count()

    async def __aenter__(self) -> EngineClient:
        connector = aiohttp.TCPConnector(limit=0)  # the collector limits what is in flight
        self._session = aiohttp.ClientSession(connector=connector, headers=authorization(self._api_key))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def generate(
        self,
        server: ServerAddress,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_s: float | None = None,
        vocab_size: int = 0,
    ) -> Generation:
        """Sample one continuation of `prompt_ids` [P]; `timeout_s` replaces the client's own limit; token ids are below
        `vocab_size` (0: not known)."""
        started_s = time.monotonic()
        request = GenerateRequest(
            input_ids=tuple(prompt_ids), sampling_params=sampling, rid=self._request_id(), return_logprob=True
        )
        answer = await self._post(server, request, timeout_s or self._timeout_s)
        meta = answer.meta_info
        with _blamed(server):
            logprobs = sampled_logprobs(answer, most_tokens=sampling.max_new_tokens, vocab_size=vocab_size)
            versions = token_versions(meta, len(logprobs))
        return Generation(
            token_ids=answer.output_ids,
            logprobs=logprobs,
            policy_versions=versions,
            finish_reason=meta.finish_reason.type if meta.finish_reason else "length",
            prompt_tokens=meta.prompt_tokens,
            cached_tokens=meta.cached_tokens,
            seconds=time.monotonic() - started_s,
        )

    async def score(
        self, server: ServerAddress, token_ids: Sequence[int], start: int, *, timeout_s: float | None = None
    ) -> tuple[float, ...]:
        """log q(ids[t] | ids[:t]) for t in start..T-1, at temperature 1; `start` >= 1 (the first token has none)."""
        if not 1 <= start <= len(token_ids):
            raise ValueError(f"start {start} is not in 1..{len(token_ids)}")
        request = GenerateRequest(
            input_ids=tuple(token_ids),
            sampling_params=SamplingParams(max_new_tokens=0),
            rid=self._request_id(),
            return_logprob=True,
            logprob_start_len=start - 1,
        )
        answer = await self._post(server, request, timeout_s or self._timeout_s)
        with _blamed(server):
            return scored_logprobs(answer, token_ids[start:])

    async def parse_tool_calls(
        self, server: ServerAddress, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> ParseAnswer:
        """What SGLang's function-call parser `parser` finds in a sampled text."""
        request = ParseRequest(text=text, tools=tuple(tools), tool_call_parser=parser)
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await self._send(server, "/parse_function_call", _encode(request))
        except TimeoutError as error:
            raise NoAnswer(f"{server.name} did not answer within {self._timeout_s:.1f} s") from error
        try:
            return msgspec.json.decode(content, type=ParseAnswer)
        except msgspec.DecodeError as error:
            raise BadEvidence(f"{server.name} answered {_short(content)}: {error}") from error

    def _request_id(self) -> str:
        return f"mt-{os.getpid()}-{id(self):x}-{next(self._serial)}"

    async def _post(self, server: ServerAddress, request: GenerateRequest, timeout_s: float) -> GenerateAnswer:
        try:
            async with asyncio.timeout(timeout_s):
                return await self._try(server, request)
        except TimeoutError as error:
            raise NoAnswer(f"{server.name} did not answer within {timeout_s:.1f} s") from error

    async def _try(self, server: ServerAddress, request: GenerateRequest) -> GenerateAnswer:
        for attempt in itertools.count(1):
            try:
                return await self._once(server, request)
            except Unavailable:
                if attempt >= self._attempts:
                    raise
            await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            request = msgspec.structs.replace(request, rid=self._request_id())

    async def _once(self, server: ServerAddress, request: GenerateRequest) -> GenerateAnswer:
        content = await self._send(server, "/generate", _encode(request))
        try:
            answer = _decode(content)
        except msgspec.DecodeError as error:
            raise BadEvidence(f"{server.name} answered {_short(content)}: {error}") from error
        reason = answer.meta_info.finish_reason
        if reason is not None and reason.type == "abort":
            raise Unavailable(f"{server.name} aborted the request: {reason.message}")
        return answer

    async def _send(self, server: ServerAddress, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(server.url + path, data=body, headers=headers) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"{server.name} was not reached: {type(error).__name__} {error}") from error
        if response.status in RETRIED_STATUS or response.status >= 500:
            raise Unavailable(f"{server.name} answered {response.status}: {_short(content)}")
        if response.status != 200:
            raise InfrastructureFailure(f"{server.name} refused the request with {response.status}: {_short(content)}")
        return content


@contextlib.contextmanager
def _blamed(server: ServerAddress) -> Iterator[None]:
    """Bad evidence names its server."""
    try:
        yield
    except BadEvidence as fault:
        raise BadEvidence(f"{server.name}: {fault}") from None


def _short(content: bytes) -> str:
    return content[:300].decode(errors="replace").strip()
