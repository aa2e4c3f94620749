"""Hugging Face folders to folders of Megatron rank files and back, without building a model or a process group.

    megatron folder:  layout.json  config.json  tokenizer...  pp0_tp0_ep0.safetensors  pp0_tp1_ep0.safetensors ...

A rank file holds the state dict of that rank's GPTModel (its own names, layers counted within the stage), so
`model.load_state_dict(load_file(path), strict=False)` reads it. Tensors are read one at a time; one file is in memory
at most. Called by tools/convert.py. Refuses layouts that do not split the model and folders that are incomplete.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megathunder.config.model_families import family_of
from megathunder.config.model_shape import read_config_json
from megathunder.errors import ConfigError
from megathunder.learner.model.families.rules import Kind
from megathunder.learner.model.weights import layouts
from megathunder.learner.model.weights.hf_files import HfReader, HfWriter, OpenFiles, copy_description
from megathunder.learner.model.weights.names import EMBEDDING, EXPERT, LAYER, OUTPUT, Named, refuse_unnamed, resolve

LAYOUT = "layout.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """How a Megatron folder is split: sizes of tensor, pipeline and expert parallelism."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What config.json and the stored names say of the model."""

    hf: dict[str, Any]
    parameters: tuple[Named, ...]
    dims: layouts.Dimensions
    layers: int
    experts: int

    def stage_of(self, named: Named, pipeline: int) -> int:
        if (layer := LAYER.search(named.megatron)) is not None:
            return int(layer[0]) // (self.layers // pipeline)
        return 0 if named.megatron == EMBEDDING else pipeline - 1


def to_megatron(source: Path, target: Path, layout: FileLayout) -> int:
    """Write `source` (Hugging Face) as rank files of `layout` to `target`; returns the number of parameters."""
    hf = read_config_json(source, "learner.model")
    reader = HfReader(source)
    refuse_unnamed(family_of(hf), source, reader.names, hf["num_hidden_layers"])
    model = _describe(hf, reader, layout)
    target.mkdir(parents=True, exist_ok=True)
    for pipeline_rank, tensor_rank, expert_rank in _ranks(layout):
        file: dict[str, Tensor] = {}
        for named, local in _of_rank(model, layout, pipeline_rank, expert_rank):
            full = layouts.merge(named.kind, [reader.read(name) for name in named.hf], model.dims)
            part = full if named.kind is Kind.WHOLE else layouts.shard(named.kind, full, tensor_rank, layout.tensor)
            file[local] = part.clone(memory_format=torch.contiguous_format)
        save_file(file, target / _file(pipeline_rank, tensor_rank, expert_rank), metadata={"format": "pt"})
    copy_description(source, target)
    (target / LAYOUT).write_text(json.dumps(asdict(layout)) + "\n")
    return len(model.parameters)


def to_hf(source: Path, target: Path, *, file_bytes: int = 5 * 10**9) -> int:
    """Write `source` (rank files of `to_megatron`) as a Hugging Face folder; returns the number of tensors."""
    if not (source / LAYOUT).is_file():
        raise ConfigError(
            f"no {LAYOUT} in {source}",
            expected="a folder that to-megatron wrote",
            remedy="for a Hugging Face folder use to-megatron",
        )
    layout = FileLayout(**json.loads((source / LAYOUT).read_text()))
    hf = read_config_json(source, "learner.model")
    paths = {ranks: _existing(source / _file(*ranks)) for ranks in _ranks(layout)}
    files = OpenFiles(layout.tensor)
    writer, written = HfWriter(target, file_bytes=file_bytes), 0
    model = _describe_stored(hf, {ranks: files[path] for ranks, path in paths.items()}, layout)
    for named in model.parameters:
        stage, expert_rank = model.stage_of(named, layout.pipeline), _expert_rank(named, model, layout)
        local = _local(named, model, layout)
        sharers = range(1 if named.kind is Kind.WHOLE else layout.tensor)
        parts = [files[paths[stage, tensor_rank, expert_rank]].get_tensor(local) for tensor_rank in sharers]
        for name, tensor in zip(
            named.hf, layouts.split(named.kind, layouts.unshard(named.kind, parts), model.dims), strict=True
        ):
            writer.write(name, tensor)
            written += 1
    writer.close()
    copy_description(source, target)
    (target / LAYOUT).unlink()
    return written


