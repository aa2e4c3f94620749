"""The comparison with another trainer: equal work, steps in turn, and what is concluded from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from benchmarks.peers.first_step import FirstStep, write_recording
from benchmarks.peers.own_config import own_config
from benchmarks.peers.policy import make_policy
from benchmarks.peers.prompts import ROWS, write_prompts
from benchmarks.peers.rewards import score, trl_score
from benchmarks.peers.trl_grpo import Side, summarise
from benchmarks.peers.workload import WORKLOADS, read_workload
from megathunder.config.checks import check_plan
from megathunder.errors import UserError
from megathunder.metrics.trajectories import read_trajectories
from megathunder.tasks import build_source

ROOT = Path(__file__).resolve().parents[3]
STEPS = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.peers.gate import append_step, wait_for_gate
name, out, order, steps = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
for step in range(steps):
    wait_for_gate(out / "gate", step)
    with order.open("a") as file:
        file.write(name)
    append_step(out / "steps", {{"tokens": 10}})
"""


def side(name: str, folder: Path, steps: int) -> Side:
    out = folder / name
    command = [sys.executable, "-c", STEPS, name, str(out), str(folder / "order"), str(steps)]
    return Side(name, command, out, out / "steps")


def test_sides_take_their_steps_in_the_order_in_which_they_are_let(tmp_path: Path) -> None:
    a, b = side("a", tmp_path, 3), side("b", tmp_path, 3)
    lines = [one.take_step() for one in (a, b, b, a, a, b)]
    for one in (a, b):
        one.end(at_once=False)
    assert (tmp_path / "order").read_text() == "abbaab"
    assert all(line["tokens"] == 10 and 0 < line["wall_s"] < 60 for line in lines)


def test_a_side_that_ends_early_is_named_with_its_log(tmp_path: Path) -> None:
    early = side("early", tmp_path, 1)
    early.take_step()
    with pytest.raises(UserError, match=r"early did not end step 1 \(exit status 0\)") as refused:
        early.take_step()
    assert refused.value.remedy.endswith("early.log")


def test_no_side_outlives_the_comparison(tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from benchmarks.peers.trl_grpo import Side; " + (
        "from pathlib import Path; out = Path(sys.argv[1]); "
        "side = Side('s', [sys.executable, '-c', 'import time; time.sleep(60)'], out, out / 'steps'); "
        "print(side._process.pid, flush=True); import time; time.sleep(60)"
    )
    tool = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True)
    child = psutil.Process(int(tool.stdout.readline()))
    tool.terminate()
    tool.wait(20)
    gone, _ = psutil.wait_procs([child], 20)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_ratios_leave_the_warm_up_out_and_the_best_of_both_counts() -> None:
    own = [{"wall_s": wall, "response_tokens_mean": 10.0, "trajectories": 4} for wall in (9.0, 1.0, 2.0)]
    trl = [{"wall_s": wall, "tokens": 80} for wall in (1.0, 4.0, 4.0)]
    onednn = [{"wall_s": wall, "tokens": 80} for wall in (1.0, 3.0, 6.0)]
    found = summarise({"own": own, "trl": trl, "trl_onednn": onednn})
    assert found["ratio"] == {"median": 3.0, "runs": [4.0, 2.0]}
    assert found["ratio_with_onednn"]["runs"] == [3.0, 3.0] and found["ratio_to_best"]["runs"] == [3.0, 2.0]
    assert found["ratio_per_token"]["runs"] == [2.0, 1.0]


def test_the_first_step_agrees_within_its_tolerance_and_not_beyond() -> None:
    assert FirstStep(loss=(0.1, 0.1003), grad_norm=(1.0, 1.00009), scale=5.0).agrees
    assert not FirstStep(loss=(0.1, 0.101), grad_norm=(1.0, 1.0), scale=5.0).agrees
    assert not FirstStep(loss=(0.1, 0.1), grad_norm=(1.0, 1.0002), scale=5.0).agrees


@pytest.fixture(scope="module")
def varying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("varying")
    make_policy(folder / "policy", WORKLOADS["varying"])
    write_prompts(folder / "prompts.jsonl", folder / "policy", WORKLOADS["varying"])
    return folder


def test_the_policy_ends_a_completion_as_often_as_the_workload_wants(varying: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(varying / "policy").eval()
    contexts = torch.randint(8, model.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        drawn = model(contexts).logits.double().softmax(-1)[..., model.config.eos_token_id].mean()
    assert float(drawn) == pytest.approx(WORKLOADS["varying"].end_probability, rel=0.1)
    assert 10.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 11.5e6


def test_our_side_reads_the_prompts_that_the_other_side_reads(varying: Path) -> None:
    workload = WORKLOADS["varying"]
    config = own_config(varying, workload, updates=2)
    check_plan(config, ranks=1)
    rows = [json.loads(line)["prompt"] for line in (varying / "prompts.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(varying / "policy")
    lengths = [len(tokenizer.apply_chat_template(row, add_generation_prompt=True)["input_ids"]) for row in rows]
    assert len(rows) == ROWS and all(abs(length - workload.prompt_tokens) <= 8 for length in lengths)
    assert {task.row["prompt"][0]["content"] for task in build_source(config.tasks).take(8)} <= {
        row[0]["content"] for row in rows
    }
    workload.write(varying / "workload.json")
    assert read_workload(varying / "workload.json") == workload


def test_both_rewards_are_one() -> None:
    texts = ["", "a", "ab", "abc"]
    messages = [[{"role": "assistant", "content": text}] for text in texts]
    assert trl_score(messages) == trl_score(texts) == [score(text, {}, None) for text in texts] == [1.0, 0.0, 1.0, 0.0]


def test_a_recorded_first_step_has_its_groups_side_by_side(tmp_path: Path) -> None:
    config = own_config(tmp_path, WORKLOADS["fixed"], updates=1)
    kept = [{"prompt": [1], "completion": [number], "reward": float(number % 2)} for number in range(16)]
    write_recording(tmp_path / "recorded", config, kept)
    records = list(read_trajectories(tmp_path / "recorded" / "trajectories" / "update_00000.jsonl"))
    assert [(record.id.group, record.id.index) for record in records] == [divmod(n, 8) for n in range(16)]
    assert [record.reward for record in records] == [float(n % 2) for n in range(16)]
