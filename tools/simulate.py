"""Prediction of step times: `python tools/simulate.py {predict,sweep,plan,sagc} --help`.

    predict RUN    what every schedule would have taken on the recorded work of a run
    sweep          the release model against replay, 588 paired configurations
    plan           how to split GPUs between rollout and learner, and what step time to expect
    sagc           group sizes fixed at 4, 8, 16 against straggler-aware control, on heavy-tailed lengths

Everything printed here is simulated.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.papers import group_size_cases as sizes
from benchmarks.papers import lengths, simulation_report
from benchmarks.papers import sweep as sweeps
from megathunder.errors import UserError
from megathunder.hardware import gpu_named
from megathunder.metrics.output_file import output_file
from megathunder.metrics.row import read_rows
from megathunder.metrics.run_folder import open_folder
from megathunder.simulator import gpu_split as plans
from megathunder.simulator.predict import predict as predict_run
from megathunder.simulator.recorded import read_recorded_run
from megathunder.simulator.schedule_replay import replay

console = Console()
console.width = max(console.width, 110)  # a file has no width of its own
SHELL_LENGTHS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "shell_lengths.json"
"""Lengths that runs on the shell tasks recorded."""
WARM_UP = 4
"""Updates whose spans the cost fit leaves out, where a run has more."""


def predict(run: tyro.conf.Positional[Path], json: Path | None = None, figure: Path | None = None) -> None:
    """Replay the recorded updates of RUN under every schedule.

    Args:
        run: Folder of a run (runs/<name>).
        json: Write every simulated step here.
        figure: Draw the last update's timeline under every schedule here (PNG).
    """
    if json:
        output_file(json)
    folder = open_folder(run)
    taken = [row.update for row in read_rows(folder.metrics)]
    warm = taken[min(WARM_UP, len(taken) - 1)] if taken else 0
    recorded = read_recorded_run(folder, trace=lambda row: row.update >= warm, cost=lambda row: row.update >= warm)
    result = predict_run(recorded.config, recorded.updates, recorded.costs, cells=recorded.cells)
    table = Table("schedule", "step wall s (median)", "speed-up over sync", title=f"{run.name}: simulated")
    for schedule, speedup in result.speedup_vs_sync.items():
        walls = sorted(s.step_wall_s for s in result.steps if s.schedule == schedule)
        table.add_row(schedule, f"{walls[len(walls) // 2]:.3f}", f"{speedup:.3f}")
    console.print(table)
    if result.error_vs_measured is not None:
        console.print(f"simulated against measured step wall: median difference {100 * result.error_vs_measured:.1f} %")
    if json:
        simulation_report.write_json(result, json)
    if figure:
        last, config = recorded.updates[-1].trace, recorded.config
        under = [dataclasses.replace(config, schedule=schedule) for schedule in result.speedup_vs_sync]
        results = [replay(config, last, recorded.costs, recorded.cells) for config in under]
        simulation_report.draw_timeline(last, results, figure)


def sweep(json: Path, figure: Path | None = None, seed: int = 0) -> None:
    """Compare the closed form with replay over 588 configurations (about two minutes).

    Args:
        json: Write `configurations`, `mean_rel_diff`, `max_rel_diff` and every row here.
        figure: Draw both predictions and their difference here (PNG; default: beside the JSON).
        seed: Seed of the drawn traces.
    """
    output_file(json)
    result = sweeps.sweep(list(sweeps.points()), seed)
    simulation_report.write_json(result, json)
    simulation_report.draw_sweep(result, figure or json.with_suffix(".png"))
    console.print(
        f"simulated: {result.configurations} configurations, mean difference {100 * result.mean_rel_diff:.2f} %, "
        f"greatest {100 * result.max_rel_diff:.2f} %, by objective {result.mean_rel_diff_by_objective}"
    )


def releases_by_turn(objective: str) -> bool:
    """Whether a turn is a contribution; UserError where the objective is unknown."""
    if objective not in ("grpo", "opd"):
        raise UserError(f"objective {objective!r}", expected="grpo or opd", remedy="name one of them")
    return objective == "opd"


def plan(
    parameters: float,
    gpus: int,
    gpu: str = "h200",
    active_parameters: float = 0.0,
    objective: str = "grpo",
    trajectories: int = 256,
    turns: int = 20,
    prompt_tokens: int = 2000,
    action_tokens: int = 200,
    observation_tokens: int = 400,
    tool_s: float = 5.0,
    spread: float = 0.5,
    kv_bytes_per_token: float = 131072.0,
    learner_mfu: float = 0.4,
    decode_efficiency: float = 0.5,
    link_bytes_s: float = 20e9,
    step_s: float = 2.0,
    rows: int = 12,
) -> None:
    """How to split GPUs between rollout and learner, from a stated cost model (megathunder/simulator/gpu_split.py).

    Args:
        parameters: Parameters of the model (30e9).
        gpus: GPUs in all.
        gpu: a100, h100, h200 or b200.
        active_parameters: Parameters a token uses (mixture of experts); 0: all.
        objective: grpo or opd.
        trajectories: Trajectories of one update.
        turns: Turns of a trajectory.
        prompt_tokens: Tokens of the prompt.
        action_tokens: Sampled tokens of a turn.
        observation_tokens: Tool output of a turn, tokens.
        tool_s: Tool time of a turn.
        spread: Log-deviation of trajectory durations.
        kv_bytes_per_token: Keys and values of a token.
        learner_mfu: Share of peak the learner reaches.
        decode_efficiency: Share of the decoding bound the engine reaches.
        link_bytes_s: Rate at which weights reach the servers.
        step_s: Reduction and optimizer step.
        rows: Splits to show, the best ones.
    """
    if rows < 1:
        raise UserError(f"{rows} rows", expected="at least the best split", remedy="give --rows 1 or more")
    request = plans.PlanRequest(
        parameters=parameters,
        active_parameters=active_parameters or parameters,
        gpu=gpu_named(gpu),
        gpus=gpus,
        by_turn=releases_by_turn(objective),
        trajectories=trajectories,
        turns=turns,
        prompt_tokens=prompt_tokens,
        action_tokens=action_tokens,
        observation_tokens=observation_tokens,
        tool_s=tool_s,
        spread=spread,
        kv_bytes_per_token=kv_bytes_per_token,
        learner_mfu=learner_mfu,
        decode_efficiency=decode_efficiency,
        link_bytes_s=link_bytes_s,
        step_s=step_s,
    )
    columns = ("GPUs", "rollout s", "learner s", "tail s", "suffix s", "sync s", "thunder s")
    table = Table(*columns, "speed-up", title="predicted; GPUs: rollout + learner; best first")
    splits = plans.plan(request)
    for split in splits[:rows]:
        seconds = (split.rollout_s, split.learner_s, split.tail_s, split.suffix_s)
        steps = (split.sync_step_s, split.thundersync_step_s)
        table.add_row(
            f"{split.rollout_gpus} + {split.learner_gpus}",
            *(f"{s:.1f}" for s in (*seconds, *steps)),
            f"{split.speedup:.2f}",
        )
    console.print(table)
    if len(splits) > rows:
        console.print(f"and {len(splits) - rows} more, up to {splits[-1].thundersync_step_s:.1f} s a step (--rows)")


def sagc(
    json: Path, run: tuple[Path, ...] = (), keep: Path | None = None, figure: Path | None = None, seeds: int = 5
) -> None:
    """Straggler rate, utility and wall time of group sizes, on drawn and measured lengths.

    Args:
        json: Write every number and the assumptions here.
        run: Folders of runs whose groups of lengths are taken, beside those in benchmarks/results/shell_lengths.json.
        keep: Write the lengths of these runs here.
        figure: Draw the rates, the walls and the controller's course here (PNG; default: beside the JSON).
        seeds: Runs of every policy on every stream.
    """
    sizes.refuse_no_seed(seeds)
    output_file(json)
    recorded = {k: v for folder in run for k, v in lengths.recorded_lengths(open_folder(folder)).items()}
    if keep:
        lengths.write_lengths(recorded, keep)
    groups = {**(lengths.read_lengths(SHELL_LENGTHS) if SHELL_LENGTHS.is_file() else {}), **recorded}
    streams = [*sizes.synthetic(), *(sizes.measured(name, found) for name, found in groups.items())]
    streams = [case for case in streams if sizes.has_choice(case)]
    result = sizes.SagcResult(
        assumptions=(sizes.__doc__ or "").strip(),
        seeds=seeds,
        comparisons=tuple(sizes.compare(case, seeds) for case in streams),
    )
    simulation_report.write_json(result, json)
    simulation_report.draw_sagc(result, figure or json.with_suffix(".png"))
    columns = ("stream", "policy", "straggler rate", "target", "mean log2 G", "wall / fixed 16", "trajectories")
    table = Table(*columns, title=f"simulated, {seeds} seeds")
    for found in result.comparisons:
        for line in found.lines:
            rate = f"{line.straggler_rate:.3f}"
            numbers = (
                rate,
                f"{found.target_rate:g}",
                f"{line.utility:.2f}",
                f"{line.wall:.3f}",
                f"{line.trajectories}",
            )
            table.add_row(found.name, line.policy, *numbers)
    console.print(table)


def main() -> int:
    """Run one subcommand; errors a person can mend are printed without a traceback."""
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"predict": predict, "sweep": sweep, "plan": plan, "sagc": sagc}, prog="simulate.py"
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
