"""One row per update: `metrics.jsonl` is these rows, and every table, curve and comparison is made from them.

    step_wall_s = rollout_s + tail_s + suffix_s
        rollout  first rollout request        -> last reward or teacher score
        tail     last reward or teacher score -> end of the last backward pass or fold
        suffix   end of the last backward     -> last server's acknowledgement of the new version

Each field states what it is; its unit is in its name (a name without one is a count, a share of 1, or a reward).
`definitions()` gives the statements to the report. A field that was not measured is None, never 0.
"""

from __future__ import annotations

import math
import typing
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from megathunder.jsonl import garbled, json_lines


def _is(description: str) -> Meta:
    return Meta(description=description)


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """Group sizes of an update and their stragglers; from `chosen` on, of straggler-aware group control alone.

    `measured` groups had two lengths or more, `straggled` of them a straggler. `chosen` is the update's size, `price`
    the multiplier before it was learnt from; `multiplier` and `posterior` (size -> alpha, beta) are those after."""

    groups_by_size: dict[int, int]
    measured: int
    straggled: int
    chosen: int | None = None
    price: float | None = None
    multiplier: float | None = None
    posterior: dict[int, tuple[float, float]] | None = None


class Salt(msgspec.Struct, frozen=True, kw_only=True):
    """Geometry of the gradients that SALT reweighed: means over the update's Gram matrices, and maxima.

    `cancellation` is the share of squared length that the signed sum loses, `factor` the residual channel's, `rank` the
    dominant subspace's, `spectrum` the largest eigenvalues by the trace; `sketch_error` the mean relative error of a
    squared length, None where nothing was sketched."""

    geometries: int
    cancellation: float
    cancellation_max: float
    factor: float
    factor_max: float
    rank: float
    spectrum: tuple[float, ...]
    sketch_error: float | None = None


class KindMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The trajectories of one kind of task or environment whose rewards count; `reward_parts` are means."""

    trajectories: int
    reward_mean: float
    turns_mean: float
    response_tokens_mean: float
    reward_parts: dict[str, float] = {}


class MetricsRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one update did."""

    # identity
    update: Annotated[int, _is("Update, counted from 0.")]
    schedule: Annotated[str, _is("Schedule that released the work.")]
    objective: Annotated[str, _is("Objective that was minimised.")]
    policy_version: Annotated[int, _is("Version that sampled this update's trajectories.")]
    since_start_s: Annotated[float, _is("From the start of the run to the end of this update, resumed time included.")]

    # what was learned from
    reward_mean: Annotated[float, _is("Mean reward of the trajectories that count.")]
    reward_std: Annotated[float, _is("Population standard deviation of those rewards, over all groups.")]
    prompt_reward_min: Annotated[float, _is("Least mean reward of a group.")]
    prompt_reward_max: Annotated[float, _is("Greatest mean reward of a group.")]
    prompt_best_mean: Annotated[float, _is("Mean over groups of the best reward in the group (pass@G if binary).")]
    reward_quantiles: Annotated[
        tuple[float, ...] | None, _is("Least reward, its quartiles (three), the greatest; None: fewer than two.")
    ] = None
    reward_parts: Annotated[dict[str, float] | None, _is("Mean of each part of the reward; None: it has none.")] = None
    by_kind: Annotated[
        dict[str, KindMetrics] | None, _is("The same for each kind of task or environment; None: before it was kept.")
    ] = None
    success_heldout: Annotated[float | None, _is("Mean reward on held-out tasks after this update; None: not taken.")]
    trajectories: Annotated[int, _is("Trajectories that count.")]
    turns_mean: Annotated[float, _is("Turns of a trajectory.")]
    response_tokens_mean: Annotated[float, _is("Sampled tokens of a trajectory.")]
    response_tokens_max: Annotated[int | None, _is("Most sampled tokens of a trajectory.")] = None
    end_reasons: Annotated[dict[str, int] | None, _is("Trajectories by the reason for which they ended.")] = None
    entropy: Annotated[
        float | None, _is("Mean -log p of a sampled token as the engine says, nats: an estimate of the entropy.")
    ] = None
    groups_degenerate: Annotated[int, _is("Groups whose rewards are all equal: they contribute exactly 0.")]
    contributions_applied: Annotated[int, _is("Contributions in the step.")]
    contributions_dropped: Annotated[int, _is("Contributions not in the step, for any reason.")]
    dropped_by_reason: Annotated[dict[str, int], _is("The same by reason.")]
    trained_tokens: Annotated[int, _is("Sampled tokens of the contributions in the step; 0: no step.")]
    differentiated_tokens: Annotated[
        int | None,
        _is("Sampled tokens the learner differentiated, in the step or not; None: trained_tokens says that."),
    ] = None
    total_tokens: Annotated[int, _is("Tokens the learner computed, padding and cached context left out.")]
    wasted_share: Annotated[float, _is("Share of total_tokens spent on degenerate groups and dropped contributions.")]

    # exactness
    policy_lag_max: Annotated[
        int, _is("Versions between the oldest token of an update and the policy that learns from it; 0: exact.")
    ]
    tokens_by_lag: Annotated[
        dict[int, int], _is("Sampled tokens of the trajectories that count, by that lag, in the step or not.")
    ]
    engine_learner_logprob_diff_max: Annotated[
        float, _is("Largest |log p learner - log p engine| of a differentiated token.")
    ]
    engine_learner_logprob_diff_mean: Annotated[float, _is("Mean of the same.")]

    # the step
    loss: Annotated[
        float | None,
        _is(
            "Loss of the step: sum over rows of advantage (OPD: 1) * scale * sum_t weight * (-log p), by the "
            "normaliser, without SALT's factors and the KL term; None: no step."
        ),
    ]
    teacher_kl: Annotated[
        float | None, _is("OPD: mean log p - log q of a sampled token, nats, p as the engine says; None: no teacher.")
    ]
    grad_norm: Annotated[float, _is("Global gradient norm after normalisation, before the clip.")]
    learning_rate: Annotated[float, _is("Step size of this update.")]
    stepped: Annotated[bool, _is("Whether the optimizer stepped.")]
    skip_reason: Annotated[str, _is("Why it did not.")]

    # time
    step_wall_s: Annotated[float, _is("First rollout request to the last acknowledgement of the new version.")]
    rollout_s: Annotated[float, _is("First rollout request to the last reward or teacher score.")]
    tail_s: Annotated[float, _is("Last reward or teacher score to the end of the last backward pass or fold.")]
    suffix_s: Annotated[float, _is("From there to the last acknowledgement: reduction, step, publication.")]
    publication_s: Annotated[float, _is("Part of the suffix that sends weights and waits for acknowledgements.")]
    learner_busy_s: Annotated[float, _is("Seconds a cell differentiates, folds or steps; mean over cells.")]
    learner_busy_share: Annotated[float, _is("learner_busy_s by step_wall_s.")]

    # cost
    flops: Annotated[float, _is("Forward and backward operations that the update needs: each token once.")]
    replay_flops: Annotated[float, _is("Operations executed beyond that, for deferred context gradients.")]
    recompute_flops: Annotated[float, _is("Operations repeated because activations were not kept.")]
    active_mfu: Annotated[float | None, _is("flops by (step_wall_s * peak of all ranks); None: peak unknown.")]
    compute_mfu: Annotated[float | None, _is("flops by (learner_busy_s * peak of all ranks).")]
    publication_bytes: Annotated[int, _is("Bytes sent to the servers.")]
    accumulator_bytes_peak: Annotated[int, _is("Most bytes of accumulators one cell held at once.")]
    host_memory_bytes: Annotated[int, _is("Resident memory of the run's processes on this host at the row's end.")]
    memory_peaks: Annotated[
        dict[str, dict[str, int]] | None,
        _is("Most bytes each holder had in each phase, on this host; `gpu ...`: on its GPUs; None: not watched."),
    ] = None
    gpu_memory_bytes: Annotated[int | None, _is("Memory in use on this host's fullest GPU; None: no GPU.")] = None
    exposed_copy_s: Annotated[
        float | None, _is("Seconds a GPU waited for copies to and from accumulators in host memory; None: none there.")
    ] = None
    gpu_utilisation: Annotated[float | None, _is("Mean share of time in which this host's GPUs ran kernels.")] = None

    # admission; None: written before these were kept
    learner_idle_s: Annotated[float | None, _is("Seconds a cell had no runnable work; mean over cells.")] = None
    learner_blocked_s: Annotated[
        float | None, _is("Seconds ready work waited for a free accumulator while the cell idled; mean over cells.")
    ] = None
    open_groups_peak: Annotated[int | None, _is("Most groups with unknown coefficients one cell held at once.")] = None
    trajectories_lost: Annotated[int | None, _is("Trajectories the machinery failed.")] = None
    rows_above_gap_alarm: Annotated[
        int, _is("Rows with a token above learner.logprob_gap_alarm; the log names them.")
    ] = 0
    side_turns: Annotated[int, _is("Turns that harnesses asked beside their conversations: recorded, not trained.")] = 0
    context_tokens: Annotated[int | None, _is("Tokens that turns brought to the servers as their contexts.")] = None
    cached_tokens: Annotated[
        int | None, _is("Those of them that a server's prefix cache held; the rest was computed.")
    ] = None
    prompt_tokens_saved: Annotated[
        int | None, _is("Prompt tokens that were shared instead of computed again; None: prompts are not shared.")
    ] = None
    kl_to_reference: Annotated[
        float | None,
        _is(
            "The KL term by the normaliser; inside the reward: mean log p - log ref of a sampled token; None: neither."
        ),
    ] = None
    device_hours: Annotated[
        float | None,
        _is("Step walls up to here x GPUs the run holds (machines, without GPUs), hours; no set-up, no evaluation."),
    ] = None

    sizing: Annotated[
        Sizing | None,
        _is(
            "Groups by size, how many straggled (longest > sagc.threshold x median), and what the controller believes."
        ),
    ] = None
    salt: Annotated[Salt | None, _is("Cancellation, spectrum and factors of the gradients; None: not measured.")] = None

    # speculation; None: the servers do not draft
    speculation_accept_length: Annotated[
        float | None,
        _is("Tokens a request gains in a step that may draft, mean over the update's rollouts; 1: no gain."),
    ] = None
    speculation_drafted_tokens: Annotated[int | None, _is("Tokens that servers drafted.")] = None
    speculation_accepted_tokens: Annotated[int | None, _is("Those that came true and were kept.")] = None
    speculation_off_share: Annotated[
        float | None, _is("Share of such steps without drafts: nothing found, gated off, or high load.")
    ] = None


def definitions() -> dict[str, str]:
    """Field -> what it is, in the order of the row."""
    hints = typing.get_type_hints(MetricsRow, include_extras=True)
    return {
        name: " ".join(m.description or "" for m in typing.get_args(hints[name]) if isinstance(m, Meta))
        for name in MetricsRow.__struct_fields__
    }


def encode_row(row: MetricsRow) -> bytes:
    """One line of `metrics.jsonl`. A number that is not finite becomes null, so that any reader can read the line."""
    return msgspec.json.encode(row) + b"\n"


def read_rows(path: Path) -> list[MetricsRow]:
    """The rows of a `metrics.jsonl`, null read back as not-a-number; UserError where a line is no row."""
    numbers = {name for name, hint in typing.get_type_hints(MetricsRow).items() if hint is float}
    rows = []
    for number, (line, table) in enumerate(json_lines(path), start=1):
        table.update({name: math.nan for name in numbers if table.get(name, 0) is None})
        try:
            rows.append(msgspec.convert(table, MetricsRow, str_keys=True))
        except msgspec.ValidationError as error:
            raise garbled(path, number, line, error) from None
    return rows
