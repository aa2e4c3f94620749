"""Conversion to Megatron rank files and back, through the command line's own functions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from examples.policies.build.tiny import MIXTURES, TINY, make_tiny
from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.weights.convert_folder import FileLayout, to_hf, to_megatron
from megathunder.learner.model.weights.hf_files import HfReader
from megathunder.learner.parallel import initialize

TOOL = Path(__file__).resolve().parents[3] / "tools" / "convert.py"


@pytest.mark.parametrize("name", TINY)
def test_every_layout_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    source = make_tiny(name, tmp_path / "hf")
    for layout in (
        FileLayout(),
        FileLayout(tensor=2, pipeline=2),
        FileLayout(tensor=2, pipeline=4, expert=2 if name in MIXTURES else 1),
    ):
        folder = tmp_path / f"{layout.tensor}{layout.pipeline}{layout.expert}"
        to_megatron(source, folder / "megatron", layout)
        to_hf(folder / "megatron", folder / "hf", file_bytes=150_000)
        before, after = HfReader(source), HfReader(folder / "hf")
        assert set(before.names) == set(after.names)
        assert all(torch.equal(before.read(n), after.read(n)) for n in before.names)


def test_rank_file_is_the_state_dict_of_the_model(tmp_path: Path) -> None:
    config = LearnerConfig(device="cpu")
    source = make_tiny("glm4_moe", tmp_path / "hf")
    to_megatron(source, tmp_path / "megatron", FileLayout())
    file = load_file(tmp_path / "megatron" / "pp0_tp0_ep0.safetensors")
    state = build_model(config, initialize(config), folder=source).stages[0].state_dict()
    tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
    assert file.keys() == tensors.keys()
    assert all(torch.equal(file[name], tensors[name]) for name in file)


def test_layout_that_does_not_split_the_model_is_refused(tmp_path: Path) -> None:
    source = make_tiny("qwen3", tmp_path / "hf")
    for layout, complaint in (
        (FileLayout(tensor=8), "4 key/value heads over --tensor 8"),
        (FileLayout(pipeline=3), "4 layers over --pipeline 3"),
        (FileLayout(expert=2), "0 experts over --expert 2"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            to_megatron(source, tmp_path / "out", layout)


def test_missing_rank_file_is_named(tmp_path: Path) -> None:
    to_megatron(make_tiny("llama", tmp_path / "hf"), tmp_path / "megatron", FileLayout(tensor=2))
    (tmp_path / "megatron" / "pp0_tp1_ep0.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no pp0_tp1_ep0\.safetensors"):
        to_hf(tmp_path / "megatron", tmp_path / "back")


def test_command_line_converts_and_refuses_in_words(tmp_path: Path) -> None:
    source = make_tiny("qwen3_tied", tmp_path / "hf")
    command = [sys.executable, str(TOOL), "to-megatron", "--source", str(source), "--target", str(tmp_path / "out")]
    first = subprocess.run([*command, "--tensor", "2"], capture_output=True, text=True, timeout=60, check=False)
    again = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert first.returncode == 0
    assert "peak memory" in first.stdout
    assert again.returncode == 2 and "already holds weights" in again.stderr and "Traceback" not in again.stderr


PEAK = """
import resource, sys
from pathlib import Path
from megathunder.learner.model.weights.convert_folder import FileLayout, to_hf, to_megatron

def convert(source):
    to_megatron(Path(source), Path(source + "_megatron"), FileLayout(pipeline=8 if "large" in source else 1))
    to_hf(Path(source + "_megatron"), Path(source + "_back"), file_bytes=12 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

print(convert(sys.argv[1]), convert(sys.argv[2]))
"""


def test_a_conversion_holds_about_one_file_whatever_the_size_of_the_model(tmp_path: Path) -> None:
    tiny, large = make_tiny("llama", tmp_path / "tiny"), tmp_path / "large"
    config = json.loads((tiny / "config.json").read_text())
    config |= {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.save_pretrained(large, max_shard_size="12MB")
    size, files = sum(f.stat().st_size for f in large.glob("*.safetensors")), list(large.glob("*.safetensors"))
    assert size > 80 << 20 and len(files) > 7
    command = [sys.executable, "-W", "ignore", "-c", PEAK, str(tiny), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd=TOOL.parents[1])
    before, after = map(int, done.stdout.split())
    assert after - before < size / 2, (before, after, size)
    back = load_file(next((tmp_path / "large_back").glob("*.safetensors")))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in back.items())
