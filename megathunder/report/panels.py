"""What a run used beyond the plain loop, as panels and a sentence each: sections of the report of runs that did.

    SAGC           sizes, share of groups with a straggler against its target, its price, the believed risk of a size
    SALT           cancellation against the severe one, spectrum, factor of the residual channel
    drafts         tokens a request gains in a step, drafted and accepted tokens, share of steps without drafts
    routing        context tokens that a prefix cache held, and those that were computed

Drawn from rows alone. Called by `report.py`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from megathunder.config import Config
from megathunder.metrics.row import MetricsRow, Salt, Sizing
from megathunder.report import plot_style
from megathunder.report.curves import Panel, draw

Rows = Sequence[MetricsRow]
Told = tuple[str, str, list[Panel]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A section: `panels` is an SVG element."""

    title: str
    words: str
    panels: str


def features(config: Config, rows: Rows) -> Iterator[Feature]:
    """The sections that `rows` have something for."""
    for told in (_sagc, _salt, _drafts, _routing):
        if found := told(config, rows):
            title, words, panels = found
            yield Feature(title=title, words=words, panels=draw(panels, rows, columns=len(panels)))


# ---------------------------------------------------------------------------------------------- group sizes


def _sagc(config: Config, rows: Rows) -> Told | None:
    sized = [(row.update, row.sizing) for row in rows if row.sizing and row.sizing.chosen]
    if not sized:
        return None
    target, threshold = config.sagc.target_rate, config.sagc.threshold
    measured, straggled = (sum(getattr(s, name) for _, s in sized) for name in ("measured", "straggled"))
    chosen = Counter(s.chosen for _, s in sized)
    sizes = ", ".join(f"{size} in {chosen[size]}" for size in sorted(chosen))
    words = f"Size chosen: {sizes} updates. "
    words += f"{straggled:,} of {measured:,} groups had a trajectory longer than {threshold:g} times its median one"
    words += f" ({straggled / measured:.1%}; the target is {target:.1%})." if measured else "."
    panels = [partial(drawn, sized=sized) for drawn in (_group_size, _multiplier, _risks)]
    panels.insert(1, partial(_stragglers, sized=[(u, s) for u, s in sized if s.measured], target=target))
    return "Group sizes that follow the stragglers (SAGC)", words, panels


def _group_size(axes: Axes, sized: Sequence[tuple[int, Sizing]]) -> None:
    axes.set_title("trajectories of a group")
    mean = [sum(g * n for g, n in s.groups_by_size.items()) / sum(s.groups_by_size.values()) for _, s in sized]
    axes.plot([u for u, _ in sized], mean, color=plot_style.ROLLOUT, linewidth=1.6, drawstyle="steps-mid")
    axes.set_ylim(bottom=0)


def _stragglers(axes: Axes, sized: Sequence[tuple[int, Sizing]], target: float) -> None:
    axes.set_title("groups that straggled, so far")
    straggled = itertools.accumulate(s.straggled for _, s in sized)
    measured = itertools.accumulate(s.measured for _, s in sized)
    shares = [a / b for a, b in zip(straggled, measured, strict=True)]
    axes.plot([u for u, _ in sized], shares, color=plot_style.BAD, linewidth=1.6)
    _threshold(axes, target, "target")
    _shares(axes)


def _multiplier(axes: Axes, sized: Sequence[tuple[int, Sizing]]) -> None:
    axes.set_title("price of a straggler")
    known = [(update, s.multiplier) for update, s in sized if s.multiplier is not None]
    axes.plot([u for u, _ in known], [value for _, value in known], color=plot_style.INK, linewidth=1.6)
    axes.set_ylim(bottom=0)


def _risks(axes: Axes, sized: Sequence[tuple[int, Sizing]]) -> None:
    axes.set_title("believed risk, by size")
    colours = itertools.cycle((plot_style.LEARNER_LIGHT, plot_style.LEARNER, plot_style.TAIL, plot_style.INK))
    for size, colour in zip(sorted({size for _, s in sized for size in s.posterior or {}}), colours):
        known = [(u, *s.posterior[size]) for u, s in sized if s.posterior and size in s.posterior]
        axes.plot([u for u, _, _ in known], [a / (a + b) for _, a, b in known], color=colour, label=f"{size}")
    _shares(axes)
    axes.legend(frameon=False, fontsize=8, ncols=4)


# ---------------------------------------------------------------------------------------------- gradient geometry


def _salt(config: Config, rows: Rows) -> Told | None:
    taken = [(row.update, row.salt) for row in rows if row.salt]
    if not taken:
        return None
    severe, greatest = config.salt.severe_cancellation, max(s.factor_max for _, s in taken)
    reweighed = sum(s.factor_max > 1 for _, s in taken)
    if reweighed:
        words = f"Coefficients were reweighed in {reweighed} of {len(taken)} updates, by {greatest:.3g} at most."
    else:
        why = f"it is severe from {severe:g} on" if config.salt.amplification else "salt.amplification = 0"
        words = f"Nothing was reweighed ({why}): these are the updates of plain GRPO."
    words = f"The greatest cancellation was {max(s.cancellation_max for _, s in taken):.3f}. {words}"
    panels = [
        partial(_cancellation, taken=taken, severe=severe),
        partial(_spectrum, taken=taken),
        partial(_factor, taken=taken),
    ]
    return "Geometry of the gradients (SALT)", words, panels


