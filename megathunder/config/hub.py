"""Models by their Hub id: `learner.model = "Qwen/Qwen3-0.6B"` becomes the folder that its snapshot lies in.

`resolve_models(config)` is called by the entry points before the checks; with `weights=False`, enough for a plan, it
fetches the description and the tokenizer only. A snapshot is downloaded once through `huggingface_hub`; without a
network the cache is used. Raises ConfigError that says how to fetch what is missing.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megathunder.config.root import Config
from megathunder.errors import ConfigError

DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS = ("*.safetensors",)
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
DATA_FILE = re.compile(r"\.(jsonl?|parquet|toml|ya?ml|py|csv|txt|safetensors)$")
LOOK_UP_S = 2.0


def is_hub_id(name: str) -> bool:
    """Whether `name` reads as "owner/name" of the Hub: no file, and not below a folder that exists here."""
    looks_so = HUB_ID.fullmatch(name) is not None and not DATA_FILE.search(name)
    return looks_so and not Path(name.partition("/")[0]).is_dir()


def resolve_models(config: Config, *, weights: bool = True) -> Config:
    """`config` with `learner.model` and, for distillation, `opd.teacher` as folders on this machine."""
    model = model_folder(config.learner.model, "learner.model", weights=weights)
    learner = dataclasses.replace(config.learner, model=model)
    opd = config.opd
    if config.objective == "opd" and opd.teacher:
        opd = dataclasses.replace(opd, teacher=model_folder(opd.teacher, "opd.teacher", weights=weights))
    return dataclasses.replace(config, learner=learner, opd=opd)


def model_folder(name: str, setting: str, *, weights: bool = True) -> str:
    """The folder of the model `name`: itself, or the snapshot of a Hub id, downloaded where the cache has none."""
    if Path(name).exists() or not is_hub_id(name):
        return name
    from huggingface_hub import snapshot_download  # loading it takes longer than all checks together
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return snapshot_download(
            name, allow_patterns=[*DESCRIPTION, *(WEIGHTS if weights else ())], etag_timeout=LOOK_UP_S
        )
    except GatedRepoError as error:
        reason, remedy = (
            "its owner grants access on request",
            f"request it at https://huggingface.co/{name}, then: hf auth login",
        )
        raise _no_model(setting, name, reason, remedy) from error
    except RepositoryNotFoundError as error:
        remedy = f"correct {setting}; a private model needs: hf auth login"
        raise _no_model(setting, name, "the Hub has no such model", remedy) from error
    except (LocalEntryNotFoundError, OSError) as error:  # offline by its environment, or no connection
        remedy = f"on a machine with a network: hf download {name}; then copy its folder here and set {setting} to it"
        raise _no_model(setting, name, "the Hub cannot be reached and the cache does not hold it", remedy) from error


def _no_model(setting: str, name: str, reason: str, remedy: str) -> ConfigError:
    return ConfigError(
        f"{setting} = {name!r}: no such folder, and as a Hub id: {reason}",
        expected="a Hugging Face model folder, or the id of a model on the Hub",
        remedy=remedy,
    )
