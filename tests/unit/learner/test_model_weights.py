"""Weights: layouts are inverse to each other, files are streamed, and what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from examples.policies.build.tiny import make_tiny
from megathunder.config.learner import LearnerConfig
from megathunder.errors import ConfigError
from megathunder.learner.model.build_model import build_model
from megathunder.learner.model.families.rules import Kind
from megathunder.learner.model.weights import export_tensors, export_weights, save_hf
from megathunder.learner.model.weights.hf_files import HfReader, HfWriter
from megathunder.learner.model.weights.layouts import Dimensions, merge, shard, split, unshard
from megathunder.learner.parallel import initialize

CPU = LearnerConfig(device="cpu")
DIMS = Dimensions(groups=4, heads=2, head=3, vocab=11, padded_vocab=12)
SHAPES = {
    Kind.WHOLE: [(5,)],
    Kind.COLUMN: [(8, 5)],
    Kind.ROW: [(5, 8)],
    Kind.QKV: [(24, 5), (12, 5), (12, 5)],
    Kind.GATE_UP: [(8, 5), (8, 5)],
    Kind.VOCAB: [(11, 5)],
}


@given(kind=st.sampled_from(list(Kind)), size=st.sampled_from([1, 2, 4]), seed=st.integers(0, 9))
def test_shards_of_every_kind_come_back_bit_for_bit(kind: Kind, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=generator) for shape in SHAPES[kind]]
    full = merge(kind, parts, DIMS)
    shards = [shard(kind, full, rank, size) for rank in range(1 if kind is Kind.WHOLE else size)]
    back = split(kind, unshard(kind, shards), DIMS)
    assert all(torch.equal(a, b) for a, b in zip(parts, back, strict=True))


def test_qkv_puts_each_group_together() -> None:
    q, k, v = torch.arange(24.0)[:, None], 100 + torch.arange(12.0)[:, None], 200 + torch.arange(12.0)[:, None]
    first_group = merge(Kind.QKV, [q, k, v], DIMS)[:12, 0].tolist()
    assert first_group == [0, 1, 2, 3, 4, 5, 100, 101, 102, 200, 201, 202]


def test_gate_and_up_of_one_rank_lie_together() -> None:
    gate, up = torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]
    assert shard(Kind.GATE_UP, merge(Kind.GATE_UP, [gate, up], DIMS), 1, 2)[:, 0].tolist() == [2, 3, 12, 13]


def test_saved_folder_is_the_loaded_one(tmp_path: Path) -> None:
    source = make_tiny("glm4_moe", tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    bundle = build_model(CPU, initialize(CPU), folder=source)
    save_hf(bundle, tmp_path / "saved", file_bytes=100_000)
    before, after = HfReader(source), HfReader(tmp_path / "saved")
    assert set(before.names) == set(after.names)
    assert all(torch.equal(before.read(n), after.read(n)) for n in before.names)
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"
    assert len(list((tmp_path / "saved").glob("model-*-of-*.safetensors"))) > 1
    assert not list((tmp_path / "saved").glob("*.tmp"))


def test_transformers_reads_the_saved_folder(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = make_tiny("qwen3_moe", tmp_path / "source")
    save_hf(build_model(CPU, initialize(CPU), folder=source), tmp_path / "saved", file_bytes=200_000)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(tmp_path / f)(ids).logits for f in ("source", "saved")]
    assert torch.equal(*logits)


def test_experts_are_exported_one_by_one(tmp_path: Path) -> None:
    bundle = build_model(CPU, initialize(CPU), folder=make_tiny("qwen3_moe", tmp_path))
    names = [name for name, _ in export_weights(bundle)]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert "model.layers.3.mlp.experts.2.gate_proj.weight" in names
    assert len(names) == len(set(names))


def test_fused_experts_are_read_like_single_ones(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path)
    wanted = dict(export_weights(build_model(CPU, initialize(CPU), folder=folder)))
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 2, 3):
        prefix = f"model.layers.{layer}.mlp.experts"

        def take(part: str, prefix: str = prefix) -> list[torch.Tensor]:
            return [tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(4)]

        gate_up = [torch.cat(pair) for pair in zip(take("gate"), take("up"), strict=True)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}.down_proj"] = torch.stack(take("down"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    got = dict(export_weights(build_model(CPU, initialize(CPU), folder=folder)))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[n], wanted[n]) for n in wanted)


def test_gradients_travel_under_hugging_face_names(tmp_path: Path) -> None:
    bundle = build_model(CPU, initialize(CPU), folder=make_tiny("glm4_moe", tmp_path))
    doubled = export_tensors(bundle, lambda p: p.data.double() * 2, dtype=torch.float64, buffers=False)
    twice, once = dict(doubled), dict(export_weights(bundle))
    assert once.keys() - twice.keys() == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2, 3)}
    assert all(torch.equal(twice[n], once[n].double() * 2) for n in twice)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        build_model(CPU, initialize(CPU), folder=folder)


def test_tensor_that_no_rule_names_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.mlp\.extra\.weight"):
        build_model(CPU, initialize(CPU), folder=folder)


def test_misshapen_tensor_is_named(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight .* gives \(192, 64\) where"):
        build_model(CPU, initialize(CPU), folder=folder)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        build_model(CPU, initialize(CPU), folder=folder)


def test_writer_keeps_files_below_their_limit(tmp_path: Path) -> None:
    writer = HfWriter(tmp_path, file_bytes=1000)
    for number in range(5):
        writer.write(f"t{number}", torch.full((100,), float(number)))  # 400 bytes each
    writer.close()
    sizes = []
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            sizes.append(len(list(file.keys())))
    assert sizes == [2, 2, 1]
    assert HfReader(tmp_path).read("t3").tolist() == [3.0] * 100
