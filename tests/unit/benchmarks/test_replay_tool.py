"""tools/replay.py and tools/compare.py: what they ask the job for, what they conclude, and their exit status."""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
from pathlib import Path
from types import ModuleType

import numpy
import pytest
from safetensors.numpy import save_file

from benchmarks.comparison.alternation import FILE, AlternatingUpdates, Alternation, tensor_file
from benchmarks.comparison.job import JobFailed, JobStopped
from megathunder.config import Config
from megathunder.config.toml import to_toml
from megathunder.metrics.run_folder import RunFolder, start_run
from megathunder.metrics.sinks import JsonlSink
from tests.unit.coordinator.recordings import write_update
from tests.unit.metrics.made_run import made_row

ROOT = Path(__file__).resolve().parents[3]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tool_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "recorded"
    folder.mkdir()
    (folder / "config.toml").write_text(to_toml(Config()))
    for update in range(2):
        write_update(RunFolder(folder), update, groups=2, size=2)
    return folder


class Jobs:
    """Stands for `run_job`: writes what a job would, thundersync's tensors `error` away from the others'. Updates of
    batch `idle` and later have equal rewards: no gradient, no step. Stopped by signal `by` before update `stopped`."""

    def __init__(self, error: float = 0.0, idle: int = 99, stopped: int = 99, by: int = signal.SIGTERM) -> None:
        self.error, self.idle, self.stopped, self.by, self.asked = (
            error,
            idle,
            stopped,
            by,
            list[tuple[Config, Alternation]](),
        )

    def __call__(self, config: Config, *, ranks: int, settings: list[str], alternation: Alternation) -> RunFolder:
        self.asked.append((config, alternation))
        folder, plan = start_run(config), AlternatingUpdates(config, alternation)
        alternation.write(folder.path / FILE)
        sink = JsonlSink(folder.metrics)
        for update in range(config.run.updates):
            if update == self.stopped:
                raise JobStopped(self.by, folder)
            spec = plan.spec(update)
            steps = spec.batch < self.idle
            reason = "" if steps else "no contribution has a coefficient other than 0"
            sink.row(made_row(update, schedule=spec.name, stepped=steps, skip_reason=reason))
            off = self.error if spec.config.schedule == "thundersync" else 0.0
            for kind in ("gradients", "weights"):
                one = float(steps or kind == "weights")
                file = tensor_file(folder.path, kind, update)
                file.parent.mkdir(exist_ok=True)
                save_file({"w": numpy.array([one, off])}, file)
        return folder


def replay(monkeypatch: pytest.MonkeyPatch, recorded: Path, jobs: Jobs, *more: str) -> int:
    module = tool("replay")
    monkeypatch.setattr(module, "run_job", jobs)
    return module.main([str(recorded), "--folder", str(recorded / "runs"), *more])


def test_a_check_fails_above_the_tolerance_and_passes_below(monkeypatch: pytest.MonkeyPatch, recorded: Path) -> None:
    out = str(recorded / "out.json")
    assert replay(monkeypatch, recorded, Jobs(9e-6), "--check-against", "sync", "--json", out) == 0
    found = json.loads(Path(out).read_text())["check"]
    assert found["gradient_max_rel_diff"] == pytest.approx(9e-6)
    assert replay(monkeypatch, recorded, Jobs(1.1e-5), "--check-against", "sync") == 1
    assert replay(monkeypatch, recorded, Jobs(1.1e-5)) == 0, "nothing is compared unless it is asked for"


def test_a_check_of_gradients_that_are_all_0_says_that_nothing_was_compared_and_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = recorded / "out.json"
    options = ("--check-against", "sync", "--json", str(out))
    assert replay(monkeypatch, recorded, Jobs(idle=0), *options) == 2
    shown = capsys.readouterr()
    assert "no gradient was compared" in shown.err and "no weights" in shown.err and "remedy:" in shown.err
    assert "byte-identical" not in shown.out
    found = json.loads(out.read_text())["check"]
    assert (found["gradient_max_rel_diff"], found["weights_max_rel_diff"]) == (None, None)
    assert (found["updates"], found["zero_updates"]) == (2, 2)
    assert replay(monkeypatch, recorded, Jobs(1e-6, idle=0), *options) == 1, (
        "0 under one schedule alone is a difference"
    )
    assert replay(monkeypatch, recorded, Jobs(idle=1), *options) == 0
    assert "gradients of 1 of 2 updates are 0" in " ".join(capsys.readouterr().out.split())


