"""Something dies in the middle of an update: what can recover does, what cannot ends clearly, nothing is left over."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from jobs import STOPPABLE, Job, job

from megathunder.checkpoint.folder import newest
from megathunder.checkpoint.state import read_state

SLOW = {"tasks.latency_scale": 3.0}  # an update takes seconds, so that it has a middle
LIMIT_S = 45.0


@pytest.fixture(scope="module")
def survived(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of four updates whose server and whose sandboxes were killed on the way; its servers
    draft from earlier trajectories."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {"run.updates": 4, "run.checkpoint_every": 1, "run.keep_checkpoints": 4}
    settings["rollout.speculation"] = "suffix"
    with job(folder, "survivor", **settings, **SLOW) as running:
        running.wait_for_update(1)
        running.named("sglang.launch_server")[0].kill()
        running.wait_for_update(2)
        for sandbox in running.named("bwrap")[::2]:
            sandbox.kill()
        assert running.end(150.0) == 0, running.output()
        assert "is back (start 1)" in running.output()
        assert not running.orphans()
    return running.run


def trajectories(run: Path, update: int) -> list[dict]:
    lines = (run / "trajectories" / f"update_{update:05d}.jsonl").read_text().splitlines()
    return sorted((json.loads(line) for line in lines), key=lambda t: t["id"])


def tokens(trajectory: dict) -> list[int]:
    return [t for row in trajectory["trajectory"]["rows"] for s in row["segments"] for t in s["token_ids"]]


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_killed_server_and_killed_sandboxes_lose_nothing_and_count_nothing_twice(survived: Path) -> None:
    found = rows(survived)
    assert [row["update"] for row in found] == [0, 1, 2, 3]
    for row in found:
        assert row["contributions_applied"] + row["contributions_dropped"] == 12
        assert set(row["dropped_by_reason"]) <= {"equal_rewards"}
        assert row["policy_lag_max"] == 0 and row["engine_learner_logprob_diff_max"] < 1e-4
        mine = trajectories(survived, row["update"])
        assert len(mine) == 12 and len({str(t["id"]) for t in mine}) == 12
    # The counts of a server that dies after the last token of an update die with it.
    told = [row for row in found if row["speculation_accept_length"] is not None]
    assert len(told) >= 3
    assert all(row["speculation_accept_length"] >= 1 and 0 <= row["speculation_off_share"] <= 1 for row in told)


def test_a_run_leaves_its_policy_for_people_to_use(survived: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(survived / "policy")
    assert AutoTokenizer.from_pretrained(survived / "policy").eos_token_id is not None
    assert sum(p.numel() for p in model.parameters()) > 600_000


def test_a_resumed_run_skips_a_truncated_checkpoint_and_takes_the_same_prompts(survived: Path, tmp_path: Path) -> None:
    run = shutil.copytree(survived, tmp_path / "survivor")
    shutil.rmtree(run / "checkpoints" / "update_00004")
    shard = next((run / "checkpoints" / "update_00003" / "learner").glob("*.distcp"))
    os.truncate(shard, shard.stat().st_size // 2)
    assert read_state(newest(run / "checkpoints", lambda _: None)).update == 2
    with job(tmp_path, "survivor", **{"run.updates": 4, "run.resume": "true"}, **SLOW) as running:
        assert running.end(120.0) == 0, running.output()
        assert "update_00003 is skipped" in running.output()
    assert [row["update"] for row in rows(run)] == [0, 1, 2, 3]
    assert [row["policy_version"] for row in rows(run)] == [row["policy_version"] for row in rows(survived)]
    for update in (2, 3):
        before, after = trajectories(survived, update), trajectories(run, update)
        assert [t["trajectory"]["task_id"] for t in before] == [t["trajectory"]["task_id"] for t in after]
    # The same weights, prompts and seeds sample the same tokens; another batch in the engine may tip one over.
    pairs = zip(trajectories(survived, 2), trajectories(run, 2), strict=True)
    assert sum(tokens(a) == tokens(b) for a, b in pairs) >= 10


def killed(running: Job, victim: int, word: str, limit_s: float = LIMIT_S) -> None:
    """Kill process `victim`; the job ends with an error that has `word`, in time, and nothing of it is left."""
    running.family()
    os.kill(victim, signal.SIGKILL)
    started_s = time.monotonic()
    status = running.end(limit_s)
    output = running.output()
    assert status not in (0, None) and word in output, output
    print(f"ended {time.monotonic() - started_s:.1f} s after the kill, status {status}")
    assert not running.orphans(), output


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_learner_rank_ends_the_job_clearly_and_leaves_nothing(tmp_path: Path, rank: int) -> None:
    with job(tmp_path, "ranks", ranks=2, **{"run.updates": 50}, **SLOW) as running:
        running.wait_for_update(1)
        word = "rank 0 has died" if rank == 0 else "error: learner cell"
        killed(running, running.rank(rank).pid, word)


def test_a_killed_coordinator_ends_the_job_clearly_and_leaves_nothing(tmp_path: Path) -> None:
    with job(tmp_path, "coordinator", **{"run.updates": 50}, **SLOW) as running:
        running.wait_for_update(1)
        killed(running, running.named("megathunder.coordinator.process")[0].pid, "error: the coordinator was ended")
        assert "for want of memory" in running.output() and "no checkpoint was saved" in running.output()


@pytest.mark.parametrize("ranks", [0, 2])
def test_sigterm_before_the_first_update_ends_well_and_says_that_nothing_was_trained(
    tmp_path: Path, ranks: int
) -> None:
    with job(tmp_path, "early", ranks=ranks, launcher=STOPPABLE) as running:
        running.wait_for(lambda: running.named("sglang.launch_server"))
        running.process.send_signal(signal.SIGTERM)
        assert running.end(LIMIT_S) == 0, running.output()
        assert f"nothing was trained; run folder: {running.run}" in running.output()
        assert "Traceback" not in running.output() and not running.orphans()


@pytest.mark.parametrize(
    ("number", "status", "ranks"), [(signal.SIGINT, 130, 0), (signal.SIGINT, 130, 2), (signal.SIGTERM, 0, 2)]
)
def test_a_signal_ends_the_run_cleanly_and_sigterm_saves_it(
    tmp_path: Path, number: int, status: int, ranks: int
) -> None:
    every = int(number == signal.SIGTERM)  # so that one may be on its way
    settings = {"run.updates": 50, "run.checkpoint_every": every} | SLOW
    with job(tmp_path, "signal", ranks=ranks, launcher=STOPPABLE, **settings) as running:
        running.wait_for_update(1)
        running.process.send_signal(number)
        assert running.end(LIMIT_S) == status, running.output()
        assert not running.orphans()
        assert "Traceback" not in running.output()
    saved = newest(running.run / "checkpoints", pytest.fail)
    if number == signal.SIGTERM:
        assert read_state(saved).update == len(running.rows()) >= 1
        assert "--run.resume" in running.output()
    else:
        assert saved is None


def test_gradients_that_stay_infinite_stop_the_run_at_its_last_good_checkpoint(tmp_path: Path) -> None:
    limits = {"run.updates": 50, "run.checkpoint_every": 1, "learner.max_bad_updates": 2}
    overflow = {"loss.normalisation": "constant", "loss.constant": 1e-40}
    with job(tmp_path, "bad", **limits, **overflow) as running:
        assert running.end(90.0) == 1
        output = running.output()
        assert not running.orphans()
    skipped = [row for row in running.rows() if "not finite" in row["skip_reason"]]
    assert len(skipped) == 1, output
    assert "2 updates in a row without a finite gradient: gradient is not finite in embedding." in output, output
    assert "Lower learner.learning_rate, or raise learner.max_bad_updates" in output and "Traceback" not in output
    (unfinished,) = map(json.loads, (running.run / "unfinished_updates.jsonl").read_text().splitlines())
    assert unfinished["update"] == len(running.rows()) and unfinished["trajectories_completed"] == 12
    assert unfinished["phase"] == "step" and "updates in a row without a finite gradient" in unfinished["reason"]
    saved = newest(running.run / "checkpoints", pytest.fail)
    assert read_state(saved).update == len(running.rows())
    assert f"the last checkpoint is {saved}; --run.resume goes on from it" in output, output
