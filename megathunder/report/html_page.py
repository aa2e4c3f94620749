"""The page of a run: one HTML file with everything inside, no script, nothing fetched. Called by `report.py`."""

from __future__ import annotations

import dataclasses
import html
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from megathunder.config import Config
from megathunder.metrics.resumptions import ResumedAt
from megathunder.metrics.row import MetricsRow, definitions
from megathunder.metrics.spans import Span
from megathunder.report.panels import Feature

CSS = """
:root{--ink:#1f2430;--faint:#6b7280;--line:#e5e7eb;--good:#2f8f5b;--bad:#c0362c}
*{box-sizing:border-box}body{margin:0;background:#f5f6f8;color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 20px 60px}h1{margin:0;font-size:26px}h2{margin:0 0 12px;font-size:17px}
.sub{color:var(--faint);margin:2px 0 18px}
section{background:#fff;border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin:16px 0;overflow-x:auto}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px}
.tile{background:#fff;border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:22px;font-variant-numeric:tabular-nums}.tile span{color:var(--faint);font-size:13px}
.certificate{border-left:5px solid var(--good)}.certificate.broken{border-left-color:var(--bad)}
.certificate p{margin:4px 0}.mark{font-weight:700;color:var(--good)}.broken .mark{color:var(--bad)}
img,section>svg{max-width:100%;height:auto;display:block}
table{border-collapse:collapse;font-size:12px;font-variant-numeric:tabular-nums}
th,td{padding:3px 5px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap;line-height:1.35}
th{color:var(--faint);font-weight:600}td:first-child,th:first-child{text-align:left}
table.words :is(td,th){text-align:left;white-space:normal}details{margin:8px 0}summary{cursor:pointer;font-weight:600}
.settings{columns:2 420px;column-gap:28px}
.settings table{break-inside:avoid;width:100%;margin-bottom:14px;table-layout:fixed}
.nostep{background:#f9e8e6}p.nostep{margin:0 0 12px;padding:6px 10px;border-left:4px solid var(--bad)}
.feature .sub{margin-top:-6px}
.settings td{overflow-wrap:anywhere}.rows{width:100%}.rows th{white-space:normal;vertical-align:bottom}
"""
COLUMNS = {
    "update": "update",
    "reward_mean": "reward",
    "success_heldout": "held-out",
    "step_wall_s": "step s",
    "rollout_s": "rollout s",
    "tail_s": "tail s",
    "suffix_s": "suffix s",
    "learner_busy_share": "busy",
    "learner_idle_s": "idle s",
    "learner_blocked_s": "blocked s",
    "policy_lag_max": "lag",
    "engine_learner_logprob_diff_max": "mismatch",
    "contributions_applied": "applied",
    "contributions_dropped": "dropped",
    "groups_degenerate": "equal groups",
    "wasted_share": "wasted",
    "trained_tokens": "trained tokens",
    "grad_norm": "grad norm",
    "loss": "loss",
    "active_mfu": "MFU",
}


def page(
    config: Config,
    rows: Sequence[MetricsRow],
    *,
    curves: str,
    timeline_base64: str,
    features: Sequence[Feature] = (),
    resumptions: Sequence[ResumedAt] = (),
    spans: Sequence[Span] = (),
) -> str:
    """The whole document. `timeline_base64` is a PNG; empty where the run recorded no events."""
    name = html.escape(config.run.name)
    picture = f'<img alt="timeline" src="data:image/png;base64,{timeline_base64}">'
    timeline = picture if timeline_base64 else "<p>No events were recorded.</p>"
    subtitle = f"{config.objective} · {config.schedule} · {len(rows)} of {config.run.updates} updates"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{name}</title><style>{CSS}</style></head><body><main>
