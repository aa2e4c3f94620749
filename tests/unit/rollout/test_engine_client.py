"""The client's tokens, versions, limits and retries, against an HTTP server that misbehaves on order."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web
from rollout_fakes import answer, serving

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.servers.client import EngineClient, Unavailable
from megathunder.rollout.servers.evidence import BadEvidence
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


def spans(*edges):
    return [{"version": "0", "start": start, "end": end} for start, end in edges]


@pytest.mark.parametrize(
    ("tokens", "meta", "said"),
    [
        ([5, 6], {"output_token_logprobs": [[-1.0, 5, None]]}, "2 sampled tokens with log-probabilities of 1"),
        ([5, 6], {"output_token_logprobs": [[-1.0, 5, None], [-1.0, 7, None]]}, "not the same"),
        ([5, 6], {"output_token_logprobs": [[-1.0, 5, None], [None, 6, None]]}, "None at token 1"),
        ([5], {"output_token_logprobs": [[0.3, 5, None]]}, "0.3 at token 0"),
        ([5], {"output_token_logprobs": [[-9999.0, 5, None]]}, "-9999.0 at token 0"),
        ([5], {"output_token_logprobs": [[-1e30, 5, None]]}, "-1e+30 at token 0"),
        ([5, 6], {"weight_versions": spans((0, 1))}, "0-1"),
        ([5, 6], {"weight_versions": spans((0, 2), (1, 1))}, "0-2, 1-1"),
        ([5, 6], {"weight_versions": spans((-1, 1))}, "cover 2 sampled tokens"),
        ([5] * 301, {}, "301 sampled tokens, expected 1 to 4"),
        ([], {}, "0 sampled tokens"),
        ([5, 300], {}, "token id 300 of a vocabulary of 300"),
        ([-1], {}, "token id -1"),
    ],
)
def test_an_answer_that_cannot_be_true_is_bad_evidence_and_not_sent_again_by_the_client(tokens, meta, said):
    error, bodies = generate(lambda body: answer(tokens, **meta), vocab_size=300)
    assert isinstance(error, BadEvidence) and said in str(error) and "rollout-0" in str(error)
    assert len(bodies) == 1


@pytest.mark.parametrize("body", ["null", "{}", '{"output_ids": [5], "meta_info": null}', '{"output_ids": [5'])
def test_null_and_short_answers_are_bad_evidence(body):
    error, _ = generate(lambda _: web.Response(text=body))
    assert isinstance(error, BadEvidence) and "rollout-0 answered" in str(error)


def test_rounding_above_zero_is_no_fault_and_is_trained_as_certain():
    result, _ = generate(lambda body: answer([5], output_token_logprobs=[[1e-7, 5, None]]))
    assert result.logprobs == (0.0,)


def test_an_aborted_request_is_not_a_result():
    error, _ = generate(lambda body: answer([5], finish="abort"))
    assert isinstance(error, Unavailable)


def test_scoring_slices_the_tokens_asked_for():
    listed = [[None, 7, None], [-0.5, 8, None], [-0.25, 9, None]]

    def script(body):
        (_, *opening), *rest = listed[body["logprob_start_len"] :]
        return answer([], input_token_logprobs=[[None, *opening], *rest])

    async def main(start):
        async with serving(script) as fake, EngineClient(timeout_s=5.0) as client:
            return await client.score(fake.address, (7, 8, 9), start)

    assert asyncio.run(main(1)) == (-0.5, -0.25)
    assert asyncio.run(main(2)) == (-0.25,)
    listed[-1] = [-9999.0, 9, None]
    with pytest.raises(BadEvidence, match="-9999"):
        asyncio.run(main(1))
    with pytest.raises(ValueError, match="start 0"):
        asyncio.run(main(0))
