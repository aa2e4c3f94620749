"""Laws of the generated shell tasks."""

from __future__ import annotations

import random

from megathunder.config.tasks import TasksConfig
from megathunder.tasks import ExactAnswer, build_source
from megathunder.tasks.shell import job_latency_s


def test_answer_of_a_job_lies_in_no_file() -> None:
    for task in build_source(TasksConfig(kinds=("job",), size=200)).take(200):
        assert isinstance(task.grading, ExactAnswer)
        words = " ".join(f.content for f in task.files if f.path.startswith(".queue")).split()
        assert task.grading.answer not in words


def test_job_latency_has_a_long_capped_tail() -> None:
    rng = random.Random(0)
    drawn = sorted(job_latency_s(rng) for _ in range(20000))
    assert 0.04 < drawn[10000] < 0.06
    assert 0.4 < drawn[19000] < 0.6
    assert drawn[-1] == 2.0


def test_latency_scale_zero_removes_waiting() -> None:
    for task in build_source(TasksConfig(kinds=("job",), size=50, latency_scale=0.0)).take(50):
        assert task.files[1].content.split()[0] == "0"


def test_tasks_can_be_solved_within_their_turns() -> None:
    for turns in (2, 3, 6):
        for task in build_source(TasksConfig(kinds=("job", "chase"), size=200, max_turns=turns)).take(200):
            assert task.max_turns == turns
            if task.kind == "job":
                assert int(task.files[1].content.split()[1]) + 2 <= turns
            else:
                assert sum(f.content.startswith("go ") for f in task.files) + 2 <= turns