def test_a_check_runs_both_schedules_at_rest_and_then_one_real_step_of_each(
    monkeypatch: pytest.MonkeyPatch, recorded: Path
) -> None:
    jobs = Jobs()
    options = ("--check-against", "sync", "--content-ready", "--shuffle-arrivals", "3", "--verifier-s", "0.5")
    assert replay(monkeypatch, recorded, jobs, *options) == 0
    (at_rest, resting), (first, one_step), (second, another) = jobs.asked
    assert resting.schedules == ("sync", "thundersync+content_ready") and at_rest.run.updates == 4
    assert (resting.learn, one_step.learn, another.learn) == (False, True, True)
    assert resting.applied(at_rest).learner.learning_rate == 0 < another.applied(second).learner.learning_rate
    assert (first.schedule, second.schedule) == ("sync", "thundersync")
    assert (first.streaming.content_ready, second.streaming.content_ready) == (False, True)
    assert (another.recording.shuffle_seed, another.recording.verifier_s) == (3, 0.5)
    assert at_rest.learner.learning_rate > 0


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (("--schedule", "thundersink"), 2),
        (("--updates", "7"), 2),
        (("--check-against", "sync/never"), 2),
    ],
)
def test_what_cannot_be_replayed_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, options: tuple[str, ...], status: int
) -> None:
    assert replay(monkeypatch, recorded, Jobs(), *options) == status


def test_a_failed_job_ends_with_one(monkeypatch: pytest.MonkeyPatch, recorded: Path) -> None:
    def fail(config: Config, **_: object) -> RunFolder:
        raise JobFailed("the job ended with status 1")

    assert replay(monkeypatch, recorded, fail) == 1  # type: ignore[arg-type]


def test_a_comparison_is_of_a_workload_or_of_a_recording(monkeypatch: pytest.MonkeyPatch, recorded: Path) -> None:
    module = tool("compare")
    monkeypatch.setattr(module, "run_job", Jobs())
    folder = ["--folder", str(recorded / "runs"), "--json", str(recorded / "out.json")]
    for wrong in (["--mode", "replay"], ["--config", "a", "--run", "b"], ["--mode", "replay", "--config", "a"]):
        assert module.main([*wrong, *folder]) == 2
    assert module.main(["--config", str(ROOT / "examples/overlap_grpo.toml"), "--schedules", "sync,sync", *folder]) == 2
    names = "thundersync,thundersync+no_verifier"
    more = ["--mode", "replay", "--run", str(recorded), "--schedules", names, "--repeats", "2", "--verifier-s", "1.0"]
    assert module.main([*more, *folder]) == 0
    table = json.loads((recorded / "out.json").read_text())
    assert table["base"] == "thundersync" and len(table["verifier_hidden"]["thundersync"]["runs"]) == 2


@pytest.mark.parametrize("words", [("--repeats", "0"), ("--warmup", "-1")])
def test_a_comparison_of_no_update_ends_with_two(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    module = tool("compare")
    monkeypatch.setattr(module, "run_job", lambda *_, **__: pytest.fail("the job began"))
    out = ("--json", str(recorded / "out.json"))
    assert module.main(["--mode", "replay", "--run", str(recorded), *out, *words]) == 2
    assert " ".join(words) in capsys.readouterr().err


def test_a_stopped_comparison_keeps_the_rounds_that_all_schedules_have_ended_and_says_where(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, out = tool("compare"), recorded / "out.json"
    line = ["--mode", "replay", "--run", str(recorded), "--repeats", "4", "--json", str(out)]
    line += ["--folder", str(recorded / "runs")]

    def stopped_at(update: int, by: int = signal.SIGTERM) -> tuple[int, str]:
        monkeypatch.setattr(module, "run_job", Jobs(stopped=update, by=by))
        return module.main(line), " ".join(capsys.readouterr().err.split())

    assert stopped_at(11)[0] == 0
    found = json.loads(out.read_text())
    assert found["repeats"] == {"asked": 4, "measured": 2}, "blocks of two: s s t t | t t s s | s s t"
    assert {len(entry["step_wall_s"]["runs"]) for entry in found["schedules"].values()} == {2}
    status, said = stopped_at(11, signal.SIGINT)
    assert status == 130 and "stopped by SIGINT after 2 of 4" in said and str(out) in said
    status, said = stopped_at(3)
    assert status == 1 and "no measured update of thundersync" in said and "metrics.jsonl" in said
    monkeypatch.setattr(module, "compare", lambda *a, **b: pytest.fail("an older run's rows are none of this one"))

    def before_it_began(*_: object, **__: object) -> RunFolder:
        raise JobStopped(signal.SIGTERM, None)

    monkeypatch.setattr(module, "run_job", before_it_began)
    assert module.main(line) == 1 and "nothing was measured" in capsys.readouterr().err


def test_a_stopped_replay_concludes_nothing(
    monkeypatch: pytest.MonkeyPatch, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(monkeypatch, recorded, Jobs(stopped=1), "--check-against", "sync") == 1
    assert "stopped by SIGTERM: the replay is not complete" in capsys.readouterr().err