def _cancellation(axes: Axes, taken: Sequence[tuple[int, Salt]], severe: float) -> None:
    axes.set_title("signed cancellation of gradients")
    _mean_and_greatest(axes, taken, "cancellation")
    _threshold(axes, severe, "severe")
    axes.set_ylim(0, 1.02)


def _factor(axes: Axes, taken: Sequence[tuple[int, Salt]]) -> None:
    axes.set_title("factor of the residual channel")
    _mean_and_greatest(axes, taken, "factor")
    axes.set_ylim(bottom=0.9)


def _mean_and_greatest(axes: Axes, taken: Sequence[tuple[int, Salt]], name: str) -> None:
    updates = [update for update, _ in taken]
    axes.plot(updates, [getattr(s, name) for _, s in taken], color=plot_style.LEARNER, label="mean")
    axes.plot(updates, [getattr(s, f"{name}_max") for _, s in taken], color=plot_style.BAD, label="greatest")
    axes.legend(frameon=False, fontsize=8)


def _spectrum(axes: Axes, taken: Sequence[tuple[int, Salt]]) -> None:
    axes.set_title("largest eigenvalues, share of the trace")
    colours = itertools.cycle(
        (plot_style.LEARNER, plot_style.TAIL, plot_style.ROLLOUT, plot_style.INK, plot_style.LEARNER_LIGHT)
    )
    for number, colour in zip(range(min(len(s.spectrum) for _, s in taken)), colours):
        shares = [s.spectrum[number] for _, s in taken]
        axes.plot([u for u, _ in taken], shares, color=colour, linewidth=1.2, label=f"{number + 1}")
    axes.set_ylim(0, 1.02)
    if axes.lines:
        axes.legend(frameon=False, fontsize=8, ncols=4)


# ---------------------------------------------------------------------------------------------- servers


def _drafts(config: Config, rows: Rows) -> Told | None:
    told = [row for row in rows if row.speculation_accept_length is not None]
    if not told:
        return None
    drafted = [row.speculation_drafted_tokens or 0 for row in told]
    accepted = [row.speculation_accepted_tokens or 0 for row in told]
    share = f" ({sum(accepted) / sum(drafted):.1%})" if sum(drafted) else ""
    words = f"{sum(accepted):,} of {sum(drafted):,} drafted tokens came true{share}; what is sampled stays the same."
    missed = [a - b for a, b in zip(drafted, accepted, strict=True)]
    parts = {"came true": (accepted, plot_style.GOOD), "did not": (missed, plot_style.IDLE)}
    updates = [row.update for row in told]
    panels = [
        partial(_gain, told=told),
        partial(_stacked, title="drafted tokens", updates=updates, parts=parts),
        partial(_without_drafts, told=told),
    ]
    return f"Drafts from earlier trajectories ({config.rollout.speculation})", words, panels


def _gain(axes: Axes, told: Rows) -> None:
    axes.set_title("tokens a request gains in a step")
    gained = [row.speculation_accept_length for row in told]
    axes.plot([row.update for row in told], gained, color=plot_style.GOOD, linewidth=1.6)
    _threshold(axes, 1.0, "no gain")
    axes.set_ylim(bottom=0)


def _without_drafts(axes: Axes, told: Rows) -> None:
    axes.set_title("steps without drafts")
    shares = [row.speculation_off_share for row in told]
    axes.plot([row.update for row in told], shares, color=plot_style.SUFFIX, linewidth=1.6)
    _shares(axes)


def _routing(config: Config, rows: Rows) -> Told | None:
    told = [(row.update, row.context_tokens, row.cached_tokens or 0) for row in rows if row.context_tokens]
    if not told:
        return None
    updates, context, cached = (list(column) for column in zip(*told, strict=True))
    servers = len(config.rollout.urls) or config.rollout.servers
    words = f"routing.policy = {config.routing.policy} on {servers} server(s): {sum(cached) / sum(context):.1%} of "
    words += f"the {sum(context):,} tokens that turns brought as their contexts lay in a prefix cache."
    computed = [a - b for a, b in zip(context, cached, strict=True)]
    parts = {"cached": (cached, plot_style.GOOD), "computed": (computed, plot_style.ROLLOUT)}
    shares = [b / a for a, b in zip(context, cached, strict=True)]
    panels = [
        partial(_stacked, title="context tokens", updates=updates, parts=parts),
        partial(_cached_share, updates=updates, shares=shares),
    ]
    return "Routing and prefix caches", words, panels


def _cached_share(axes: Axes, updates: Sequence[int], shares: Sequence[float]) -> None:
    axes.set_title("share of them that was cached")
    axes.plot(updates, shares, color=plot_style.GOOD, linewidth=1.6)
    _shares(axes)


# ---------------------------------------------------------------------------------------------- axes


def _threshold(axes: Axes, value: float, name: str) -> None:
    """A dashed line from side to side, with its name."""
    axes.axhline(value, color=plot_style.FAINT, linestyle="--", linewidth=1)
    axes.annotate(name, (0.99, value), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)


def _shares(axes: Axes) -> None:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _stacked(axes: Axes, *, title: str, updates: Sequence[int], parts: dict[str, tuple[Sequence[int], str]]) -> None:
    axes.set_title(title)
    below = [0] * len(updates)
    for name, (values, colour) in parts.items():
        axes.bar(updates, values, bottom=below, width=0.92, color=colour, label=name, linewidth=0)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_ylim(0, max(below) * 1.18 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right")
