"""Procedural faults: one expression of one function differs, and the rest of the file stays as it was."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import sys
from pathlib import Path

from megathunder.tasks.patch import apply_patch

ROOT = Path(__file__).resolve().parents[3]
MODULE = '''"""A module.  With odd   spacing."""


def clamp(value, low=0):
    """The value, at least low."""
    return max(value, low) if value != None else low


def shifted(values, by):  # é: two bytes
    """Every value moved."""
    return [value + by for value in values if 0 < value and not -by in values]
'''


def tool() -> object:
    spec = importlib.util.spec_from_file_location("inject_bugs_tool", ROOT / "tools" / "inject_bugs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_fault_is_one_changed_line_of_a_module_that_still_parses():
    found = list(tool().faults("sums.py", MODULE))
    assert {f.kind for f in found} >= {"compare", "op_change", "bool_change", "off_by_one", "call_change", "cond_swap"}
    for fault in found:
        ast.parse(fault.text)
        before, after = MODULE.splitlines(), fault.text.splitlines()
        assert len(before) == len(after)
        assert sum(a != b for a, b in zip(before, after)) == 1, fault
        assert fault.function in ("sums.clamp", "sums.shifted") and fault.function.partition(".")[2] in fault.described


def test_the_patch_of_an_instance_makes_the_fault_and_says_nothing_of_the_fix():
    module = tool()
    for fault in module.faults("sums.py", MODULE):
        instance = module.draft("tiny__sums", fault, MODULE)
        assert apply_patch({"sums.py": MODULE}, instance.patch) == {"sums.py": fault.text}
        row = module.finished(instance, ("tests/test_sums.py::test_low",), ("tests/test_sums.py::test_x",))
        changed = [d[2:].strip() for d in difflib.ndiff(fault.text.splitlines(), MODULE.splitlines()) if d[:1] == "+"]
        assert changed and changed[0] not in row["problem_statement"]
