"""One or two cells that pull work from a common queue take the same update."""

import json

import pytest

from tests.equality import worlds
from tests.equality.jobs import run_job


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return worlds.write_model(tmp_path_factory.mktemp("model"))


def job(folder, out, cases, ranks, **settings):
    """Results [case][rank] of a job of `ranks` processes."""
    run_job("tests.equality.cells", [folder, out, cases, *(f"{k}={v}" for k, v in settings.items())], ranks)
    return json.loads(out.read_text())


@pytest.mark.parametrize("settings", [{"dtype": "float64"}, {"distributed_optimizer": "true"}])
def test_two_cells_that_pull_work_take_the_barrier_update(folder, tmp_path, settings):
    results = job(folder, tmp_path / "out.json", 14, 2, **settings)
    limit = 1e-12 if settings.get("dtype") == "float64" else 1e-5
    differences = [rank["difference"] for case in results for rank in case if "difference" in rank]
    if "distributed_optimizer" in settings:
        # Each rank holds the sum over its own half of the buffer only; the step is compared below.
        differences = [0.0]
    assert differences and max(differences) < limit
    assert all(case[0]["digest"] == case[1]["digest"] for case in results)
    assert sum(case[0]["taken"] + case[1]["taken"] for case in results) == sum(case[0]["units"] for case in results)
    assert all(sum(rank["taken"] for rank in results[c]) for c in range(len(results)))


def test_exact_sums_publish_the_same_bytes_from_one_and_from_two_cells(folder, tmp_path):
    one = job(folder, tmp_path / "one.json", 8, 1, accumulator="exact")
    two = job(folder, tmp_path / "two.json", 8, 2, accumulator="exact")
    for alone, pair in zip(one, two, strict=True):
        assert alone[0]["digest"] == pair[0]["digest"] == pair[1]["digest"]
    assert any(case[0]["taken"] and case[1]["taken"] for case in two)


def test_the_sharded_optimizer_takes_the_same_steps(folder, tmp_path):
    plain = job(folder, tmp_path / "plain.json", 6, 1, accumulator="exact")
    sharded = job(folder, tmp_path / "sharded.json", 6, 2, accumulator="exact", distributed_optimizer="true")
    for a, b in zip(plain, sharded, strict=True):
        assert a[0]["grad_norm"] == pytest.approx(b[0]["grad_norm"], rel=1e-6)
        assert b[0]["digest"] == b[1]["digest"]
