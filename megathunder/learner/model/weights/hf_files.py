"""Hugging Face model folders, one tensor at a time: reading (sharded, fused or per-expert) and writing.

The reader knows tensors by their per-expert names. Where a file stores experts fused, `experts.3.up_proj.weight` is
read as the second half of `experts.gate_up_proj[3]`. The writer starts a new file when the current one is full and
writes the index at the end; it holds at most one file in memory. Refuses folders without weights and unknown names.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megathunder.errors import ConfigError

INDEX = "model.safetensors.index.json"
_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_NOT_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".lock")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPart:
    """Where one expert's tensor lies in `experts.gate_up_proj` [E, 2I, H] or `experts.down_proj` [E, H, I]."""

    stored: str
    expert: int
    part: str

    @classmethod
    def named(cls, name: str) -> FusedPart | None:
        """The place of the tensor with per-expert name `name`; None where that is no expert's."""
        match = _EXPERT.match(name)
        if match is None:
            return None
        experts, number, part = match.groups()
        stored = f"{experts}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
        return cls(stored=stored, expert=int(number), part=part)

    def of(self, one_expert: Tensor) -> Tensor:
        """The tensor, of the fused one's slice [1, ...] at this expert."""
        whole = one_expert.squeeze(0)
        if self.part == "down_proj":
            return whole
        gate, up = whole.chunk(2, dim=0)
        return gate if self.part == "gate_proj" else up


class OpenFiles:
    """Safetensors files, memory-mapped; the `most` used last stay open, since every page read of one stays resident."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        file = self._open.pop(path, None) or safe_open(path, framework="pt")
        self._open[path] = file  # the last used comes last
        while len(self._open) > self._most:
            del self._open[next(iter(self._open))]
        return file


class HfReader:
    """Tensors of a folder by name; two of its files are open at most."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _names(folder)
        self._files = OpenFiles(2)

    @property
    def names(self) -> list[str]:
        """Names as stored."""
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or self._fused(name) is not None

    def read(self, name: str) -> Tensor:
        """The tensor called `name`, also where it is part of a fused one. Raises ConfigError if it is not there."""
        if name in self._file_of:
            return self._file(name).get_tensor(name)
        fused = self._fused(name)
        if fused is None:
            raise ConfigError(
                f"{self.folder} has no tensor {name}",
                expected="every tensor that config.json implies",
                remedy="check that the folder is complete and config.json belongs to it",
            )
        return fused.of(self._file(fused.stored).get_slice(fused.stored)[fused.expert : fused.expert + 1])

    def _fused(self, name: str) -> FusedPart | None:
        fused = FusedPart.named(name)
        return fused if fused is not None and fused.stored in self._file_of else None

    def _file(self, name: str) -> Any:
        return self._files[self.folder / self._file_of[name]]


def _names(folder: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    if (folder / INDEX).is_file():
        return json.loads((folder / INDEX).read_text())["weight_map"]
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    if not names:
        raise ConfigError(
            f"no *.safetensors in {folder}",
            expected="a Hugging Face folder with safetensors weights",
            remedy="save the model with save_pretrained (safetensors is its default), or download it completely",
        )
    return names


class HfWriter:
    """Collects tensors into files of at most `file_bytes` (one tensor may exceed it); `single` names a lone file."""

    def __init__(self, folder: Path, *, file_bytes: int = 5 * 10**9, single: str = "model.safetensors") -> None:
        self.folder, self.file_bytes, self.single = folder, file_bytes, single
        folder.mkdir(parents=True, exist_ok=True)
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def write(self, name: str, tensor: Tensor) -> None:
        """Add one tensor; the current file is closed first if it would grow beyond its limit."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.file_bytes:
            self._flush()
        # A copy: the caller may reuse its buffer, and safetensors refuses tensors that share storage.
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def close(self) -> None:
        """Write the last file, name the files as transformers does, and write the index if there are several."""
        self._flush()
        count = len(self._files)
        weight_map = {}
        for number, names in enumerate(self._files, 1):
            final = self.single if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{number}.tmp").rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _flush(self) -> None:
        if not self._pending:
            return
        save_file(self._pending, self.folder / f"part-{len(self._files) + 1}.tmp", metadata={"format": "pt"})
        self._files.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0


def copy_description(source: Path, target: Path, *, dtype: torch.dtype | None = None) -> None:
    """Copy config.json, the tokenizer and everything else that is not weights; note `dtype` in config.json."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_NOT_WEIGHTS):
            shutil.copyfile(path, target / path.name)
    if dtype is not None:
        config = json.loads((target / "config.json").read_text())
        config["dtype"] = str(dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
