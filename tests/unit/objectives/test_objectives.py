"""GRPO and OPD as the scheduler sees them: rows, scales, accumulators, closure, normaliser, refusals."""

from dataclasses import replace

import pytest
from oracles.advantages import advantages
from oracles.token_losses import clipped_loss, k3, sampled_reverse_kl

from megathunder.accumulator_keys import BATCH, AccumulatorKey, AccumulatorKind, FoldTerm
from megathunder.config.objective import GrpoConfig, LossConfig
from megathunder.config.root import Config
from megathunder.config.run import RunConfig
from megathunder.config.streaming import StreamingConfig
from megathunder.errors import ConfigError, UserError
from megathunder.objectives.base import Need, Objective, Reward, Survivor
from megathunder.objectives.build_objective import build_objective
from megathunder.objectives.overlong import overlong_penalty
from megathunder.objectives.weights import Affine, assign_reward, fold_group
from megathunder.schedule.token_chain import TokenChain, train_rows
from megathunder.types import ContributionId, EndReason, Role, Row, Segment, Trajectory, TrajectoryId


def segments(*lengths: int) -> tuple[Segment, ...]:
    """A prompt, then action, observation, action ... of the given lengths; token ids count up."""
    result, start = [], 1
    for i, length in enumerate(lengths):
        role = Role.PROMPT if i == 0 else (Role.ACTION if i % 2 else Role.OBSERVATION)
        ids = tuple(range(start, start + length))
        sampled = role is Role.ACTION
        result.append(
            Segment(
                role=role, token_ids=ids, logprobs=(-0.5,) * length * sampled, policy_versions=(0,) * length * sampled
            )
        )
        start += length
    return tuple(result)


def trajectory(*rows: tuple[int, ...], index: int = 0) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(0, 0, index),
        task_id="t",
        rows=tuple(Row(segments=segments(*r)) for r in rows),
        end_reason=EndReason.ANSWERED,
        started_s=0,
        completed_s=1,
        turns=sum(len(r) // 2 for r in rows),
    )


def objective_of(**sections: object) -> Objective:
    return build_objective(replace(Config(), **sections))


def test_rows_of_one_rollout_share_one_reward() -> None:
    split = trajectory((2, 1), (2, 2), (2, 1), index=1)
    got = advantages([0, 1], [2], "none")
    assert got == [-0.5, 0.5]
    assert [r.scale for r in train_rows(split, got[1])] == [0.5, 0.5, 0.5]


def test_a_row_ends_with_its_last_action_and_masks_everything_not_sampled() -> None:
    (row,) = train_rows(trajectory((3, 2, 4, 1, 6)), 1.0)
    assert row.loss_mask == (0, 0, 0, 1, 1, 0, 0, 0, 0, 1)
    assert len(row.token_ids) == 10 and row.prompt_tokens == 3 and row.cuts == (5,)


def test_sequence_mean_divides_by_the_tokens_of_the_whole_trajectory() -> None:
    objective = objective_of(loss=LossConfig(normalisation="sequence_mean"))
    assert objective.row_scale(4) == 0.25
    assert objective.normaliser([Survivor(trained_tokens=4), Survivor(trained_tokens=0)]) == 2


def test_token_mean_counts_every_survivor() -> None:
    objective = objective_of()
    assert objective.normaliser([Survivor(trained_tokens=1), Survivor(trained_tokens=3)]) == 4


def test_closure_terms_are_the_coefficients_of_each_kind() -> None:
    keys = [
        AccumulatorKey(AccumulatorKind.CLASS, 3, 1),
        AccumulatorKey(AccumulatorKind.MOMENT, 3, 0),
        AccumulatorKey(AccumulatorKind.MOMENT, 3, 1),
    ]
    keys.append(AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, 3, 5))
    plan = fold_group(keys, [(0.0,), (2.0,)], {5: (3.0,)}, Affine(-1.0, (10.0,)))
    assert set(plan.terms) == {
        FoldTerm(keys[0], BATCH, 19.0),
        FoldTerm(keys[1], BATCH, -1.0),
        FoldTerm(keys[2], BATCH, 10.0),
        FoldTerm(keys[3], BATCH, 29.0),
    }
    assert set(plan.free) == set(keys)


def test_rewards_that_come_later_move_an_accumulator_into_all_moments() -> None:
    own, moment = AccumulatorKey(AccumulatorKind.PER_TRAJECTORY, 0, 2), AccumulatorKey(AccumulatorKind.MOMENT, 0, 0)
    plan = assign_reward(own, moment, (0.3, -2.0))
    factors = (1.0, 0.3, -2.0)
    assert plan.terms == tuple(FoldTerm(own, moment._replace(slot=k), f) for k, f in enumerate(factors))
    assert plan.free == (own,)


def test_chain_row_of_one_turn_carries_context_and_trains_only_its_own_tokens() -> None:
    chain = TokenChain()
    prompt, first, observation, second = segments(2, 2, 1, 3)
    chain.append_turn([prompt, first])
    chain.append_turn([observation, second])
    chain.score_turn(1, (-1.0, -2.0, -3.0))
    assert chain.scored == 0  # turn 0 has no score yet
    chain.score_turn(0, (-4.0, -5.0))
    assert chain.scored == 2
    from megathunder.types import ContributionId

    row = chain.train_row(ContributionId(0, 0, 0, 1), row=0, context_turns=1, end_turn=2, mask_from_turn=1, scale=1.0)
    assert row.context_tokens == 4 and row.loss_mask == (0, 0, 0, 0, 0, 1, 1, 1)
    assert row.teacher_logprobs == (0.0, 0.0, -4.0, -5.0, 0.0, -1.0, -2.0, -3.0)


