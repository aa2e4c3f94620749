"""Which of SGLang's function-call parsers reads the tool calls of a model.

`rollout.tool_parser` names one; "auto" goes by what the model's chat template writes. Called by the engine, and by
the checks before a run. Refuses names that the installed SGLang does not have.
"""

from __future__ import annotations

import ast
import difflib
import json
from importlib.util import find_spec
from pathlib import Path

from megathunder.errors import ConfigError

AUTO = "auto"
MARKS = (  # of a template, in this order: the parser of those who write it
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseekv3"),
    ("<tool_call>", "qwen25"),
)


def choose_tool_parser(setting: str, model: Path) -> str:
    """The parser's name, or "" where the template of the model in folder `model` writes no calls that are known."""
    if setting == AUTO:
        template = chat_template(model)
        return next((parser for mark, parser in MARKS if mark in template), "")
    known = known_tool_parsers()
    if known and setting not in known:
        close = difflib.get_close_matches(setting, known, 1)
        raise ConfigError(
            f"rollout.tool_parser = {setting!r}",
            expected=f"auto, or a function-call parser of SGLang: {', '.join(known)}",
            remedy=f"set rollout.tool_parser = {close[0] if close else AUTO!r}",
        )
    return setting


def known_tool_parsers() -> tuple[str, ...]:
    """Read off SGLang's source, since its import takes seconds; empty where it is not installed."""
    found = find_spec("sglang")
    if found is None or found.origin is None:
        return ()
    source = Path(found.origin).parent / "srt" / "function_call" / "function_call_parser.py"
    for node in ast.walk(ast.parse(source.read_text()) if source.is_file() else ast.Module([], [])):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ToolCallParserEnum":
            return tuple(sorted(ast.literal_eval(key) for key in node.value.keys))
    return ()


def chat_template(model: Path) -> str:
    """The text of the folder's chat template; empty where it has none."""
    if (model / "chat_template.jinja").is_file():
        return (model / "chat_template.jinja").read_text()
    if not (model / "tokenizer_config.json").is_file():
        return ""
    template = json.loads((model / "tokenizer_config.json").read_text()).get("chat_template") or ""
    if isinstance(template, list):  # several by name
        template = next((t["template"] for t in template if t.get("name") == "tool_use"), template[0]["template"])
    return template
