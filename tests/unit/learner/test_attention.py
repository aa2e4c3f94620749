"""Packed rows attend exactly as each row would alone."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megathunder.errors import ConfigError
from megathunder.learner.model.attention import AttentionContext, PackedAttention, Prefix, RowSpan

HEADS, GROUPS, HEAD = 4, 2, 8
CONFIG = SimpleNamespace(context_parallel_size=1, attention_dropout=0.0)


def alone(q, k, v):
    """One row [L, heads, head] against keys [C + L, groups, head], bottom-right causal, written out."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / HEAD**0.5
    visible = torch.arange(k.shape[0])[None] <= torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0]
    return torch.einsum("hij,jhd->ihd", F.softmax(scores.masked_fill(~visible, float("-inf")), -1), v)


def make(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((tokens, HEADS, HEAD), (tokens, GROUPS, HEAD), (tokens, GROUPS, HEAD))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def attend(context, q, k, v):
    layer = PackedAttention(CONFIG, 1, None, None)
    out = layer(q[:, None], k[:, None], v[:, None], packed_seq_params=context)
    return out.view(-1, HEADS, HEAD)


def check(got, want, leaves):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    weight = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(9))
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), leaves), torch.autograd.grad((want * weight).sum(), leaves)
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("lengths", [[7], [5, 5, 5], [5, 3, 9, 1], [300, 2, 280, 4000][:3]])
def test_packed_rows_attend_as_each_row_alone(lengths):
    q, k, v = make(sum(lengths))
    parts = [x.split(lengths) for x in (q, k, v)]
    want = torch.cat([alone(*row) for row in zip(*parts)])
    check(attend(AttentionContext.of([RowSpan(length=n) for n in lengths]), q, k, v), want, (q, k, v))


def test_rows_split_into_several_calls_come_back_in_order(monkeypatch):
    monkeypatch.setattr("megathunder.learner.model.attention._SMALL_GROUP_TOKENS_CPU", 0)
    lengths = [3, 20, 2, 19, 7]
    context = AttentionContext.of([RowSpan(length=n) for n in lengths])
    assert len(context.groups) > 1
    q, k, v = make(sum(lengths))
    parts = [x.split(lengths) for x in (q, k, v)]
    check(attend(context, q, k, v), torch.cat([alone(*row) for row in zip(*parts)]), (q, k, v))


def test_prefixes_and_parents_extend_what_a_row_sees():
    q, k, v = make(4 + 3 + 5 + 2)
    _, pk, pv = make(6, seed=3)
    prefix = Prefix({1: (pk, pv)}, 6)
    spans = [
        RowSpan(length=4, start=6, prefix=prefix, prefix_tokens=6),
        RowSpan(length=3, start=5, prefix=prefix, prefix_tokens=5),
        RowSpan(length=5),
        RowSpan(length=2, start=4, parent=2, parent_tokens=4),
    ]
    qs, ks, vs = (x.split([4, 3, 5, 2]) for x in (q, k, v))
    want = torch.cat(
        [
            alone(qs[0], torch.cat([pk, ks[0]]), torch.cat([pv, vs[0]])),
            alone(qs[1], torch.cat([pk[:5], ks[1]]), torch.cat([pv[:5], vs[1]])),
            alone(qs[2], ks[2], vs[2]),
            alone(qs[3], torch.cat([ks[2][:4], ks[3]]), torch.cat([vs[2][:4], vs[3]])),
        ]
    )
    check(attend(AttentionContext.of(spans), q, k, v), want, (q, k, v, pk, pv))


def test_injected_gradients_are_added_in_backward():
    q, k, v = make(4)
    context = AttentionContext.of([RowSpan(length=4)])
    context.inject = {}
    out = attend(context, q, k * 1.0, v * 1.0)
    plain = torch.autograd.grad(out.sum(), (k, v), retain_graph=True)
    context.inject[1] = (torch.ones_like(k), 2 * torch.ones_like(v))
    injected = torch.autograd.grad(out.sum(), (k, v))
    torch.testing.assert_close(injected[0], plain[0] + 1)
    torch.testing.assert_close(injected[1], plain[1] + 2)


def test_padding_to_a_multiple_adds_a_row_that_sees_only_itself():
    context = AttentionContext.of([RowSpan(length=3), RowSpan(length=2)], pad_to=4)
    assert context.tokens == 8 and [s.length for s in context.spans] == [3, 2, 3]


def test_attention_dropout_is_refused():
    with pytest.raises(ConfigError):
        PackedAttention(CONFIG, 1, None, None, attention_dropout=0.1)
