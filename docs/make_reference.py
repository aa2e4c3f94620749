"""Writes the generated pages of the documentation: `python docs/make_reference.py`.

    configuration.md   every setting: name, type, default, meaning; from the dataclasses of megathunder/config/
    metrics.md         every metric of a row; from megathunder/metrics/row.py
    models.md          supported model families, their layouts, adapters and releases; from the checks themselves

tests/test_documents.py fails where a page is not what this writes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megathunder.config import Config
from megathunder.config.model_families import support_table
from megathunder.config.toml import fields_of
from megathunder.metrics.row import KindMetrics, Salt, Sizing, definitions

HERE = Path(__file__).resolve().parent
FIRST = ("run", "tasks", "reward", "rollout", "grpo", "opd", "loss", "learner", "streaming", "metrics")
"""Sections that people set; the rest follows in the order of the code."""


def meanings(kind: type) -> dict[str, str]:
    """Field -> the string below it in the source."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(kind))).body[0].body
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = " ".join(str(below.value.value).split())
    return found


def type_words(kind: object) -> str:
    """A type as people write it: `"a" | "b"`, `int`, `list of str`."""
    if typing.get_origin(kind) is typing.Annotated:
        return type_words(typing.get_args(kind)[0])
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"list of {type_words(typing.get_args(kind)[0])}"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(type_words(one) for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is dict:
        return "table"
    return getattr(kind, "__name__", str(kind)).replace("NoneType", "none")


def default_words(value: object) -> str:
    """A default as it stands in TOML."""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple | list):
        return "`[" + ", ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in value) + "]`"
    if isinstance(value, dict):
        return "`{}`" if not value else f"`{value}`"
    return "" if value is None else f"`{value}`"


def cell(text: str) -> str:
    """`text` within a cell of a table."""
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def rows(kind: type, prefix: str) -> Iterator[str]:
    """A table row per field of a section."""
    said, default = meanings(kind), kind()
    for name, hint in fields_of(kind).items():
        value = default_words(getattr(default, name))
        yield f"| `{prefix}{name}` | {cell(type_words(hint))} | {cell(value)} | {cell(said.get(name, ''))} |"


def configuration() -> str:
    """The page of every setting."""
    sections = {name: hint for name, hint in fields_of(Config).items() if dataclasses.is_dataclass(hint)}
    order = [*(name for name in FIRST if name in sections), *(name for name in sections if name not in FIRST)]
    head = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    said = meanings(Config)
    page = [
        "# Settings",
        "",
        "A setting is `[section] key = value` in a TOML file or `--section.key VALUE` on the command line, which wins.",
        "This page is generated from the code by `docs/make_reference.py`.",
        "",
        *head,
    ]
    for name, hint in fields_of(Config).items():
        if name not in sections:
            page.append(
                f"| `{name}` | {cell(type_words(hint))} | {default_words(getattr(Config(), name))} | {cell(said.get(name, ''))} |"
            )
    for name in order:
        first = (inspect.getdoc(sections[name]) or "").splitlines()[0]
        page += [
            "",
            f"## {name}",
            "",
            first.replace(f"[{name}] ", "").capitalize(),
            "",
            *head,
            *rows(sections[name], f"{name}."),
        ]
    return "\n".join(page) + "\n"


def models() -> str:
    """The page of supported model families."""
    page = [
        "# Supported models",
        "",
        "The architecture in a model's `config.json` decides. Any other one is refused before anything starts, with this table.",
        "Every layout is compared with transformers (`tools/parity.py --model all --layouts all`) on a CPU; no GPU has run one.",
        "This page is generated from the checks by `docs/make_reference.py`.",
        "",
        "| architecture | models | parallel layouts | LoRA | release |",
        "|---|---|---|---|---|",
        *(f"| `{r.architecture}` | {r.models} | {r.layouts} | {r.lora} | {r.releases} |" for r in support_table()),
    ]
    return "\n".join(page) + "\n"


def metrics() -> str:
    """The page of every metric: the fields of a row of metrics.jsonl."""
    page = [
        "# Metrics",
        "",
        "`runs/NAME/metrics.jsonl` has one JSON object per update with the fields below; W&B, TensorBoard, trackio, MLflow",
        "and sinks of your own (`metrics.sinks`) get the same names, nested ones joined by `/`, for example",
        "`by_kind/sum/reward_mean` or `dropped_by_reason/equal_rewards`. A field that was not measured is null, never 0.",
        "The unit is in the name; a name without one is a count, a share of 1, or a reward.",
        "This page is generated from `megathunder/metrics/row.py` by `docs/make_reference.py`.",
        "",
        "| metric | meaning |",
        "|---|---|",
        *(f"| `{name}` | {cell(text)} |" for name, text in definitions().items()),
    ]
    for kind in (KindMetrics, Sizing, Salt):
        said = " ".join((inspect.getdoc(kind) or "").split())
        page += ["", f"## {kind.__name__}", "", said, "", *(f"- `{name}`" for name in kind.__struct_fields__)]
    return "\n".join(page) + "\n"


PAGES = {"configuration.md": configuration, "models.md": models, "metrics.md": metrics}

if __name__ == "__main__":
    for file, write in PAGES.items():
        (HERE / file).write_text(write())