<h1>{name}</h1><p class="sub">{html.escape(subtitle)}</p>
<div class="tiles">{_tiles(rows)}</div>
{certificate(rows)}
<section><h2>Curves</h2>{_without_step(rows)}{curves}</section>
{"".join(_feature(feature) for feature in features)}
<section><h2>Timeline of the last updates</h2>{timeline}{_servers_down(spans)}</section>
<section><h2>Last updates</h2>{_last_rows(rows[-20:])}
<details><summary>What each column of metrics.jsonl is</summary>{_definitions()}</details></section>
{_memory(rows)}
{_resumptions(resumptions)}
<section><h2>Settings</h2><div class="settings">{_settings(config)}</div></section>
</main></body></html>
"""


def _without_step(rows: Sequence[MetricsRow]) -> str:
    """Which updates trained nothing, and why; empty where all did."""
    reasons = Counter(row.skip_reason or "no reason given" for row in rows if not row.stepped)
    if not reasons:
        return ""
    told = "; ".join(f"{html.escape(reason)} ({number})" for reason, number in reasons.most_common())
    return f"""<p class="nostep"><b>{reasons.total()} of {len(rows)} updates took no optimizer step</b> and trained
nothing; they are shaded. Reasons: {told}.</p>"""


def _feature(feature: Feature) -> str:
    return f"""<section class="feature"><h2>{html.escape(feature.title)}</h2>
<p class="sub">{html.escape(feature.words)}</p>{feature.panels}</section>"""


def certificate(rows: Sequence[MetricsRow]) -> str:
    """What the rows prove about staleness: every trained token's version is that of the policy it trained, or not."""
    by_lag: dict[int, int] = {}
    for row in rows:
        for lag, tokens in row.tokens_by_lag.items():
            by_lag[lag] = by_lag.get(lag, 0) + tokens
    total = sum(by_lag.values())
    stale = sum(tokens for lag, tokens in by_lag.items() if lag != 0)
    worst = max(rows, key=lambda row: row.engine_learner_logprob_diff_max)
    applied = sum(row.contributions_applied for row in rows)
    dropped = sum(row.contributions_dropped for row in rows)
    reasons = sum((Counter(row.dropped_by_reason) for row in rows), Counter())
    why = ", ".join(f"{html.escape(reason)} {number:,}" for reason, number in reasons.most_common())
    if stale == 0:
        state, verdict = "", "Zero staleness."
        text = f"All {total:,} sampled tokens of {len(rows)} updates carry the version of the policy they update."
    else:
        state, verdict = " broken", "Not exact."
        spread = ", ".join(f"{tokens:,} at lag {lag}" for lag, tokens in sorted(by_lag.items()))
        text = f"{stale:,} of {total:,} sampled tokens ({stale / total:.1%}) are of another version: {spread}."
    return f"""<section class="certificate{state}"><h2>Zero-staleness certificate</h2>
<p><span class="mark">{verdict}</span> {text}</p>
<p>Largest difference between engine and learner log-probabilities of a differentiated token:
{worst.engine_learner_logprob_diff_max:.2e} (update {worst.update}).</p>
<p>Contributions: {applied + dropped:,} registered = {applied:,} applied + {dropped:,} dropped{why and f" ({why})"}.</p>
</section>"""


def _tiles(rows: Sequence[MetricsRow]) -> str:
    steady = rows[4:] or rows
    heldout = [row.success_heldout for row in rows if row.success_heldout is not None]
    idle = sum(not row.stepped for row in rows)
    tiles = [
        *_reward_tiles(rows),
        ("held-out, last taken", f"{heldout[-1]:.3f}" if heldout else "–"),
        ("step wall, median", f"{median(r.step_wall_s for r in steady):.2f} s"),
        ("tail, median", f"{median(r.tail_s for r in steady):.2f} s"),
        ("learner busy, median", f"{median(r.learner_busy_share for r in steady):.0%}"),
        ("trained tokens", f"{sum(r.trained_tokens for r in rows):,}"),
        *([("updates without a step", f"{idle} of {len(rows)}")] if idle else []),
    ]
    return "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles)


