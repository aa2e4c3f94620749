"""Learning curves of variants and seeds: what is compared at one time, what a comparison file says, what is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from megathunder.config.checks import check_plan
from megathunder.config.load import load_config
from megathunder.errors import UserError
from megathunder.metrics.curves import draw_curves
from megathunder.metrics.learning import curve_of, draw_learning, summarise
from megathunder.metrics.row import Salt, Sizing
from tests.unit.metrics.made_run import made_row
from tools import learning_curves
from tools.learning_curves import read_comparison

ROOT = Path(__file__).resolve().parents[3]


def rows(wall_s: float, heldout: tuple[float, ...]) -> list:
    """An evaluation after every second update."""
    found = []
    for update in range(2 * len(heldout)):
        value = heldout[update // 2] if update % 2 else None
        found.append(made_row(update, step_wall_s=wall_s, success_heldout=value))
    return found


def test_variants_are_compared_at_the_time_the_fastest_run_took(tmp_path: Path) -> None:
    fast = curve_of("fast", 0, rows(1.0, (0.2, 0.5, 0.6)))
    slow = [curve_of("slow", seed, rows(2.0, (0.3, 0.7 + seed / 10, 0.9))) for seed in (0, 1)]
    assert curve_of("none", 0, [made_row(0)]) is None
    found = summarise([fast, *slow])
    assert found.time_s == 6.0 and [s.variant for s in found.summaries] == ["fast", "slow"]
    assert found.summaries[0].at_one_time == (0.6, 0.6, 0.6)
    assert found.summaries[1].at_one_time == (0.3, 0.3, 0.3), "by 6 s only its first evaluation, at 4 s, was taken"
    assert found.summaries[1].last == (0.9, 0.9, 0.9) and found.summaries[1].seeds == 2
    draw_learning(found, tmp_path / "curves.png")
    assert Image.open(tmp_path / "curves.png").width > 800


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "learning").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_job_of_a_comparison_is_a_legal_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, jobs = read_comparison(file, "")
    assert len({job.name for job in jobs}) == len(jobs) >= 6
    for job in jobs:
        loaded = load_config(["--config", str(config), *job.settings])
        check_plan(loaded, ranks=1)
        assert loaded.run.seed == loaded.tasks.seed == job.seed
    first = [job.variant for job in jobs if job.seed == jobs[0].seed]
    assert len(set(first)) == len(first), "all variants of a seed, then the next seed"
    with pytest.raises(UserError, match="no variant other"):
        read_comparison(file, "other")


def test_a_comparison_may_lie_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "own.yaml"
    file.write_text("config: examples/shell_grpo.toml\nvariants: {a: }\n")
    assert read_comparison(file, "")[0].samefile(ROOT / "examples/shell_grpo.toml")
    (tmp_path / "mine.toml").write_text("")
    file.write_text("config: mine.toml\nvariants: {a: }\n")
    assert read_comparison(file, "")[0] == tmp_path / "mine.toml"
    file.write_text("config: nowhere.toml\nvariants: {a: }\n")
    with pytest.raises(UserError, match="nowhere.toml"):
        read_comparison(file, "")


def test_a_job_writes_the_folder_that_is_read_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    monkeypatch.setattr(learning_curves, "run_job", lambda config, **how: taken.append((config.run, how["settings"])))
    monkeypatch.chdir(ROOT)
    file = ROOT / "examples/learning/salt.yaml"
    config, (job, *_) = read_comparison(file, "salt")
    learning_curves.take(job, config, learning_curves.Arguments(comparison=file, folder=tmp_path))
    ((run, settings),) = taken
    assert Path(run.folder) / run.name == tmp_path / job.name and run.overwrite and not run.resume
    assert settings == job.settings, "a name in these words would be unknown to run_job"


def test_the_report_draws_controlled_sizes_and_reweighed_gradients() -> None:
    sizing = Sizing(groups_by_size={4: 16}, measured=16, straggled=5, chosen=4, price=0.1, multiplier=0.3)
    salt = Salt(
        geometries=5, cancellation=0.6, cancellation_max=0.9, factor=1.2, factor_max=1.5, rank=2.0, spectrum=(0.5, 0.2)
    )
    text = draw_curves([made_row(u, sizing=sizing, salt=salt) for u in range(5)])
    assert all(title in text for title in ("group size", "multiplier of the straggler", "residual channel"))
    assert "group size" not in draw_curves([made_row(0)])
