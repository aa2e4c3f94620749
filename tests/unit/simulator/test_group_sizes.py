"""Group sizes on a virtual clock: the controller holds its target, walls add up, recorded lengths come back."""

from __future__ import annotations

import random
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.papers.group_size_cases import compare, has_choice, measured, synthetic
from benchmarks.papers.group_sizes import Case, Load, Lognormal, Measured, WallModel, play
from benchmarks.papers.lengths import read_lengths, recorded_lengths, write_lengths
from megathunder.config.sagc import SagcConfig
from megathunder.errors import UserError
from megathunder.metrics.run_folder import RunFolder
from tests.unit.coordinator.recordings import write_update


def test_the_controller_holds_its_target_where_every_fixed_size_misses_it() -> None:
    for case in synthetic(updates=300):
        found = compare(case, seeds=1)
        rates = {line.policy: line.straggler_rate for line in found.lines}
        assert abs(rates.pop("sagc") - found.target_rate) < 0.07
        assert all(abs(rate - found.target_rate) > 0.07 for rate in rates.values()), rates
        assert found.lines[-1].utility > 2.0, "and its groups are larger than the smallest"


def test_without_a_run_of_every_policy_there_is_no_comparison() -> None:
    for seeds in (0, -1):
        with pytest.raises(UserError, match=f"{seeds} seeds"):
            compare(synthetic(updates=3)[0], seeds=seeds)


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ("sagc --json OUT --seeds 0", "0 seeds"),
        ("plan --parameters 8e9 --gpus 8 --rows 0", "0 rows"),
        ("plan --parameters 1e9 --active-parameters 3.3e9 --gpus 8", "active_parameters is 3.3e+09"),
    ],
)
def test_a_count_that_asks_for_nothing_ends_the_tool_with_two(
    words: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py", *words.replace("OUT", str(tmp_path / "out.json")).split()])
    tool = runpy.run_path(str(Path(__file__).resolve().parents[3] / "tools" / "simulate.py"))
    assert tool["main"]() == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {seen}") and "expected:" in said and "remedy:" in said
    assert not (tmp_path / "out.json").exists()


def test_prompts_follow_the_size_where_trajectories_are_to_stay() -> None:
    case = Case(name="t", lengths=Lognormal(spread=0.6), settings=SagcConfig(), updates=50, trajectories=64)
    assert play(case, None, 0).trajectories == 50 * 64
    assert play(replace(case, trajectories=0), 4, 0).trajectories == 50 * 8 * 4


def test_the_wall_is_that_of_its_parts() -> None:
    load = Load.of([1.0, 2.0, 5.0]) + Load.of([1.0])
    assert (load.longest, load.sampled, load.padded) == (6.0, 9.0, 16.0)
    assert WallModel(latency_s=1.0, token_s=2.0, padded_s=3.0).wall_s(load) == 6 + 18 + 48
    assert WallModel.shares(load, 7.0, 0.5, 0.2).wall_s(load) == pytest.approx(7.0)


def test_measured_groups_are_drawn_from_their_time_in_the_run() -> None:
    lengths = Measured(groups=tuple((float(tenth),) * 3 for tenth in range(10) for _ in range(2)))
    rng = random.Random(0)
    assert all(lengths.draw(4, progress, rng) == [10 * progress // 1] * 4 for progress in (0.0, 0.55, 0.95))
    assert lengths.draw(2, 1.0, rng) == [9.0, 9.0]
    assert not has_choice(measured("calm", [[1.0, 1.0], [2.0, 2.0]]))


def test_recorded_lengths_come_back_by_group(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_update(folder, 0, groups=3, size=4)
    found = recorded_lengths(folder)
    assert set(found) == {f"{tmp_path.name}, {measure}" for measure in ("tokens", "turns", "seconds")}
    assert [len(group) for group in found[f"{tmp_path.name}, tokens"]] == [4, 4, 4]
    write_lengths(found, tmp_path / "lengths.json")
    assert read_lengths(tmp_path / "lengths.json") == found
