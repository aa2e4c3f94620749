"""Learning curves of variants and seeds: what is compared at one time, what a comparison file says, what is drawn."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import learning_curves
from benchmarks.comparison.job import JobStopped
from benchmarks.comparison.learning import curve_of, draw_learning, summarise
from benchmarks.learning_curves import read_comparison
from megathunder.config import Config
from megathunder.config.checks import check_plan
from megathunder.config.load import load_config
from megathunder.errors import UserError
from megathunder.metrics.run_folder import RunFolder, start_run
from megathunder.metrics.sinks import JsonlSink
from tests.unit.metrics.made_run import made_row

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


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, "No such file"),
        ("", "no names with values"),
        ("- 1\n", "no names with values"),
        ("variants: {a: }\nother: 1\nconfig: x\n", "variants, other, config"),
        ("config: [\n", "line"),
        ("config: 5\nvariants: {a: }\n", "config: 5"),
        ("config: x\nvariants: \n", "variants: None"),
        ("config: x\nvariants: [a, b]\n", "variants: ['a', 'b']"),
        ("config: x\nvariants: {a: {run.seed: 1}}\n", "variants: {'a': {'run.seed': 1}}"),
        ("config: x\nvariants: {a: }\nseeds: 3\n", "seeds: 3"),
        ("config: x\nvariants: {a: }\nseeds: []\n", "seeds: []"),
        ("config: x\nvariants: {a: }\nsettings: [--run.seed]\n", "settings: ['--run.seed']"),
    ],
)
def test_a_comparison_that_cannot_be_read_is_refused_by_what_it_says(
    tmp_path: Path, text: str | None, seen: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.yaml"
    if text is not None:
        file.write_text(text)
    assert learning_curves.main([str(file), "--json", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr().err
    assert seen in said and "expected:" in said and "remedy:" in said


@pytest.fixture
def comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A comparison of two variants, and the words of the command that takes it in `tmp_path`."""
    monkeypatch.chdir(ROOT)
    file = tmp_path / "own.yaml"
    file.write_text(
        "config: examples/shell_grpo.toml\nvariants: {a: --run.updates 2, b: --run.updates 2 --schedule sync}"
    )
    return [str(file), "--folder", str(tmp_path / "runs"), "--json", str(tmp_path / "out.json")]


class Trained:
    """Stands for `run_job`: a finished run with an evaluation; stopped in the `stopped`th."""

    def __init__(self, stopped: int = 99) -> None:
        self.asked, self.stopped = list[Config](), stopped

    def __call__(self, config: Config, *, ranks: int) -> RunFolder:
        self.asked.append(config)
        folder = start_run(config)
        for row in rows(1.0, (0.5,)):
            JsonlSink(folder.metrics).row(row)
        if len(self.asked) == self.stopped:
            raise JobStopped(signal.SIGTERM, folder)
        folder.policy.mkdir()
        return folder


def test_a_finished_run_is_left_alone_where_its_settings_are_those_asked_for_and_refused_elsewhere(
    tmp_path: Path, comparison: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = Trained()
    monkeypatch.setattr(learning_curves, "run_job", trained)
    assert learning_curves.main(comparison) == 0
    first, second = trained.asked
    assert Path(first.run.folder) / first.run.name == tmp_path / "runs" / "own_a_s0"
    assert first.run.overwrite and not first.run.resume
    assert (first.schedule, second.schedule) == ("thundersync", "sync")
    assert learning_curves.main(comparison) == 0 and len(trained.asked) == 2
    capsys.readouterr()

    file = Path(comparison[0])
    file.write_text(file.read_text().replace("a: --run.updates 2", "a: --run.updates 3 --learner.learning-rate 0.5"))
    for more in ([], ["--for-s", "0"]):
        assert learning_curves.main([*comparison, *more]) == 2 and len(trained.asked) == 2
        said = capsys.readouterr().err
        assert "run.updates = 2, and 3 is asked for" in said and "learner.learning_rate" in said
        assert "--folder" in said and "expected:" in said
    (tmp_path / "runs" / "own_a_s0" / "config.toml").unlink()
    assert learning_curves.main(comparison) == 2
    assert "without its settings" in capsys.readouterr().err


def test_a_stopped_comparison_reports_what_was_learnt_and_goes_on(
    tmp_path: Path, comparison: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning_curves, "run_job", Trained(stopped=2))
    assert learning_curves.main(comparison) == 0
    said = capsys.readouterr().err
    assert "stopped by SIGTERM" in said and str(tmp_path / "out.json") in said and "the same command goes on" in said
    assert [c["variant"] for c in json.loads((tmp_path / "out.json").read_text())["curves"]] == ["a", "b"]
