"""One table: the streamed update of every parallel layout against the one-process barrier update.

    python -m pytest -s tests/equality/test_parallel_streaming.py      prints it and writes build/parallel_table.json

A line compares, as relative norms, the reduced gradient, the weights' change, the gradient norm and the loss. `counted
once`: trained tokens, computed tokens and operations are those of one process. A sharded optimizer holds a part of the
reduced gradient only, so there the weights' change is what is compared.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from examples.policies.build.tiny import make_tiny
from tests.equality import worlds
from tests.equality.jobs import run_job

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 1e-5
TP2, PP2, SP, EP2 = "tensor_parallel=2", "pipeline_parallel=2", "sequence_parallel=true", "expert_parallel=2"
CP2, SHARDED, VPP2 = "context_parallel=2", "distributed_optimizer=true", "virtual_pipeline=2"

# (layout, models, modes, settings) by number of processes
LAYOUTS = {
    1: [
        ("one", "dense", "grpo opd exact lora kl", ""),
        ("one", "mixture", "grpo opd exact lora", ""),
        ("one", "uneven", "grpo", ""),
    ],
    2: [
        ("tp2", "dense", "grpo opd exact lora kl", TP2),
        ("tp2 sp", "dense", "grpo opd lora", f"{TP2},{SP}"),
        ("pp2", "dense", "grpo opd lora kl", PP2),
        ("pp2", "uneven", "grpo", PP2),
        ("pp2 vpp2", "dense", "grpo opd", f"{PP2},{VPP2}"),
        ("cp2", "dense", "grpo opd", CP2),
        ("dp2", "dense", "grpo opd exact lora bad", ""),
        ("dp2 sharded", "dense", "grpo opd exact lora bad", SHARDED),
        ("tp2", "dense", "bad resumed", TP2),
        ("pp2", "dense", "bad", PP2),
        ("ep2", "mixture", "grpo opd exact lora bad resumed idle", EP2),
        ("dp2", "mixture", "exact", ""),
        ("dp2 shards2", "dense", "grpo exact kl", "accumulator_shards=2"),
        ("cp2 shards2", "dense", "grpo", f"{CP2},accumulator_shards=2"),
        ("ep2 shards2", "mixture", "grpo exact", f"{EP2},accumulator_shards=2"),
        ("tp2 sp etp2", "mixture", "grpo", f"{TP2},{SP}"),
    ],
    4: [
        ("tp2 pp2", "dense", "grpo opd", f"{TP2},{PP2}"),
        ("tp2 dp2", "dense", "grpo exact", TP2),
        ("dp4", "dense", "grpo exact", ""),
        ("dp4 shards4", "dense", "grpo exact", "accumulator_shards=4"),
        ("ep2 dp2 shards4", "mixture", "exact", f"{EP2},accumulator_shards=4"),
        ("cp2 pp2", "dense", "grpo", f"{CP2},{PP2}"),
        ("ep2 dp2", "mixture", "grpo opd exact", EP2),
        ("pp2 ep2", "mixture", "grpo opd", f"{PP2},{EP2}"),
        ("tp2 sp ep2 etp2", "mixture", "grpo", f"{TP2},{SP},{EP2},expert_tensor_parallel=2"),
    ],
}  # fmt: skip
BARRIERS = ["dense/grpo", "dense/opd", "dense/lora", "mixture/grpo", "mixture/opd", "mixture/lora", "uneven/grpo"]


def entries(processes):
    """What a job of `processes` ranks is asked for."""
    found = [f"barrier/{one}" for one in BARRIERS] if processes == 1 else []
    for name, model, modes, settings in LAYOUTS[processes]:
        found += [f"{name.replace(' ', '_')}/{model}/{mode}/{settings}" for mode in modes.split()]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """(layout, model, mode) -> tensors, of every job."""
    folders, out = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("out")
    make_tiny("qwen3_tied", folders / "dense")
    make_tiny("qwen3_moe", folders / "mixture")
    (folders / "uneven").symlink_to(ROOT / "examples" / "policies" / "student")  # 3 layers
    for processes in LAYOUTS:
        run_job("tests.equality.parallel", [folders, out, *entries(processes)], processes)
    return {tuple(file.name.split(".")[:3]): load_file(file) for file in out.glob("*.safetensors")}


def of(tensors, prefix):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def lines(results):
    """One dictionary a layout, model and mode."""
    for processes, layouts in LAYOUTS.items():
        for name, model, modes, _ in layouts:
            for mode in modes.split():
                if mode not in ("bad", "resumed", "idle", "kl"):
                    yield line(results, processes, name, model, mode)


def line(results, processes, name, model, mode):
    got = results[name.replace(" ", "_"), model, mode]
    want = results["barrier", model, "grpo" if mode == "exact" else mode]
    one = results["one", model, mode]
    gradient = of(want, "gradient.")
    counts = () if mode == "exact" else ("stat.trained", "stat.tokens", "stat.flops")  # another order takes other ways
    return {
        "processes": processes,
        "layout": name,
        "model": model,
        "mode": mode,
        "gradient": None if "sharded" in name else worlds.largest_difference(got, gradient),
        "update": worlds.largest_difference(got, of(want, "update.")),
        "norm": abs(float(got["stat.norm"] / want["stat.norm"]) - 1.0),
        "loss": 0.0 if mode == "exact" else abs(float(got["stat.loss"] / one["stat.loss"]) - 1.0),
        "counted once": all(torch.equal(got[n], one[n]) for n in counts),
    }


def show(table):
    head = ("processes", "layout", "model", "mode", "gradient", "update", "norm", "loss", "counted once")
    text = ["  ".join(f"{name:>12}" for name in head)]
    for one in table:
        cells = [f"{one[n]:.1e}" if isinstance(one[n], float) else "" if one[n] is None else one[n] for n in head]
        text.append("  ".join(f"{cell!s:>12}" for cell in cells))
    return "\n".join(text)


def test_the_streamed_update_of_every_layout_equals_the_one_process_barrier_update(results):
    table = list(lines(results))
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "parallel_table.json").write_text(json.dumps(table, indent=1) + "\n")
    print("\n" + show(table))
    for one in table:
        assert max(one[n] or 0.0 for n in ("gradient", "update", "norm", "loss")) < LIMIT, one
        assert one["counted once"], one


@pytest.mark.parametrize(
    ("model", "whole", "split"),
    [
        ("dense", "one", "dp2"),
        ("dense", "one", "dp2 sharded"),
        ("dense", "one", "dp4"),
        ("dense", "tp2", "tp2 dp2"),
        ("dense", "one", "dp2 shards2"),
        ("dense", "one", "dp4 shards4"),
        ("mixture", "ep2", "ep2 shards2"),
        ("mixture", "ep2", "ep2 dp2 shards4"),
        ("mixture", "one", "dp2"),
        ("mixture", "ep2", "ep2 dp2"),
    ],
)
def test_exact_sums_publish_the_same_bytes_however_cells_split_the_work(results, model, whole, split):
    digests = [results[name.replace(" ", "_"), model, "exact"]["digest"] for name in (whole, split)]
    assert torch.equal(*digests)


@pytest.mark.parametrize(
    ("layout", "model"),
    [("dp2", "dense"), ("dp2_sharded", "dense"), ("tp2", "dense"), ("pp2", "dense"), ("ep2", "mixture")],
)
def test_a_nan_on_one_rank_is_skipped_and_named_by_all_and_the_third_stops_the_run(results, layout, model):
    laws = results[layout, model, "bad"]
    assert all(bool(held.all()) for held in laws.values()), {n: h.tolist() for n, h in laws.items()}


@pytest.mark.parametrize(("layout", "model"), [("tp2", "dense"), ("ep2", "mixture")])
def test_sharded_adapters_go_on_from_a_checkpoint_that_holds_nothing_else(results, layout, model):
    laws = results[layout, model, "resumed"]
    assert all(bool(held.all()) for held in laws.values()), {n: h.tolist() for n, h in laws.items()}


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2_shards2"])
def test_the_reference_is_the_same_policy_in_every_layout(results, layout):
    """The frozen copy is swapped in where the policy lies: no process group of its own."""
    one, other = results["one", "dense", "kl"], results[layout, "dense", "kl"]
    for part in ("gradient.", "update."):
        assert worlds.largest_difference(of(other, part), of(one, part)) < LIMIT
    plain = results["one", "dense", "grpo"]
    assert worlds.largest_difference(of(one, "gradient."), of(plain, "gradient.")) > 0.01, "the term is there"


def test_tied_replicas_of_25_and_10_tokens_make_three_passes_each(results):
    seen = {name: tensor.tolist() for name, tensor in results["ep2", "mixture", "idle"].items()}
    assert seen == {"passes": [3, 3], "longest": [10, 10], "tokens": [25, 10]}


@pytest.mark.parametrize(
    ("model", "whole", "sharded"),
    [
        ("dense", "dp2", "dp2 shards2"),
        ("dense", "dp4", "dp4 shards4"),
        ("dense", "cp2", "cp2 shards2"),
        ("mixture", "ep2", "ep2 shards2"),
    ],
)
def test_the_sharded_update_is_the_unsharded_one_to_a_millionth(results, model, whole, sharded):
    one, other = (results[name.replace(" ", "_"), model, "grpo"] for name in (whole, sharded))
    assert worlds.largest_difference(of(other, "gradient."), of(one, "gradient.")) < 1e-6
    assert worlds.largest_difference(of(other, "update."), of(one, "update.")) < 1e-6


@pytest.mark.parametrize(("layout", "mode", "ways"), [("dp2_shards2", "grpo", 2), ("dp4_shards4", "grpo", 4)])
def test_a_rank_holds_its_part_of_each_accumulator(results, layout, mode, ways):
    seen, plain = results[layout, "dense", mode], results["one", "dense", mode]
    each = -(-float(seen["stat.buffer"]) // ways)
    scratch = float(seen["stat.buffer"])
    held = float(plain["stat.accumulator_elements"]) / float(plain["stat.buffer"])  # whole accumulators, unsharded
    assert float(seen["stat.accumulator_elements"]) == scratch + held * each


def test_adapters_alone_are_trained_and_accumulated(results):
    full, low = results["one", "dense", "grpo"], results["one", "dense", "lora"]
    assert all(".lora_" in name for name in of(low, "update."))
    assert float(low["stat.trainable"]) < 0.2 * float(full["stat.trainable"])
    assert float(low["stat.buffer"]) < 0.2 * float(full["stat.buffer"])
