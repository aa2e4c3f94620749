"""Package megathunder.

    docker build -t megathunder .    on a CUDA machine: everything, NVIDIA's apex from source included
    pip install -e .[gpu]            the same without apex; Transformer Engine is built, which takes nvcc
    bash tools/setup.sh              on a machine without one: the same engines, without their CUDA dependencies

PyPI's `apex` is another project and is required nowhere.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def pinned(name: str) -> list[str]:
    """The requirements of requirements/<name>.txt."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


MEGATRON = "megatron-core==0.16.1"
SGLANG = "sglang==0.5.20"


def ranged(name: str) -> list[str]:
    """The same as ranges, "aiohttp>=3.14", so that other packages may stand beside; what the engines share stays pinned."""
    of_engines = ("transformers", "tokenizers")
    loose = [r if r.startswith(of_engines) else re.sub(r"==(\d+\.\d+).*", r">=\1", r) for r in pinned(name)]
    return [requirement for requirement in loose if not requirement.startswith("setuptools")]


# Everything else about the package stands in pyproject.toml.
setup(
    packages=find_namespace_packages(include=["megathunder*"]),
    package_data={"": ["*.pl", "*.c", "*.md", "*.html", "*.css", "*.js", "py.typed", "METADATA", "entry_points.txt"]},
    install_requires=ranged("base"),
    extras_require={
        "cpu": [*pinned("torch"), *pinned("engine"), MEGATRON],
        "harnesses": pinned("harnesses"),
        "gpu": [*pinned("torch"), SGLANG, MEGATRON, *pinned("gpu")],
        "agents": [requirement for requirement in pinned("agents") if not requirement.startswith("mini-swe-agent")],
        "datasets": pinned("datasets"),
        "docker": pinned("docker"),
        "environments": pinned("environments"),
        "openenv": pinned("openenv"),
        "parquet": pinned("parquet"),
        "test": pinned("test"),
        "wandb": pinned("wandb"),
        "tensorboard": pinned("tensorboard"),
        "trackio": pinned("trackio"),
        "mlflow": pinned("mlflow"),
        "router": pinned("router"),
    },
)
