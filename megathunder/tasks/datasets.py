"""Rows of a folder saved by `datasets`, or of a data set of the Hugging Face Hub. Called by tasks.table.

The library `datasets` is optional and imported only here. A Hub id is downloaded once and read from the cache then.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from megathunder.errors import ConfigError

SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")


def is_saved_dataset(path: Path) -> bool:
    """Whether `path` is a folder that `save_to_disk` wrote."""
    return path.is_dir() and any((path / name).is_file() for name in SAVED)


def dataset_rows(name: str, split: str) -> list[dict[str, object]]:
    """The rows of one split of a saved folder or a Hub id. Raises ConfigError."""
    if find_spec("datasets") is None:
        raise ConfigError(
            f"tasks.path = {name!r} is a saved data set or a Hub id, and the package datasets is not installed",
            expected="datasets, or a JSON, JSONL or Parquet file",
            remedy="pip install -e .[datasets], or export the rows to JSONL",
        )
    import datasets  # large, and needed for these two forms only

    try:
        if is_saved_dataset(Path(name)):
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name)
    except Exception as error:  # the library raises what its file systems and HTTP clients raise
        raise ConfigError(
            f"tasks.path = {name!r}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            expected="a readable saved data set, or a Hub id that can be downloaded or is in the cache",
            remedy=f"check the name and the network; `hf download --repo-type dataset {name}` fills the cache",
        ) from None
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise ConfigError(
                f"tasks.path = {name!r} has no split {split!r}",
                expected=f"one of {', '.join(found)}",
                remedy="set tasks.split or tasks.heldout_split",
            )
        found = found[split]
    return [dict(row) for row in found]
