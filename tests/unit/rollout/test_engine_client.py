"""The client's tokens, versions, limits and retries, against an HTTP server that misbehaves on order."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from rollout_fakes import answer, serving

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.servers.client import EngineClient, Unavailable
from megathunder.rollout.servers.protocol import SamplingParams

SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.5, sampling_seed=9)


def generate(script, **options):
    """(result or error, requests the server saw)"""

    async def main():
        async with serving(script) as fake, EngineClient(timeout_s=options.pop("timeout_s", 5.0)) as client:
            try:
                return await client.generate(fake.address, (7, 8, 9), SAMPLING, **options), fake.engine.bodies
            except InfrastructureFailure as error:
                return error, fake.engine.bodies

    return asyncio.run(main())


def refuse_first(count: int, status: int):
    seen = []

    def script(body):
        seen.append(body)
        return web.Response(status=status, text="no") if len(seen) <= count else answer([5, 6])

    return script


def test_exact_token_ids_travel_both_ways():
    result, bodies = generate(lambda body: answer([5, 6]))
    assert result.token_ids == (5, 6) and result.logprobs == (-1.0, -1.0)
    assert bodies[0]["input_ids"] == [7, 8, 9] and "text" not in bodies[0]
    assert bodies[0]["sampling_params"] == {"max_new_tokens": 4, "temperature": 0.5, "sampling_seed": 9}
    assert bodies[0]["return_logprob"] is True


def test_every_token_has_the_version_it_was_sampled_with():
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]
    result, _ = generate(lambda body: answer([5, 6, 7], weight_versions=spans))
    assert result.policy_versions == (3, 4, 4)


def test_a_server_that_never_got_a_version_is_at_minus_one():
    result, _ = generate(lambda body: answer([5], version="default"))
    assert result.policy_versions == (-1,)


@pytest.mark.parametrize("status", [404, 500, 503])
def test_404_and_500_are_sent_again(status):
    result, bodies = generate(refuse_first(2, status))
    assert result.token_ids == (5, 6) and len(bodies) == 3
    assert len({body["rid"] for body in bodies}) == 3


def test_400_is_not_sent_again():
    error, bodies = generate(refuse_first(9, 400))
    assert isinstance(error, InfrastructureFailure) and not isinstance(error, Unavailable)
    assert len(bodies) == 1 and "400" in str(error)


def test_tries_are_bounded():
    error, bodies = generate(refuse_first(99, 500))
    assert isinstance(error, Unavailable) and len(bodies) == 3


def test_a_server_that_never_answers_is_an_error_within_the_limit():
    async def silent(body):
        await asyncio.sleep(30)

    started = time.monotonic()
    error, _ = generate(silent, timeout_s=0.5)
    assert isinstance(error, Unavailable) and "0.5 s" in str(error)
    assert time.monotonic() - started < 3


def test_a_closed_port_is_an_error_within_the_limit():
    async def main():
        async with serving(lambda body: answer([5])) as fake:
            address = fake.address
        async with EngineClient(timeout_s=5.0) as client:
            await client.generate(address, (7,), SAMPLING)

    with pytest.raises(Unavailable, match="not reached"):
        asyncio.run(main())


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_logprobs": [[-1.0, 5, None]]},
        {"output_token_logprobs": [[-1.0, 5, None], [None, 6, None]]},
        {"weight_versions": [{"version": "0", "start": 0, "end": 1}]},
    ],
)
def test_tokens_without_logprobs_or_versions_are_refused(meta):
    error, _ = generate(lambda body: answer([5, 6], **meta))
    assert isinstance(error, InfrastructureFailure)


def test_an_aborted_request_is_not_a_result():
    error, _ = generate(lambda body: answer([5], finish="abort"))
    assert isinstance(error, Unavailable)


def test_scoring_slices_the_tokens_asked_for():
    def script(body):
        listed = [[None, 7, None], [-0.5, 8, None], [-0.25, 9, None]][body["logprob_start_len"] :]
        listed[0][0] = None
        return answer([], input_token_logprobs=listed)

    async def main(start):
        async with serving(script) as fake, EngineClient(timeout_s=5.0) as client:
            return await client.score(fake.address, (7, 8, 9), start)

    assert asyncio.run(main(1)) == (-0.5, -0.25)
    assert asyncio.run(main(2)) == (-0.25,)
    with pytest.raises(ValueError, match="start 0"):
        asyncio.run(main(0))