def test_a_row_that_runs_ahead_of_the_teacher_carries_no_scores() -> None:
    chain = TokenChain()
    chain.append_turn(segments(3, 2))
    chain.append_turn(segments(1, 4))
    chain.score_turn(0, (-1.0, -2.0))
    source = ContributionId(0, 0, 0)
    ahead = chain.train_row(source, row=0, context_turns=1, end_turn=2, mask_from_turn=1, scale=1.0)
    assert ahead.teacher_logprobs == ()
    known = chain.train_row(source, row=0, context_turns=0, end_turn=1, mask_from_turn=0, scale=1.0)
    assert len(known.teacher_logprobs) == len(known.token_ids)


def test_a_score_with_the_wrong_length_is_refused() -> None:
    chain = TokenChain()
    chain.append_turn(segments(2, 2))
    with pytest.raises(UserError, match="3 teacher"):
        chain.score_turn(0, (0.0,) * 3)


def test_scalar_terms_have_the_right_values() -> None:
    value, derivative = k3(-1.0, -1.5)
    assert (value, derivative) == pytest.approx((0.1065, 0.3935), abs=5e-5)
    got = [clipped_loss(r, a, 0.2, 0.2) for r, a in ((1.5, 1), (1.5, -1), (0.5, -1))]
    assert got == pytest.approx([-1.2, 1.5, 0.8])
    assert clipped_loss(float("inf"), 0.0, 0.2, 0.2) == 0.0 and clipped_loss(float("nan"), 0.0, 0.2, 0.2) == 0.0
    assert sampled_reverse_kl(-1, -2) == 1
    assert [overlong_penalty(t, 100, 20) for t in (80, 90, 100, 130)] == [0, -0.5, -1, -1]


def test_combinations_that_cannot_be_exact_are_refused_by_name() -> None:
    config = Config()
    for bad, text in (
        (replace(config, run=RunConfig(group_size=1)), "group_size = 1"),
        (replace(config, streaming=StreamingConfig(release="turn")), "release = 'turn' with objective = 'grpo'"),
        (replace(config, objective="opd", streaming=StreamingConfig(content_ready=True)), "content_ready"),
        (replace(config, objective="opd", streaming=StreamingConfig(on_lost="drop_group")), "drop_group"),
    ):
        with pytest.raises(ConfigError, match=text):
            build_objective(bad)
    turn = replace(config, objective="opd", streaming=StreamingConfig(release="turn"))
    assert build_objective(turn).name == "opd"
    with pytest.raises(ConfigError, match="sequence_mean"):
        build_objective(replace(turn, loss=LossConfig(normalisation="sequence_mean")))


def test_the_divergence_is_taken_from_the_reward_where_that_is_asked_for() -> None:
    attempt = trajectory((2, 3))
    for grpo, want in (
        (GrpoConfig(kl_in_reward=True, kl_coefficient=0.1), 1.0 - 0.1 * 3.0),
        (GrpoConfig(kl_coefficient=0.1), 1.0),  # a loss term of its own
        (GrpoConfig(), 1.0),
    ):
        objective = build_objective(replace(Config(), grpo=grpo))
        assert objective.signal(attempt, Reward(1.0), 3.0) == (pytest.approx(want),)
        assert (Need.DIVERGENCE in objective.needs) == (want != 1.0)


def test_the_overlong_penalty_measures_the_longest_row() -> None:
    """A right answer in three rows of 180 tokens, of which a row may have 512, is not too long."""
    objective = objective_of(
        grpo=GrpoConfig(overlong_buffer_tokens=128), rollout=replace(Config().rollout, max_tokens=512)
    )
    assert objective.signal(trajectory((100, 80), (100, 80), (100, 80)), Reward(1.0)) == (1.0,)
    assert objective.signal(trajectory((100, 80), (300, 148)), Reward(1.0)) == (0.5,)


def test_dynamic_sampling_decides_by_the_rewards_without_their_penalties() -> None:
    sampling = objective_of(grpo=GrpoConfig(dynamic_sampling=True, max_replacements=1))
    assert sampling.close_group([1.0, 1.0], [(1.0,), (0.4,)]).replace
    kept = sampling.close_group([1.0, 0.0], [(1.0,), (0.4,)])
    assert not kept.replace and kept.weights is not None
    plain = objective_of().close_group([1.0, 1.0], [(1.0,), (0.4,)])
    assert plain.weights is not None and not plain.replace, "without it the penalty trains"


def test_rewards_are_compared_in_the_order_of_their_names_and_the_penalty_last() -> None:
    grpo = GrpoConfig(advantage="gdpo", overlong_buffer_tokens=4, reward_weights=(1.0, 2.0, 0.5))
    objective = objective_of(grpo=grpo, rollout=replace(Config().rollout, max_tokens=5))
    reward = Reward(1.5, {"short": 0.5, "correct": 1.0})
    assert objective.signal(trajectory((1, 2)), reward) == (1.0, 0.5, -0.5)
    with pytest.raises(UserError, match=r"(?s)3\.0|2 rewards.*correct"):
        objective.signal(trajectory((1, 2)), Reward(1.0, {"correct": 1.0}))


def test_a_deviation_of_the_batch_multiplies_the_normaliser_and_divides_no_kl_term() -> None:
    objective = objective_of(grpo=GrpoConfig(advantage="reinforce_plus_plus_baseline"))
    survivors = [Survivor(trained_tokens=2, weight=w) for w in (1.0, -1.0, 2.0, -2.0)]
    assert objective.normaliser(survivors) == pytest.approx(8 * (2.5**0.5 + 1e-6))
    with pytest.raises(ConfigError, match="kl_in_reward = true"):
        objective_of(grpo=GrpoConfig(advantage="gdpo", kl_coefficient=0.1))
