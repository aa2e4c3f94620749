"""The command line: `--config C.toml`, then dotted overrides, then help that teaches.

    load_config(["--config", "examples/shell_grpo.toml", "--learner.tensor_parallel", "2"]) -> Config

Defaults < the TOML file < the command line. Underscores and hyphens are the same; `--run.resume true` is
`--run.resume`; `--learner.megatron.KEY VALUE` adds to a free table. An unknown option and a wrong file raise
ConfigError with the setting that is meant; a wrong type ends the program with exit status 2 (tyro). Nothing here
imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from megathunder.config.field_types import INPUT_PATH, OUTPUT_PATH, REFERENCE
from megathunder.config.help import help_text, sections
from megathunder.config.hub import is_hub_id
from megathunder.config.ranges import annotations
from megathunder.config.root import Config
from megathunder.config.streamable import reject_non_streamable
from megathunder.config.synonyms import nearest
from megathunder.config.toml import free_tables, read_config, settings
from megathunder.errors import ConfigError
from megathunder.registry import absolute_reference

EXAMPLES = """
examples:
  torchrun --nproc-per-node 1 tools/train.py --config examples/shell_grpo.toml
  torchrun --nproc-per-node 2 tools/train.py --config examples/shell_opd.toml --run.name mine --schedule sync
  python tools/train.py --config examples/shell_grpo.toml --run.updates 2 --rollout.sglang.mem_fraction_static 0.5

A setting is [section] key = value in a TOML file and --section.key VALUE here; the command line wins.
--config FILE reads a file first; without one every setting has the default shown."""


def load_config(argv: Sequence[str], *, prog: str = "train.py", description: str = "") -> Config:
    """The configuration that `argv` (without the program's name) describes, relative paths made absolute.

    `description` opens the help text. Raises ConfigError for a bad file, SystemExit for `--help` and bad options.
    """
    _reject_by_name(argv)
    path, rest = _take_option(list(argv), "--config")
    base = read_config(Path(path).expanduser()) if path else Config()
    base = _with_absolute_paths(base, Path(path).expanduser().parent) if path else base
    base, rest = _take_free_tables(base, rest)
    _show_help(rest, base, description or (Config.__doc__ or "").strip(), prog)
    _refuse_unknown(rest)
    text = f"{description or (Config.__doc__ or '').strip()}\n{EXAMPLES}"
    config = tyro.cli(
        Config,
        default=base,
        args=_switches(rest),
        prog=prog,
        description=text,
        config=(tyro.conf.HelptextFromCommentsOff,),
    )
    return _with_absolute_paths(config, Path())


def _reject_by_name(argv: Sequence[str]) -> None:
    """Options, and values of options of [grpo], that ask for what cannot be streamed."""
    option = ""
    for part in (part for word in argv for part in word.split("=", 1)):
        option = part if part.startswith("--") else option
        if part is option or option.startswith("--grpo."):
            reject_non_streamable(part)


def _show_help(argv: Sequence[str], base: Config, description: str, prog: str) -> None:
    """Print help and end the program where `argv` asks for it; `--help` may be followed by a section or by `all`."""
    at = next((position for position, word in enumerate(argv) if word in ("--help", "-h")), None)
    if at is None:
        return
    topic = "".join(argv[at + 1 : at + 2]).strip("[]")
    if topic not in ("", "all", *sections()):
        raise ConfigError(
            f"--help {topic}", expected=f"a section ({', '.join(sections())}) or all", remedy="or --help alone"
        )
    print(f"usage: {prog} [--config FILE] [--SECTION.KEY VALUE ...]\n\n{description}\n{EXAMPLES}\n")
    print(help_text(topic, base))
    raise SystemExit(0)


def _refuse_unknown(argv: Sequence[str]) -> None:
    """An option that no setting has, with the setting that is meant."""
    known = settings()
    for word in (word for word in argv if word.startswith("--")):
        option = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if option in known or option.replace(".no_", ".") in known:
            continue
        found = nearest(option, known)
        raise ConfigError(
            f"unknown option {word.partition('=')[0]}",
            expected="--SECTION.KEY VALUE of a setting (--help all lists them)",
            remedy=f"did you mean --{found}?" if found else "leave it out",
        )


def _take_option(argv: list[str], option: str) -> tuple[str, list[str]]:
    """The value of `option` ("" when absent) and what remains of `argv`."""
    for position, token in enumerate(argv):
        if token.startswith(f"{option}="):
            return token.partition("=")[2], argv[:position] + argv[position + 1 :]
        if token == option:
            if position + 1 == len(argv):
                raise ConfigError(f"{option} ends the command line", expected="a file after it", remedy="name the file")
            return argv[position + 1], argv[:position] + argv[position + 2 :]
    return "", argv


def _take_free_tables(base: Config, argv: list[str]) -> tuple[Config, list[str]]:
    """Apply `--learner.megatron.KEY VALUE` and its like, which tyro cannot know."""
    for section, key in free_tables():
        room = getattr(base, section)
        table: dict[str, str] = dict(getattr(room, key))
        prefix = f"--{section}.{key}."
        while option := next((a for a in argv if a.startswith(prefix)), ""):
            name, _, _ = option.partition("=")
            value, argv = _take_option(argv, name)
            table[name.removeprefix(prefix).replace("-", "_")] = value
        base = dataclasses.replace(base, **{section: dataclasses.replace(room, **{key: table})})
    return base, argv


def _switches(argv: list[str]) -> list[str]:
    """`--run.resume true` -> `--run.resume`, `--run.resume=false` -> `--run.no-resume`."""
    booleans = {name for name, hint in settings().items() if hint is bool}
    tokens = [part for a in argv for part in (a.split("=", 1) if a.startswith("--") else [a])]
    result: list[str] = []
    for token in tokens:
        name = result[-1].removeprefix("--").replace("-", "_") if result else ""
        if name in booleans and token.lower() in ("true", "false"):
            section, _, key = name.rpartition(".")
            result[-1] = f"--{section}.{key}" if token.lower() == "true" else f"--{section}.no-{key}"
        else:
            result.append(token)
    return result


def _with_absolute_paths(config: Config, folder: Path) -> Config:
    """Paths are relative to `folder` (that of the TOML file) where it has them, else to the current folder; they stay
    right when a process changes folder. A model that is in neither may be a Hub id and is left as it is."""
    folders = [folder.absolute(), Path.cwd()]

    def absolute(value: Any, kind: str) -> Any:
        if isinstance(value, tuple):
            return tuple(absolute(one, kind) for one in value)
        if kind == REFERENCE or not value:
            return absolute_reference(value, folders)
        paths = [(base / Path(value).expanduser()) for base in folders if kind == INPUT_PATH]
        found = next((path for path in paths if path.exists()), None)
        return value if not found and is_hub_id(value) else str(found or Path.cwd() / Path(value).expanduser())

    changed = {}
    for name, (kind, marks) in annotations(Config).items():
        section = getattr(config, name)
        if REFERENCE in marks:
            changed[name] = absolute(section, REFERENCE)
            continue
        marked = {
            key: absolute(getattr(section, key), mark)
            for key, (_, extra) in (annotations(kind) if dataclasses.is_dataclass(kind) else {}).items()
            for mark in extra
            if mark in (INPUT_PATH, OUTPUT_PATH, REFERENCE)
        }
        changed[name] = dataclasses.replace(section, **marked) if marked else section
    return Config(**changed)
