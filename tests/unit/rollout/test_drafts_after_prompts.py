"""A step that reads prompts and verifies drafts: its layout, what SGLang is told first and what after."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megathunder.speculation import prompts
from megathunder.speculation.prompts import can_draft, hand_over, lay_out_prompts, set_aside_the_rest


def reading(prefixes: list[int], lengths: list[int], **changes: object) -> SimpleNamespace:
    """A batch whose prompts have `lengths` tokens, `prefixes` of them cached, as SGLang lays it out."""
    read = [length - prefix for length, prefix in zip(lengths, prefixes)]
    requests = [
        SimpleNamespace(
            origin_input_ids=list(range(length)),
            output_ids=[],
            is_retracted=False,
            finished=lambda: False,
            kv=SimpleNamespace(req_pool_idx=i, kv_allocated_len=length),
        )
        for i, length in enumerate(lengths)
    ]
    batch = SimpleNamespace(
        reqs=requests,
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        orig_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        prefix_lens=prefixes,
        extend_lens=read,
        extend_logprob_start_lens=list(read),
        input_ids=torch.cat([torch.arange(prefix, length) for prefix, length in zip(prefixes, lengths)]),
        out_cache_loc=torch.arange(100, 100 + sum(read)),
        req_pool_indices=torch.arange(len(lengths)),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(len(lengths), 32, dtype=torch.int32)),
        sampling_info=None,
        top_logprobs_nums=[0] * len(lengths),
        token_ids_logprobs=[None] * len(lengths),
        multimodal_inputs=None,
        return_logprob=True,
        is_prefill_only=False,
        decoding_reqs=None,
        input_embeds=None,
        replace_embeds=None,
    )
    vars(batch).update(changes)
    return batch


def test_each_drafted_token_is_a_prompt_of_one_after_those_before_it(monkeypatch):
    batch = reading([2, 0], [5, 3])
    monkeypatch.setattr(prompts, "repeat", lambda batch, owner, rows: setattr(batch, "owner", owner))
    first, second = batch.reqs
    lay_out_prompts(batch, [(50, 51), ()], torch.tensor([200, 201]))
    assert batch.owner == [0, 0, 0, 1]
    assert batch.input_ids.tolist() == [2, 3, 4, 50, 51, 0, 1, 2]
    assert batch.prefix_lens == [2, 5, 6, 0] and batch.extend_lens == [3, 1, 1, 3]
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [5, 6, 7, 3]
    assert batch.extend_logprob_start_lens == batch.extend_lens and batch.extend_num_tokens == 8
    assert batch.out_cache_loc.tolist() == [100, 101, 102, 200, 201, 103, 104, 105]
    assert batch.req_to_token_pool.req_to_token[0, 5:8].tolist() == [200, 201, 0]
    assert (first.kv.kv_allocated_len, second.kv.kv_allocated_len) == (7, 3)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lens_cpu": torch.tensor([5, 2])},  # the second prompt goes on in a later step
        {"extend_logprob_start_lens": [0, 3]},  # log-probabilities of a prompt
        {"top_logprobs_nums": [0, 2]},
        {"is_prefill_only": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_prompts_of_which_more_is_asked_are_read_alone(changes):
    assert can_draft(reading([2, 0], [5, 3]))
    assert not can_draft(reading([2, 0], [5, 3], **changes))


def test_the_first_token_is_told_as_a_prompts_and_the_rest_of_those_that_go_on_as_decoded(monkeypatch):
    result = SimpleNamespace(
        next_token_ids=torch.tensor([1, 2, 3, 4, 4, 4, 7, 8, 7, 9, 10, 11]),
        logits_output=SimpleNamespace(next_token_logprobs=-torch.arange(12.0).view(4, 3)),
    )
    set_aside_the_rest(result, [3, 1, 2, 3], return_logprob=True)
    batch, told = reading([0] * 4, [3] * 4), []
    batch.reqs[3].finished = lambda: True
    monkeypatch.setattr(prompts, "_decoding", lambda batch, on: on)
    processor = SimpleNamespace(process_batch_result_decode=lambda on, kept: told.append((on, kept)))

    def first(processor, batch, result):
        told.append((result.next_token_ids.tolist(), result.logits_output.next_token_logprobs.tolist()))

    monkeypatch.setattr(prompts, "_kept", lambda rest, on: (rest.tokens[on, 1:].tolist(), [rest.counts[i] for i in on]))
    hand_over(first, processor, batch, result)
    assert told == [([1, 4, 7, 9], [0, -3, -6, -9]), ([0, 2], ([[2, 3], [8, 7]], [3, 2]))]
    told.clear()
    hand_over(lambda *_: told.append("prompts alone"), processor, batch, SimpleNamespace())
    assert told == ["prompts alone"]
