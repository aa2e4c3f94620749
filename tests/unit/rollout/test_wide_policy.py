"""What benchmarks/bench_rollout.py measures with, what it refuses and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megathunder.errors import ConfigError, InfrastructureFailure

ROOT = Path(__file__).resolve().parents[3]
STUDENT = ROOT / "examples" / "policies" / "student"


@pytest.fixture
def wide_policy(monkeypatch):
    from benchmarks.rollout.wide import wide_policy

    return wide_policy


def test_it_has_the_shape_asked_for_the_tokenizer_given_and_the_same_weights_from_one_seed(wide_policy, tmp_path):
    models = [
        AutoModelForCausalLM.from_pretrained(wide_policy(tmp_path / name, STUDENT, hidden=256, layers=2))
        for name in ("a", "b")
    ]
    config = models[0].config
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (256, 2, 4096)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) <= config.vocab_size
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("hidden, layers", [(0, 2), (100, 2), (64, 2), (256, 0)])
def test_a_shape_that_no_server_could_run_is_refused(wide_policy, tmp_path, hidden, layers):
    with pytest.raises(ConfigError, match="multiple of 128 units"):
        wide_policy(tmp_path / "a", STUDENT, hidden=hidden, layers=layers)
    assert not (tmp_path / "a").exists()


@pytest.fixture
def bench(monkeypatch):
    """benchmarks/bench_rollout.py, in which no server starts."""
    from benchmarks import bench_rollout

    for module in bench_rollout.MEASUREMENTS.values():
        monkeypatch.setattr(module, "_measure", lambda _: pytest.fail("servers start"))
    return bench_rollout


REFUSED = [
    ("placement --groups 0", "--groups 0"),
    ("placement --group-size 0", "--group-size 0"),
    ("placement --rounds 0", "--rounds 0"),
    ("placement --observations 80 0", "--observations 0"),
    ("placement --observations -80", "--observations -80"),
    ("placement --in-flight 0", "--in-flight 0"),
    ("placement --seed -1", "--seed -1"),
    ("placement --cache-tokens 10", "a trace of 80 tokens or more with --observations 80, where a cache holds 10"),
    ("placement --cache-tokens 1371", "a trace of 1368 tokens or more with --observations 160"),
    ("placement --observations 600", "where the policy holds 4096"),
    (f"placement --model {STUDENT} --observations 300", "where the policy holds 2048"),
    ("placement --model nowhere", "--model"),
    ("speculation --concurrency 4 0", "--concurrency 0"),
    ("speculation --rounds 0", "--rounds 0"),
    ("speculation --tasks 0", "--tasks 0"),
    ("speculation --seconds nan", "--seconds nan"),
    ("speculation --model nowhere", "--model"),
]


@pytest.mark.parametrize(("words", "seen"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_cannot_be_measured_is_refused_before_a_server_starts(bench, tmp_path, capsys, words, seen):
    assert bench.main([*words.split(), "--json", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and seen in said.splitlines()[0] and "remedy:" in said


def test_a_trace_nobody_has_is_no_fresh_one(bench, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        bench.main(["speculation", "--traces", "stale", "--json", str(tmp_path / "out.json")])


def test_a_server_that_fails_ends_the_measurement_with_one_line(bench, tmp_path, capsys, monkeypatch):
    async def fails(_: object) -> None:
        raise InfrastructureFailure("no server is left")

    monkeypatch.setattr(bench.placement, "_measure", fails)
    assert bench.main(["placement", "--json", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().err == "error: no server is left\n"


def test_medians_gains_and_what_was_left_out_are_shown(bench, tmp_path, capsys, monkeypatch):
    async def measured(_: object) -> list[object]:
        spent = {"round_robin": 20.0, "cache_aware": 16.0}
        return [
            bench.placement.Row(observation_tokens=80, policy=name, round=n, wall_s=wall_s, cpu_s=2 * wall_s, turns=9,
                prompt_tokens=5000, computed_tokens=1234, turn_p50_s=1.0, turn_p95_s=2.0)
            for n in range(3) for name, wall_s in spent.items()
        ]  # fmt: skip

    monkeypatch.setattr(bench.placement, "_measure", measured)
    assert bench.main(["placement", "--observations", "80", "--json", str(tmp_path / "out.json")]) == 1
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if "│" in line]
    assert rows == [
        ["80", "wall, s; gain", "20.0", "16.0; 1.25"],
        ["", "server CPU, s; gain", "40.0", "32.0; 1.25"],
        ["", "prompt tokens computed, of 5,000", "1,234", "1,234"],
    ]
    assert "pip install --no-deps -r requirements/router.txt" in said
    assert "missed: gain over round_robin 1.25 at 80 tokens of observation: 1.4 wanted at 1 of these" in said
