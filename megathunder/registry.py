"""One registry per kind of part: a setting names a built-in, an installed plug-in or the user's own code.

    REWARDS = Registry("reward", parameters=("completion", "row", "trajectory"))

    @REWARDS.register("boxed")
    def boxed(completion, row, trajectory) -> float: ...

    REWARDS.get("boxed")                                  a registered name, or an entry point of `megathunder.reward`
    REWARDS.get("package.module:score")                   an importable module and a name in it
    REWARDS.get("rewards.py:score", base=config_folder)   a file and a name in it; relative to `base`

`get` raises ConfigError (seen, expected, remedy, closest name) unless the object exists, can be called and accepts the
arguments that it will be called with. A file is run once per process, however often it is named; its folder joins
`sys.path`, so it may import its neighbours. User code is trusted.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from megathunder.errors import ConfigError

T = TypeVar("T")
CLOSE = 0.5


class Registry(Generic[T]):
    """Parts of one kind by name.

    `parameters`: the positional arguments of a call (None: any object is a part). `methods`: what a part must have.
    `modules`: the modules that register the built-in parts, imported at the first lookup.
    """

    def __init__(
        self,
        kind: str,
        *,
        parameters: Sequence[str] | None = None,
        methods: Sequence[str] = (),
        modules: Sequence[str] = (),
    ) -> None:
        self.kind, self.parameters, self.methods = kind, parameters, tuple(methods)
        self.group = f"megathunder.{kind.replace(' ', '_')}"
        self._modules, self._parts = list(modules), dict[str, T]()

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator: the function or class is known as `name`. Raises ConfigError where the name is taken."""

        def add(part: T) -> T:
            if self._parts.setdefault(name, part) is not part:
                raise ConfigError(
                    f"{self.kind} {name!r} is registered twice: {_place(self._parts[name])} and {_place(part)}",
                    expected="one part per name",
                    remedy="give one of them another name",
                )
            return part

        return add

    def names(self) -> list[str]:
        """Names of all registered parts and installed plug-ins, sorted."""
        self._import_modules()
        return sorted({*self._parts, *self._plug_ins()})

    def get(self, reference: str, *, base: Path | str = ".") -> T:
        """The part that `reference` names; a relative file path is relative to the folder `base`."""
        self._import_modules()
        if reference in self._parts:
            return self._parts[reference]
        if ":" in reference:
            return self._checked(self._load(reference, Path(base)), reference)
        if plug_in := self._plug_ins().get(reference):
            return self._checked(self._import(plug_in.load, reference), reference)
        names = self.names()
        raise ConfigError(
            f"there is no {self.kind} {reference!r}",
            expected=f'{", ".join(names) or "no names are registered"}; or "file.py:name", "package.module:name"',
            remedy=_closest(reference, names) or f"use one of them, or write your own {self.kind} in a file",
        )

    def _import_modules(self) -> None:
        while self._modules:
            importlib.import_module(self._modules[0])
            self._modules.pop(0)

    def _plug_ins(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=self.group)}

    def _load(self, reference: str, base: Path) -> object:
        where, _, name = reference.rpartition(":")
        if where.endswith(".py"):
            path = (base / Path(where).expanduser()).resolve()
            module = self._import(lambda: _module_of(path), reference) if path.is_file() else self._no_file(path, where)
        else:
            module = self._import(lambda: importlib.import_module(where), reference)
        part: object = module
        for attribute in name.split("."):
            if not hasattr(part, attribute):
                raise self._no_name(reference, name, module)
            part = getattr(part, attribute)
        return part

    def _import(self, load: Callable[[], Any], reference: str) -> Any:
        try:
            return load()
        except (Exception, SystemExit) as error:  # user code: anything may happen while it is imported
            frames = traceback.extract_tb(error.__traceback__)
            raise ConfigError(
                f"{self.kind} {reference!r} could not be imported: {type(error).__name__}: {error} "
                f"(at {frames[-1].filename}:{frames[-1].lineno})",
                expected='a module that imports without an error, "file.py:name" or "package.module:name"',
                remedy="correct the reference, or run the file with python to see the whole traceback",
            ) from error

    def _no_file(self, path: Path, where: str) -> ModuleType:
        near = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        raise ConfigError(
            f"{self.kind} file {where!r}: {path} does not exist",
            expected="a Python file; a relative path in a TOML file is relative to that file's folder",
            remedy=_closest(path.name, near)
            or (f"{path.parent} holds {', '.join(near[:8])}" if near else f"{path.parent} holds no Python file"),
        )

    def _no_name(self, reference: str, name: str, module: ModuleType) -> ConfigError:
        own = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        return ConfigError(
            f"{self.kind} {reference!r}: {module.__file__ or module.__name__} has no {name!r}",
            expected=f"one of {', '.join(sorted(own))}" if own else f"a {self.kind} in that module",
            remedy=_closest(name, own) or f"define {name}, or name what is defined there",
        )

    def _checked(self, part: object, reference: str) -> T:
        """`part` if it has the methods of its kind and can be called as its kind is called."""
        if self.parameters is not None and not callable(part):
            raise ConfigError(
                f"{self.kind} {reference!r} is {part!r:.80}, which cannot be called",
                expected=self._form(reference),
                remedy="name a function or a class",
            )
        missing = [name for name in self.methods if not hasattr(part, name)]
        if missing:
            raise ConfigError(
                f"{self.kind} {reference!r} has no {', '.join(missing)}",
                expected=f"a class with the methods {', '.join(self.methods)}",
                remedy=f"define {', '.join(missing)}",
            )
        if self.parameters is not None and callable(part):
            self._check_signature(part, reference)
        return part  # type: ignore[return-value]

    def _check_signature(self, part: Callable[..., Any], reference: str) -> None:
        try:
            signature = inspect.signature(part)
        except ValueError:  # a C function tells nothing
            return
        try:
            signature.bind(*(self.parameters or ()))
        except TypeError as error:
            raise ConfigError(
                f"{self.kind} {reference!r} has the signature {signature}: {error}",
                expected=self._form(reference),
                remedy=f"let it take these {len(self.parameters or ())} positional arguments",
            ) from None

    def _form(self, reference: str) -> str:
        return f"{reference.rpartition(':')[2]}({', '.join(self.parameters or ())})"