def _reward_tiles(rows: Sequence[MetricsRow]) -> list[tuple[str, str]]:
    """The mean of four updates at either end; of a run that has not twice as many, of as many as do not overlap."""
    if len(rows) == 1:
        return [("reward of the update", f"{rows[0].reward_mean:.3f}")]
    number = min(4, len(rows) // 2)
    span = f"{('', 'two ', 'three ', 'four ')[number - 1]}update{'s' if number > 1 else ''}"
    ends = {"first": rows[:number], "last": rows[-number:]}
    return [(f"reward, {end} {span}", f"{_mean(r.reward_mean for r in some):.3f}") for end, some in ends.items()]


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


def _last_rows(rows: Sequence[MetricsRow]) -> str:
    meaning = definitions()
    head = "".join(f'<th title="{html.escape(meaning[name])}">{label}</th>' for name, label in COLUMNS.items())
    body = "".join(_last_row(row) for row in rows)
    return f'<table class="rows"><tr>{head}</tr>{body}</table>'


def _last_row(row: MetricsRow) -> str:
    cells = "".join(f"<td>{_cell(name, getattr(row, name))}</td>" for name in COLUMNS)
    return (
        f"<tr>{cells}</tr>"
        if row.stepped
        else f'<tr class="nostep" title="{html.escape(row.skip_reason)}">{cells}</tr>'
    )


def _cell(name: str, value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        if name == "engine_learner_logprob_diff_max":
            return f"{value:.1e}"
        return f"{value:.1%}" if name in ("learner_busy_share", "active_mfu", "wasted_share") else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else html.escape(str(value))


def _servers_down(spans: Sequence[Span]) -> str:
    """Which servers went down since the run was last started, how often, and how it ended; empty where none did."""
    marks = Counter((span.lane, span.name) for span in spans)
    told = []
    for (lane, name), number in sorted(marks.items()):
        if name == "down":
            often = {1: "once", 2: "twice"}.get(number, f"{number} times")
            told.append(f"{html.escape(lane)} {often} ({'lost' if (lane, 'lost') in marks else 'restarted'})")
    return f"<p>Servers that went down since the last start: {', '.join(told)}.</p>" if told else ""


def _memory(rows: Sequence[MetricsRow]) -> str:
    """Peaks over all updates: a line a holder, a column a phase."""
    peaks: dict[str, dict[str, int]] = {}
    for row in rows:
        for phase, held in (row.memory_peaks or {}).items():
            for holder, size in held.items():
                line = peaks.setdefault(holder, {})
                line[phase] = max(line.get(phase, 0), size)
    if not peaks:
        return ""
    phases = list(dict.fromkeys(phase for row in rows for phase in row.memory_peaks or {}))
    head = "".join(f"<th>{html.escape(phase)}</th>" for phase in phases)
    body = "".join(
        f"<tr><td>{html.escape(holder)}</td>"
        + "".join(f"<td>{line[phase] / 2**30:.2f}</td>" if phase in line else "<td>–</td>" for phase in phases)
        + "</tr>"
        for holder, line in sorted(peaks.items())
    )
    return f"""<section><h2>Memory: most that each held in each phase, GiB</h2>
<table><tr><th></th>{head}</tr>{body}</table></section>"""


def _resumptions(resumptions: Sequence[ResumedAt]) -> str:
    """A line a setting that was changed on the way; the table of settings has the last value."""
    changed = [(one.update, *change.partition(": ")[::2]) for one in resumptions for change in one.changed]
    if not changed:
        return ""
    body = "".join(
        f"<tr><td>{update}</td><td>{html.escape(name)}</td><td>{html.escape(values)}</td></tr>"
        for update, name, values in changed
    )
    return f"""<section><h2>Settings that a resumed run changed</h2>
<table class="words"><tr><th>from update</th><th>setting</th><th>before -&gt; after</th></tr>{body}</table></section>"""


def _definitions() -> str:
    rows = "".join(f"<tr><td><code>{n}</code></td><td>{html.escape(t)}</td></tr>" for n, t in definitions().items())
    return f'<table class="words">{rows}</table>'


def _settings(config: Config) -> str:
    sections = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    top = {name: value for name, value in sections.items() if not dataclasses.is_dataclass(value)}
    tables = [_setting_table("", top)]
    for name, value in sections.items():
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            tables.append(_setting_table(f"[{name}]", dataclasses.asdict(value)))
    return "".join(tables)


def _setting_table(title: str, values: dict[str, object]) -> str:
    secret = {"api_key"}
    rows = "".join(
        f"<tr><td>{name}</td><td>{'(set)' if name in secret and value else _setting(value)}</td></tr>"
        for name, value in values.items()
    )
    return f'<table class="words"><tr><th>{title}</th><th></th></tr>{rows}</table>'


def _setting(value: object) -> str:
    """A value as it stands in a TOML file; nothing for an empty one."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list | dict):
        pairs = [f"{k} = {v}" for k, v in value.items()] if isinstance(value, dict) else [str(v) for v in value]
        return html.escape(", ".join(pairs)) or "–"
    return html.escape(str(value)) or "–"
