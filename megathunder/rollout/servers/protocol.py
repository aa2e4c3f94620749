"""What SGLang's HTTP endpoints take and answer: the fields used here, checked on arrival.

Log-probabilities are those at the sampling temperature. A token id outside the vocabulary or a missing log-probability
is a decoding error (msgspec.ValidationError), never a silent default.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megathunder.speculation.origin import Origin

TokenLogprob = tuple[float | None, int, str | None]  # (log-probability, token id, text); None for the first input token


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`sampling_params` of a request. `sampling_seed` draws the same tokens for the same request again."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    top_k: int = -1
    min_p: float = 0.0
    custom_params: Origin | None = None  # read by a server that drafts


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of POST /generate."""

    input_ids: tuple[int, ...]
    sampling_params: SamplingParams
    rid: str
    return_logprob: bool = False
    logprob_start_len: int = -1


class FinishReason(msgspec.Struct, frozen=True, kw_only=True):
    """`type` is stop, length or abort."""

    type: str
    message: str = ""


class ParseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /parse_function_call. `tools` are function definitions as OpenAI has them."""

    text: str
    tools: tuple[dict[str, Any], ...]
    tool_call_parser: str


class ParsedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that was found; `parameters` is a JSON object as text."""

    name: str
    parameters: str


class ParseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /parse_function_call: the text around the calls, and the calls of functions that there are."""

    normal_text: str
    calls: tuple[ParsedCall, ...] = ()


class VersionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Sampled tokens [start, end) have weights of `version`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: FinishReason | None
    weight_version: str
    weight_versions: tuple[VersionSpan, ...] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: tuple[TokenLogprob, ...] = ()
    input_token_logprobs: tuple[TokenLogprob, ...] = ()


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of POST /generate."""

    output_ids: tuple[int, ...]
    meta_info: MetaInfo


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /model_info."""

    model_path: str
    weight_version: str


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /server_info: SGLang's version and what it was started with."""

    version: str
    tp_size: int = 1
    custom_weight_loader: tuple[str, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one data-parallel rank."""

    num_running_reqs: int
    num_waiting_reqs: int


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /v1/loads."""

    loads: tuple[Load, ...]


class SpeculationCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What our speculation plug-in reports of a server, counted since its start."""

    steps: int  # that decode, or read prompts while drafts are looked up
    steps_drafted: int
    steps_shut: int
    requests: int  # summed over steps
    lookups: int
    drafted_tokens: int
    accepted_tokens: int
    emitted_tokens: int
    openings: int
    lookup_s: float
    cached_tokens: int
    open: int
    max_draft_tokens: int


class InternalState(msgspec.Struct, frozen=True, kw_only=True):
    speculation: SpeculationCounts | None = None


class ServerState(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of GET /server_info: the state of its ranks."""

    internal_states: tuple[InternalState, ...] = ()


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of the weight endpoints."""

    success: bool
    message: str = ""


def policy_version(text: str) -> int:
    """Weight versions are decimal integers; -1 for a server that never got one (SGLang says `default`)."""
    return int(text) if text.isdecimal() else -1