def is_file_reference(reference: str) -> bool:
    """True for "file.py:name"."""
    return reference.rpartition(":")[0].endswith(".py")


def absolute_reference(reference: str, folders: Iterable[Path]) -> str:
    """`reference` with the path of its file absolute: in the first of `folders` that has it, else in the first one.

    absolute_reference("rewards.py:score", [Path("/run")]) == "/run/rewards.py:score"; names and modules are unchanged.
    """
    if not is_file_reference(reference):
        return reference
    where, _, name = reference.rpartition(":")
    paths = [(folder / Path(where).expanduser()).resolve() for folder in folders]
    return f"{next((path for path in paths if path.is_file()), paths[0])}:{name}"


def _module_of(path: Path) -> ModuleType:
    """The module of the file `path`; run at the first call only."""
    name = f"megathunder_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: its dataclasses look themselves up there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _closest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), 1, CLOSE)
    return f"did you mean {near[0]!r}?" if near else ""


def _place(part: object) -> str:
    return f"{getattr(part, '__module__', '?')}.{getattr(part, '__qualname__', part)}"


TASK_SOURCES: Registry[Callable[..., Any]] = Registry(
    "task source", modules=["megathunder.tasks.build_source", "megathunder.environments.adapters.reasoning_gym"]
)
REWARDS: Registry[Callable[..., Any]] = Registry(
    "reward",
    parameters=("completion", "row", "trajectory"),
    modules=[
        "megathunder.rewards.builtin_rewards",
        "megathunder.rewards.code_tests",
        "megathunder.rewards.judge",
        "megathunder.environments.adapters.reasoning_gym",
    ],
)
ENVIRONMENTS: Registry[Callable[..., Any]] = Registry(
    "environment",
    modules=[
        "megathunder.environments.adapters.gymnasium",
        "megathunder.environments.adapters.textarena",
        "megathunder.environments.adapters.openenv",
    ],
)
AGENTS: Registry[Callable[..., Any]] = Registry("agent", parameters=("task", "client", "sandbox"))
OBJECTIVES: Registry[Callable[..., Any]] = Registry(
    "objective", parameters=("config",), modules=("megathunder.objectives.grpo", "megathunder.objectives.opd")
)
ADVANTAGES: Registry[Any] = Registry(
    "advantage", parameters=("rewards",), modules=("megathunder.objectives.advantage",)
)
SCHEDULES: Registry[Any] = Registry("schedule", modules=("megathunder.schedule.schedules",))
TRANSPORTS: Registry[Callable[..., Any]] = Registry("transport")
ROUTING_POLICIES: Registry[Callable[..., Any]] = Registry("routing policy")
MODEL_FAMILIES: Registry[Any] = Registry("model family", modules=("megathunder.learner.model.families",))
SANDBOX_BACKENDS: Registry[Callable[..., Any]] = Registry("sandbox backend")
SINKS: Registry[Callable[..., Any]] = Registry(
    "sink", parameters=("config", "folder"), methods=("row", "close"), modules=["megathunder.metrics.trackers"]
)
