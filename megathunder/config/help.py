"""The help of the command line: the settings that most people set, those of one section, or all.

    --help            the short list below         --help learner    one section         --help all    every setting

Texts are the docstrings under the fields, so that there is one description of a setting. Called by `load.py`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from typing import Literal, get_args, get_origin

from megathunder.config.ranges import annotations
from megathunder.config.root import Config
from megathunder.config.toml import settings

SHORT = [
    "objective",
    "schedule",
    "run.name",
    "run.updates",
    "run.groups_per_update",
    "run.group_size",
    "run.seed",
    "run.evaluate_every",
    "run.checkpoint_every",
    "run.resume",
    "tasks.source",
    "tasks.path",
    "tasks.environment",
    "tasks.max_turns",
    "reward.function",
    "learner.model",
    "learner.learning_rate",
    "learner.learning_rate_decay",
    "learner.dtype",
    "learner.device",
    "learner.tensor_parallel",
    "learner.pipeline_parallel",
    "learner.expert_parallel",
    "learner.lora_rank",
    "rollout.servers",
    "rollout.urls",
    "rollout.temperature",
    "rollout.max_new_tokens",
    "rollout.max_tokens",
    "rollout.agent",
    "grpo.advantage",
    "grpo.kl_coefficient",
    "opd.teacher",
    "streaming.pack_tokens",
    "sandbox.backend",
]
WIDTH = 110


def help_text(topic: str, base: Config) -> str:
    """The help for `topic`: empty for the short one, `all`, or a section; defaults are those of `base`."""
    names = list(descriptions())
    if topic == "all":
        return _listed(names, base)
    if not topic:
        known = [name for name in SHORT if name in names]
        more = f"{len(names)} settings in all: --help all, or --help SECTION with one of {', '.join(sections())}."
        return f"{_listed(known, base)}\n\n{more}"
    return _listed([name for name in names if name.startswith(f"{topic}.")], base)


def sections() -> list[str]:
    """Names of the sections."""
    return [name for name, (kind, _) in annotations(Config).items() if dataclasses.is_dataclass(kind)]


@cache
def descriptions() -> dict[str, str]:
    """Dotted name -> what the setting means, in the order of the file."""
    found: dict[str, str] = {}
    for name, text in _documented(Config).items():
        kind = annotations(Config)[name][0]
        inner = _documented(kind) if dataclasses.is_dataclass(kind) and isinstance(kind, type) else {}
        found.update({f"{name}.{key}": one for key, one in inner.items()} or {name: text})
    return found


def _documented(kind: type) -> dict[str, str]:
    """Field -> the docstring under it, as one line."""
    tree = ast.parse(inspect.getsource(import_module(kind.__module__)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind.__name__).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[node.target.id] = " ".join(str(text).split())
    return found


def _listed(names: Iterable[str], base: Config) -> str:
    lines, section = [], None
    for name in names:
        above, _, key = name.rpartition(".")
        if above != section:
            section = above
            lines.append(f"\n[{section}]" if section else "")
        value = getattr(getattr(base, above) if above else base, key)
        text = f"{descriptions()[name]} (default: {_shown(value)})"
        lines.append(f"  --{name} {_choices(name)}".rstrip())
        lines.append(textwrap.fill(text, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines).strip("\n")


def _choices(name: str) -> str:
    hint = settings().get(name)
    return f"{{{', '.join(map(str, get_args(hint)))}}}" if get_origin(hint) is Literal else ""


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "empty"
    return str(value).lower() if isinstance(value, bool) else str(value) if value not in ("", {}) else "empty"
