"""Package megathunder.

    docker build -t megathunder .    on a CUDA machine: everything, NVIDIA's apex from source included
    pip install -e .[gpu]            the same without apex; Transformer Engine is built, which takes nvcc
    bash tools/setup.sh              on a machine without one: the same engines, without their CUDA dependencies

PyPI's `apex` is another project and is required nowhere.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

ROOT = Path(__file__).parent


def pinned(name: str) -> list[str]:
    """The requirements of requirements/<name>.txt."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


MEGATRON = "megatron-core==0.16.1"
SGLANG = "sglang==0.5.20"

setup(
    name="megathunder",
    version="0.1.0",
    description="Agentic reinforcement learning whose learner differentiates while the rollouts still run",
    python_requires=">=3.11,<3.13",
    packages=find_namespace_packages(include=["megathunder*"]),
    package_data={"": ["*.pl", "*.c", "*.md", "METADATA", "entry_points.txt"]},
    install_requires=[requirement for requirement in pinned("base") if not requirement.startswith("setuptools")],
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
    entry_points={
        "sglang.srt.plugins": [
            "megathunder_suffix_speculation = megathunder.speculation.plugin:install",
        ]
    },
)
