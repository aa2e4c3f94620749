"""The server plug-in's draw: the right distribution, the same token for the same seed and position."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from megathunder.rollout.servers.command import CPU_ENGINE

spec = importlib.util.spec_from_file_location("seeded", CPU_ENGINE / "megathunder_seeded_sampling.py")
seeded = importlib.util.module_from_spec(spec)
spec.loader.exec_module(seeded)


def test_draws_follow_the_distribution_over_seeds_and_over_positions():
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    n = 20_000
    rows = probabilities.log().expand(n, -1)
    counting, fixed = torch.arange(n), torch.full((n,), 7)
    for seeds, positions in ((counting, fixed), (fixed, counting), (counting * 2**32, fixed)):
        drawn = seeded.draw(rows, seeds, positions)
        counts = torch.bincount(drawn[:, 0], minlength=5) / n
        assert drawn.shape == (n, 1) and counts[1] == 0
        assert (counts - probabilities).abs().max() < 4 * (0.25 / n) ** 0.5


def test_neighbouring_seeds_and_positions_draw_independently():
    n = 20_000
    u = torch.tensor([[seeded.uniform(s, 5), seeded.uniform(s, 6), seeded.uniform(s + 1, 5)] for s in range(n)])
    correlations = torch.corrcoef(u.T) - torch.eye(3)
    assert correlations.abs().max() < 5 / n**0.5
    assert 0 <= u.min() and u.max() < 1


def test_a_draw_depends_on_its_own_seed_and_position_alone():
    rows = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    seeds, positions = torch.arange(6) * 977, torch.arange(6) + 3
    together = seeded.draw(rows, seeds, positions)
    alone = [seeded.draw(rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(6)]
    assert torch.equal(together, torch.cat(alone))


def test_a_row_without_limits_draws_the_same_beside_rows_with_limits():
    probs = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    vocabulary = 1 << 30  # what SGLang says for no limit
    kept = seeded.within_top(probs, torch.tensor([vocabulary, 1, vocabulary]), torch.tensor([1.0, 1.0, 0.3]))
    assert torch.equal(kept[0], probs[0])
    assert kept[1].nonzero().tolist() == [[probs[1].argmax()]]
    nucleus = kept[2].count_nonzero()
    assert kept[2].sum() >= 0.3 > probs[2].topk(nucleus - 1).values.sum()
    seeds, positions = torch.arange(3) * 977, torch.arange(3) + 3
    plain = seeded.draw(probs[:1].log(), seeds[:1], positions[:1])
    assert torch.equal(seeded.draw(kept.log(), seeds, positions)[:1], plain)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_never_draw_a_token_of_probability_zero(u, monkeypatch):
    monkeypatch.setattr(seeded, "uniform", lambda seed, position: u)
    rows = torch.tensor([[0.0, 0.25, 0.75, 0.0]]).log()
    assert seeded.draw(rows, torch.tensor([1]), torch.tensor([1])).item() in (1, 2)


def test_min_p_leaves_the_tokens_that_are_likely_enough():
    probabilities = torch.tensor([[0.5, 0.05, 0.3, 0.15], [0.25, 0.25, 0.25, 0.25], [0.9, 0.1, 0.0, 0.0]])
    kept = seeded.without_unlikely(probabilities, torch.tensor([0.3, 1.0, 0.0]))
    assert kept.tolist() == [
        pytest.approx([0.5, 0.0, 0.3, 0.15]),
        pytest.approx([0.25] * 4),
        pytest.approx([0.9, 0.1, 0.0, 0.0]),
    ]
    assert probabilities[0, 1] == pytest.approx(0.05)  # the caller's log-probabilities are of all tokens
