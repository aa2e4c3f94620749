"""Stand-in for triton, without a compiler: kernels can be defined, never run.

SGLang ships such names itself for machines that have no triton (Apple silicon, `sglang/_platform_stubs.py`); this
module installs the same ones. A decorated kernel stays a plain Python function, and the CPU path calls none.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def _sglang_stubs() -> ModuleType:
    folder = next(iter(importlib.util.find_spec("sglang").submodule_search_locations))
    spec = importlib.util.spec_from_file_location("sglang_platform_stubs", Path(folder) / "_platform_stubs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_stubs = _sglang_stubs()


def _module(name: str, **members: object) -> ModuleType:
    """Make module `name`, reachable by import and as an attribute of its parent."""
    module = _stubs._MockModule(name)
    sys.modules[name] = module
    for member, value in members.items():
        setattr(module, member, value)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


class constexpr:
    """Annotation and value wrapper of triton.language."""

    def __init__(self, value: object = None) -> None:
        self.value = value


def _kind(name: str, base: type = object) -> type:
    return type(name, (base,), {})


_jit_function = _kind("JITFunction")
sys.meta_path.insert(0, _stubs._TritonFinder())
_module(
    "triton",
    __version__="3.0.0",
    cdiv=_stubs._cdiv,
    next_power_of_2=_stubs._next_power_of_2,
    Config=_stubs._Config,
    JITFunction=_jit_function,
)
_module("triton.language", constexpr=constexpr)
_module("triton.language.extra")
_module("triton.language.extra.libdevice")
_module("triton.runtime")
_module("triton.runtime.jit", JITFunction=_jit_function, KernelInterface=_kind("KernelInterface"))
_module(
    "triton.runtime.autotuner",
    OutOfResources=_kind("OutOfResources", Exception),
    PTXASError=_kind("PTXASError", Exception),
    Autotuner=_kind("Autotuner"),
    Heuristics=_kind("Heuristics"),
)
_module("triton.compiler", CompiledKernel=_kind("CompiledKernel"))
_module("triton.compiler.compiler", ASTSource=_kind("ASTSource"), triton_key=lambda: "standin")
_module("triton.backends")
_module("triton.backends.compiler", GPUTarget=_kind("GPUTarget"))