def _ranks(layout: FileLayout) -> Iterator[tuple[int, int, int]]:
    return product(range(layout.pipeline), range(layout.tensor), range(layout.expert))


def _file(pipeline_rank: int, tensor_rank: int, expert_rank: int) -> str:
    return f"pp{pipeline_rank}_tp{tensor_rank}_ep{expert_rank}.safetensors"


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ConfigError(
            f"no {path.name} in {path.parent}", expected=f"every file that {LAYOUT} implies", remedy="convert anew"
        )
    return path


def _describe(hf: dict[str, Any], reader: HfReader, layout: FileLayout) -> _Model:
    """The parameters that the stored tensors imply, in the order of the family's rules."""
    layers, experts = hf["num_hidden_layers"], _experts(hf)
    names = [
        rule.megatron.format(l=layer, e=expert)
        for rule in family_of(hf).rules
        for layer in (range(layers) if "{l}" in rule.megatron else (0,))
        for expert in (range(experts) if "{e}" in rule.megatron else (0,))
    ]
    every = [resolve(family_of(hf), name) for name in names]
    tied = bool(hf.get("tie_word_embeddings", False))
    there = tuple(n for n in every if n.hf[0] in reader and not (tied and n.megatron == OUTPUT))
    return _model(hf, there, layout)


def _describe_stored(hf: dict[str, Any], files: dict[tuple[int, int, int], Any], layout: FileLayout) -> _Model:
    """The parameters of a Megatron folder: its files' names, counted over the whole model."""
    layers, experts, found = hf["num_hidden_layers"], _experts(hf), {}
    for (stage, _, expert_rank), file in files.items():
        for local in file.keys():  # noqa: SIM118 -- an open safetensors file is no dictionary
            name = LAYER.sub(lambda m, s=stage: str(int(m[0]) + s * layers // layout.pipeline), local)
            name = EXPERT.sub(lambda m, e=expert_rank: str(int(m[0]) + e * experts // layout.expert), name)
            found[name] = None
    if hf.get("tie_word_embeddings", False):
        found.pop(OUTPUT, None)
    return _model(hf, tuple(resolve(family_of(hf), name) for name in found), layout)


def _model(hf: dict[str, Any], parameters: tuple[Named, ...], layout: FileLayout) -> _Model:
    groups = hf.get("num_key_value_heads") or hf["num_attention_heads"]
    layers, experts = hf["num_hidden_layers"], _experts(hf)
    for what, count, size in (
        ("key/value heads over --tensor", groups, layout.tensor),
        ("layers over --pipeline", layers, layout.pipeline),
        ("experts over --expert", experts, layout.expert),
    ):
        if count % size or (size > 1 and not count):
            raise ConfigError(f"{count} {what} {size}", expected=f"a divisor of {count}", remedy="choose another size")
    padded = -(-hf["vocab_size"] // layout.tensor) * layout.tensor
    return _Model(hf=hf, parameters=parameters, dims=layouts.Dimensions.of(hf, padded), layers=layers, experts=experts)


def _experts(hf: dict[str, Any]) -> int:
    return int(hf.get("num_experts") or hf.get("num_local_experts") or hf.get("n_routed_experts") or 0)


def _of_rank(model: _Model, layout: FileLayout, stage: int, expert_rank: int) -> Iterator[tuple[Named, str]]:
    """(parameter, name in the rank's own state dict); a tied output layer of the last stage is the embedding again."""
    for named in model.parameters:
        if named.of_expert and _expert_rank(named, model, layout) != expert_rank:
            continue
        if model.stage_of(named, layout.pipeline) == stage:
            yield named, _local(named, model, layout)
        if named.megatron == EMBEDDING and model.hf.get("tie_word_embeddings") and stage == layout.pipeline - 1 > 0:
            yield named, OUTPUT


def _expert_rank(named: Named, model: _Model, layout: FileLayout) -> int:
    expert = EXPERT.search(named.megatron)
    return int(expert[0]) // (model.experts // layout.expert) if expert else 0


def _local(named: Named, model: _Model, layout: FileLayout) -> str:
    name = LAYER.sub(lambda m: str(int(m[0]) % (model.layers // layout.pipeline)), named.megatron)
    return EXPERT.sub(lambda m: str(int(m[0]) % (model.experts // layout.expert)), name)


__all__ = ["FileLayout", "to_hf", "to_megatron"]
