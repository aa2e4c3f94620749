"""Replay on a virtual clock: agreement with the closed form, order of the schedules, costs, figures, plan."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.papers import simulation_report
from benchmarks.papers.sweep import Point, points, sweep
from megathunder.accumulator_keys import BATCH
from megathunder.config.root import Config
from megathunder.config.streaming import StreamingConfig
from megathunder.errors import UserError
from megathunder.hardware import gpu_named
from megathunder.metrics.spans import Span
from megathunder.simulator.costs import CostModel, fit_costs
from megathunder.simulator.gpu_split import PlanRequest, plan
from megathunder.simulator.interference import Interference, measure_interference
from megathunder.simulator.predict import RecordedUpdate, predict
from megathunder.simulator.release_model import Release, ReleaseCurve
from megathunder.simulator.schedule_replay import replay
from megathunder.simulator.traces import AttemptTrace, TurnTrace, UpdateTrace, Workload, draw_trace
from megathunder.types import ContributionId, Differentiate, Fold, TrainRow

SCHEDULES = ("sync", "periodic_async", "thundersync", "one_step_off")


def simulate(config: Config, workload: Workload, rho: float = 1.0, cells: int = 1, seed: int = 0):
    trace = draw_trace(workload, seed)
    return trace, replay(config, trace, CostModel(token_s=rho * trace.rollout_s / trace.tokens, replay=0.0), cells)


WORK = Workload(groups=6, group_size=4, turns=4, spread=0.5)


def test_opd_replay_equals_the_closed_form_of_its_own_trace() -> None:
    config = Config(objective="opd", streaming=StreamingConfig(pack_tokens=1))
    for rho in (0.3, 1.0, 3.0):
        trace, result = simulate(config, WORK, rho)
        curve = ReleaseCurve(Release(a.completed_s / trace.rollout_s, float(a.tokens)) for a in trace.attempts)
        assert result.tail_s / trace.rollout_s == pytest.approx(curve.tail(rho), abs=1e-9)


def test_schedules_are_ordered_by_how_early_they_release() -> None:
    wall = {}
    for schedule in SCHEDULES:
        _, result = simulate(Config(schedule=schedule, streaming=StreamingConfig(pack_tokens=4)), WORK)
        wall[schedule] = result.step_wall_s
    assert wall["thundersync"] < wall["periodic_async"] < wall["sync"]
    assert wall["one_step_off"] <= wall["thundersync"]


def test_turn_release_has_a_shorter_tail_than_trajectories_only_without_replay() -> None:
    trace = draw_trace(Workload(groups=2, group_size=4, turns=8, spread=0.1), 0)
    rate = trace.rollout_s / trace.tokens
    tails = {}
    for release in ("trajectory", "turn", "turn_forward"):
        config = Config(objective="opd", streaming=StreamingConfig(release=release, pack_tokens=64))
        tails[release] = replay(config, trace, CostModel(token_s=rate)).tail_s
        tails[release, "free"] = replay(config, trace, CostModel(token_s=rate, replay=0.0)).tail_s
    assert tails["turn", "free"] < tails["trajectory"]
    assert tails["turn_forward"] <= 0.75 * tails["turn"] and tails["turn_forward"] < tails["trajectory"]


def test_content_ready_release_hides_a_verifier_of_a_third_of_the_rollout_from_a_busy_learner() -> None:
    workload = Workload(groups=8, group_size=8, turns=6, spread=0.5)
    plain = draw_trace(workload, 3)
    verifier_s = 0.3 * plain.rollout_s
    verified = draw_trace(replace(workload, verifier_s=verifier_s), 3)
    costs = CostModel(token_s=1.3 * plain.rollout_s / plain.tokens)
    quick, waiting, ready = (
        replay(Config(streaming=StreamingConfig(content_ready=r, pack_tokens=24)), trace, costs).step_wall_s
        for trace, r in ((plain, False), (verified, False), (verified, True))
    )
    assert waiting - quick == pytest.approx(verifier_s)
    assert ready - quick <= 0.2 * verifier_s


def test_two_cells_share_the_work() -> None:
    config = Config(schedule="sync", streaming=StreamingConfig(pack_tokens=4))
    one, two = (simulate(config, WORK, cells=n)[1] for n in (1, 2))
    assert one.learner_s == pytest.approx(two.learner_s)
    assert two.tail_s == pytest.approx(one.tail_s / 2, rel=0.1)


def test_a_lost_trajectory_is_replayed_as_lost() -> None:
    turns = (TurnTrace(context_tokens=1, action_tokens=2, completed_s=1.0),)
    kept = [
        AttemptTrace(group=0, index=i, turns=turns, completed_s=1.0, reward=float(i), rewarded_s=1.5) for i in range(2)
    ]
    lost = AttemptTrace(group=0, index=2, turns=(), completed_s=2.0, lost_s=2.0)
    result = replay(Config(), UpdateTrace(attempts=(*kept, lost)), CostModel(token_s=0.1))
    assert result.rollout_s == 2.0 and result.report.trajectories_lost == 1
    assert result.report.counts.folded == 2


def test_costs_follow_the_kind_of_pass() -> None:
    costs = CostModel(token_s=1.0, attention_s=0.0, item_s=10.0, fold_s=0.5)

    def command(context: int, *, last: bool, mask: int = 1) -> Differentiate:
        row = TrainRow(
            source=ContributionId(0, 0, 0),
            token_ids=(0,) * 9,
            loss_mask=(mask,) * 9,
            engine_logprobs=(0.0,) * 9,
            context_tokens=context,
        )
        return Differentiate(item=1, update=0, policy_version=0, target=BATCH, rows=(row,), last=last)

    assert costs.seconds(command(0, last=True), "trajectory") == 19
    assert costs.seconds(command(6, last=False), "turn") == 13 and costs.seconds(command(6, last=True), "turn") == 19
    assert costs.seconds(command(6, last=False), "turn_forward") == pytest.approx(11)
    assert costs.seconds(command(6, last=True), "turn_forward") == pytest.approx(10 + 3 + 4)
    assert costs.seconds(command(9, last=True, mask=0), "turn_forward") == 10
    assert costs.seconds(Fold(item=1, update=0), "turn") == 0.5


def test_interference_is_what_warm_up_updates_of_a_streaming_schedule_took_longer_than_those_of_sync() -> None:
    def row(update: int, schedule: str, rollout_s: float) -> SimpleNamespace:
        return SimpleNamespace(update=update, schedule=schedule, rollout_s=rollout_s)

    def span(lane: str, name: str, start_s: float, end_s: float, update: int) -> Span:
        attributes = {"update": update, "tokens": 10}
        return Span(lane=lane, name=name, start_s=start_s, end_s=end_s, attributes=attributes)

    rows = [row(0, "sync", 10.0), row(1, "thundersync", 11.0), row(2, "thundersync", 13.0), row(3, "sync", 10.0)]
    spans = [span("update", "rollout", 0.0, 11.0, 1), span("update", "rollout", 20.0, 33.0, 2)]
    spans += [span("learner/0", "differentiate", at, at + 2.4, update) for at, update in ((1, 1), (4, 1), (25, 2))]
    spans += [span("learner/0", "differentiate", 12.0, 99.0, 1)]  # after the rollout: alone
    found = measure_interference(rows, spans, CostModel(token_s=0.2))
    assert found.rollout == {"thundersync": pytest.approx(1.2)}
    assert found.learner == {"thundersync": pytest.approx(1.2)}
    assert measure_interference([], spans, CostModel(token_s=0.2)) == Interference()


def test_rollouts_that_are_slowed_down_by_a_learner_lengthen_the_predicted_step_of_that_schedule_alone() -> None:
    trace = draw_trace(WORK, 0)
    costs = CostModel(token_s=0.5 * trace.rollout_s / trace.tokens)
    update = RecordedUpdate(update=0, schedule="sync", trace=trace, step_wall_s=1.0)
    slow = Interference(rollout={"thundersync": 1.1}, learner={"thundersync": 1.2})
    names = ("sync", "thundersync")
    alone, both = (predict(Config(), [update], costs, schedules=names, interference=i) for i in (Interference(), slow))
    assert alone.steps[0] == both.steps[0]
    assert both.steps[1].rollout_s == pytest.approx(1.1 * trace.rollout_s)
    assert both.steps[1].learner_s > 1.1 * alone.steps[1].learner_s


def test_costs_are_recovered_from_spans() -> None:
    got = fit_costs([*((t, 0.25 + 0.01 * t) for t in (10, 50, 100, 200)), (30, 9.0)])  # the last was a first call
    assert (got.item_s, got.token_s) == pytest.approx((0.25, 0.01))
    with pytest.raises(UserError, match="no recorded"):
        fit_costs([])


def test_the_sweep_has_588_points_and_its_two_predictions_agree() -> None:
    every = list(points())
    assert len(set(every)) == len(every) == 588
    result = sweep([p for p in every if p.batch == 64 and p.turns == 4 and p.balance in (0.5, 1.0, 2.0)])
    assert result.mean_rel_diff <= 0.03 and result.max_rel_diff <= 0.106


def test_prediction_reproduces_what_its_own_costs_produced() -> None:
    config = Config(streaming=StreamingConfig(pack_tokens=4))
    trace, result = simulate(config, WORK)
    costs = CostModel(token_s=trace.rollout_s / trace.tokens)
    recorded = RecordedUpdate(update=0, schedule="thundersync", trace=trace, step_wall_s=result.step_wall_s)
    got = predict(config, [recorded], costs)
    assert got.error_vs_measured == pytest.approx(0.0)
    assert got.speedup_vs_sync["sync"] == 1.0 and got.speedup_vs_sync["thundersync"] > 1.2


def test_plan_gives_more_gpus_to_the_slower_side_and_refuses_what_does_not_fit() -> None:
    request = PlanRequest(parameters=8e9, active_parameters=8e9, gpu=gpu_named("h200"), gpus=8)
    splits = plan(request)
    assert all(s.rollout_gpus + s.learner_gpus == 8 for s in splits)
    assert splits[0].thundersync_step_s == min(s.thundersync_step_s for s in splits)
    slow_tools = plan(replace(request, tool_s=200.0))[0]
    assert slow_tools.learner_gpus >= splits[0].learner_gpus
    with pytest.raises(UserError, match="70.0B parameters on 2 H100"):
        plan(replace(request, parameters=70e9, gpu=gpu_named("H100"), gpus=2))
    with pytest.raises(UserError, match="H200"):
        gpu_named("v100")
    for changes in ({"trajectories": 0}, {"learner_mfu": 0.0}, {"tool_s": -1.0}, {"spread": float("nan")}):
        ((name, value),) = changes.items()
        with pytest.raises(UserError, match=f"{name} is {value:g}"):
            plan(replace(request, **changes))
    with pytest.raises(UserError, match="active_parameters is 3.3e"):
        plan(replace(request, parameters=1e9, active_parameters=3.3e9))
    assert plan(replace(request, tool_s=0.0, spread=0.0))


def test_results_are_written_and_drawn(tmp_path) -> None:
    result = sweep(
        [Point(objective=o, spread=0.5, balance=b, batch=64, turns=4) for o in ("grpo", "opd") for b in (1, 2)]
    )
    simulation_report.write_json(result, tmp_path / "sweep.json")
    assert set(json.loads((tmp_path / "sweep.json").read_text())) >= {
        "configurations",
        "mean_rel_diff",
        "max_rel_diff",
        "rows",
    }
    simulation_report.draw_sweep(result, tmp_path / "sweep.png")
    trace = draw_trace(WORK, 0)
    costs = CostModel(token_s=trace.rollout_s / trace.tokens)
    runs = [replay(Config(schedule=s, streaming=StreamingConfig(pack_tokens=4)), trace, costs) for s in SCHEDULES]
    simulation_report.draw_timeline(trace, runs, tmp_path / "t.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("sweep.png", "t.png"))
