"""What a comparison concludes from the rows of a run that alternated schedules."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy
import pytest
from PIL import Image
from safetensors.numpy import save_file

from benchmarks.comparison.alternation import FILE, AlternatingUpdates, Alternation, Recording, tensor_file
from benchmarks.comparison.comparison import compare
from megathunder.config import Config
from megathunder.errors import UserError
from megathunder.metrics.run_folder import RunFolder, start_run
from megathunder.metrics.sinks import JsonlSink
from megathunder.metrics.spans import read_spans
from megathunder.report.timeline import draw_schedules
from tests.unit.metrics.made_run import made_row, made_run

SECONDS = {"sync": 4.0, "thundersync": 2.0, "one_step_off": 2.5, "thundersync+no_verifier": 1.8}


def comparison_run(
    parent: Path,
    names: tuple[str, ...],
    rounds: int = 2,
    changes: dict[str, dict] | None = None,
    idle: int = 99,
    **replay: object,
) -> RunFolder:
    """Blocks of two updates; every update of a schedule takes SECONDS; `changes` of its rows. From batch `idle` on
    there is no gradient."""
    run = dataclasses.replace(Config().run, folder=str(parent), updates=2 * rounds * len(names), overwrite=True)
    config = dataclasses.replace(Config(), run=run)
    recording = Recording(run="recorded", **replay) if replay else None  # type: ignore[arg-type]
    alternation = Alternation(schedules=names, block=2, recording=recording)
    folder, plan = start_run(config), AlternatingUpdates(config, alternation)
    alternation.write(folder.path / FILE)
    sink = JsonlSink(folder.metrics)
    for update in range(run.updates):
        spec = plan.spec(update)
        name = spec.name
        wall = SECONDS[name]
        row = made_row(update, schedule=name, step_wall_s=wall, tail_s=wall / 10, **(changes or {}).get(name, {}))
        sink.row(row)
        file = tensor_file(folder.path, "gradients", update)
        file.parent.mkdir(exist_ok=True)
        noise = 1e-7 if name == "thundersync" else 0.0
        tensor = numpy.array([1.0, 0.5 + noise]) * (spec.batch < idle)
        save_file({"w": tensor}, file)
    return folder


def test_speedups_and_tails_are_ratios_on_the_same_batches(tmp_path: Path) -> None:
    names = ("sync", "thundersync", "one_step_off")
    folder = comparison_run(tmp_path, names)
    found = compare(folder, names, warmup=1, block=2)
    assert found.speedup("thundersync") == pytest.approx(2.0)
    assert found.speedup("one_step_off") == pytest.approx(4.0 / 2.5)
    assert found.tail_ratios["thundersync"] == pytest.approx([0.5, 0.5])
    assert found.differences == pytest.approx({"sync": 0.0, "thundersync": 1e-7, "one_step_off": 0.0})
    table = found.as_table()
    assert table["speedup_vs_sync"]["thundersync"]["runs"] == pytest.approx([2.0, 2.0])  # type: ignore[index]


def test_updates_without_a_gradient_are_counted_and_not_compared(tmp_path: Path) -> None:
    names = ("sync", "thundersync")
    found = compare(comparison_run(tmp_path / "a", names, idle=2), names, warmup=1, block=2)
    assert found.differences == pytest.approx({"sync": 0.0, "thundersync": 1e-7}) and found.zero_updates == 1
    found = compare(comparison_run(tmp_path / "b", names, idle=0), names, warmup=1, block=2)
    assert found.differences == {} and found.as_table()["updates_without_gradient"] == 2
    assert found.as_table()["schedules"]["thundersync"]["update_max_rel_diff_vs_sync"] is None  # type: ignore[index]
    assert any(line.startswith("gradients of 2 of 2 measured updates are 0") for line in found.remarks())


def test_the_prediction_error_is_relative_to_what_was_measured(tmp_path: Path) -> None:
    names = ("sync", "thundersync")
    found = compare(comparison_run(tmp_path, names), names, warmup=1, block=2)
    found = dataclasses.replace(found, predicted={"sync": 1.0, "thundersync": 1.9})
    assert found.prediction_errors == pytest.approx({"thundersync": 0.05})
    assert found.as_table()["predicted_speedup_vs_sync"] == {"sync": 1.0, "thundersync": 1.9}


def test_a_hidden_verifier_is_what_does_not_lengthen_the_step(tmp_path: Path) -> None:
    names = ("thundersync+no_verifier", "thundersync", "sync")
    found = compare(comparison_run(tmp_path, names, verifier_s=2.0), names, warmup=1, block=2)
    assert found.verifier_hidden["thundersync"] == pytest.approx([0.9, 0.9])
    assert found.verifier_hidden["sync"] == pytest.approx([-0.1, -0.1])


def test_a_schedule_that_was_never_measured_is_named(tmp_path: Path) -> None:
    folder = comparison_run(tmp_path, ("sync", "thundersync"))
    with pytest.raises(UserError, match="no measured update of periodic_async"):
        compare(folder, ("sync", "periodic_async"), warmup=1, block=2)


def test_rounds_alternate_their_order_and_blocks_of_a_round_share_their_batches() -> None:
    plan = AlternatingUpdates(Config(), Alternation(schedules=("sync", "thundersync"), block=2))
    specs = [plan.spec(update) for update in range(8)]
    assert "".join(spec.name[0] for spec in specs) == "ssttttss"
    assert [spec.config.schedule for spec in specs] == [spec.name for spec in specs]
    assert [spec.batch for spec in specs] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert [spec.first for spec in specs] == [True, False] * 4


def test_all_schedules_are_drawn_in_one_figure(tmp_path: Path) -> None:
    spans = read_spans(made_run(tmp_path, updates=3).events)
    assert draw_schedules(spans, {"sync": 1, "thundersync": 2}, tmp_path / "two.png")
    assert draw_schedules(spans, {"sync": 1}, tmp_path / "one.png")
    two, one = (Image.open(tmp_path / name).size for name in ("two.png", "one.png"))
    assert two[0] == one[0] and two[1] > 1.5 * one[1], "a panel each, below each other"
    assert not draw_schedules(spans, {"sync": 99}, tmp_path / "none.png")
