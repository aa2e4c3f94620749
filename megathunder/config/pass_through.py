"""Names that `[learner.megatron]` and `[rollout.sglang]` may use, read from the installed sources, nothing imported.

    [learner.megatron]   a field of TransformerConfig, OptimizerConfig or DistributedDataParallelConfig
    [rollout.sglang]     a field of ServerArgs, or another of its command line's names

Importing either package takes seconds; parsing these files takes a tenth of one, and only where the table is not empty.
Values are checked by those who use them. Called by `checks.py`. A package that is not installed is not asked.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from megathunder.config.root import Config
from megathunder.errors import ConfigError

MEGATRON = {
    "core/transformer/transformer_config.py": "TransformerConfig",
    "core/model_parallel_config.py": "ModelParallelConfig",
    "core/optimizer/optimizer_config.py": "OptimizerConfig",
    "core/distributed/distributed_data_parallel_config.py": "DistributedDataParallelConfig",
}
SGLANG = {"srt/server_args.py": "ServerArgs", "srt/arg_groups/fields/*.py": ""}
"""Files of the package, and whose fields count there; empty: those of every class."""


def check_passed_names(config: Config) -> None:
    classes = "TransformerConfig, OptimizerConfig or DistributedDataParallelConfig"
    if config.learner.megatron:
        _check("learner.megatron", config.learner.megatron, classes, known_names("megatron", MEGATRON))
    if config.rollout.sglang:
        _check("rollout.sglang", config.rollout.sglang, "ServerArgs", known_names("sglang", SGLANG))


def known_names(package: str, files: Mapping[str, str]) -> set[str]:
    """Fields of the classes, and options written out (`--like-this`), in the installed package; empty without it."""
    spec = find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    names: set[str] = set()
    for pattern, owner in files.items():
        for path in (path for folder in folders for path in folder.glob(pattern)):
            names |= _names(ast.parse(path.read_text()), owner)
    return names


def _names(tree: ast.Module, owner: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in (owner or node.name,):
            fields = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
            found |= {target.id for target in fields if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
            found.add(node.value.removeprefix("--").replace("-", "_"))
    return found


def _check(table: str, given: Iterable[str], classes: str, known: set[str]) -> None:
    for name in (name.replace("-", "_") for name in given):
        if known and name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            raise ConfigError(
                f"{table}.{name} is no field of {classes}",
                expected="one that the installed version has",
                remedy=f"did you mean {near[0]}?",
            )
