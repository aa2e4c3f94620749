"""The Dockerfile: a linter passes it, and what it installs is what setup.py and the engines ask for, pinned.

It is not built here: that takes a registry of images, nvcc and an hour.
"""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import setuptools
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
HADOLINT = Path(sys.executable).with_name("hadolint")
TEXT = (ROOT / "Dockerfile").read_bytes()


@pytest.fixture(scope="module")
def commands() -> list[tuple[str, str]]:
    """(instruction, value with variables as they stand) of the Dockerfile, in order."""
    parsed = DockerfileParser(fileobj=io.BytesIO(TEXT))
    return [(step["instruction"], step["value"]) for step in parsed.structure if step["instruction"] != "COMMENT"]


@pytest.fixture(scope="module")
def installed(commands: list[tuple[str, str]]) -> dict[str, Requirement]:
    """Every requirement of the files that its RUN lines install, by name."""
    files = [name for kind, value in commands if kind == "RUN" for name in re.findall(r"-r (\S+)", value)]
    assert files
    found = [Requirement(line) for name in files for line in _lines(name)]
    return {canonicalize_name(r.name): r for r in found}


def _lines(name: str) -> list[str]:
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _setup_arguments(monkeypatch: pytest.MonkeyPatch) -> dict:
    arguments: dict = {}
    monkeypatch.setattr(setuptools, "setup", lambda **given: arguments.update(given))
    runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def test_the_linter_has_nothing_to_say() -> None:
    linted = subprocess.run([HADOLINT, "-"], input=TEXT, capture_output=True, check=False)
    assert linted.returncode == 0, linted.stdout.decode()


def test_the_linter_would_have_something_to_say() -> None:
    linted = subprocess.run([HADOLINT, "-"], input=b"FROM debian\nRUN cd / && pip install apex\n", capture_output=True)
    assert linted.returncode != 0
    assert b"DL3013" in linted.stdout  # an unpinned package


def test_image_and_source_builds_are_pinned(commands: list[tuple[str, str]]) -> None:
    images = [value for kind, value in commands if kind == "FROM"]
    assert [
        re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-cudnn-devel-ubuntu\d+\.\d+", image) is not None for image in images
    ]
    arguments = dict(value.split("=", 1) for kind, value in commands if kind == "ARG")
    assert re.fullmatch(r"\d\d\.\d\d", arguments["APEX_TAG"])
    clones = [value for kind, value in commands if kind == "RUN" and "git clone" in value]
    assert len(clones) == 1 and '--branch "${APEX_TAG}"' in clones[0] and "github.com/NVIDIA/apex.git" in clones[0]


def test_every_package_is_pinned_and_no_apex_comes_from_an_index(
    commands: list[tuple[str, str]], installed: dict[str, Requirement]
) -> None:
    for requirement in installed.values():
        assert [s.operator for s in requirement.specifier] == ["=="], requirement
    assert "apex" not in installed
    for _, value in (c for c in commands if c[0] == "RUN"):
        for line in re.findall(r"pip install ([^&]*)", value):
            loose = [w for w in re.sub(r"-r \S+", "", line).split() if not w.startswith("-")]
            assert set(loose) <= {'"pip==${PIP_VERSION}"', "/tmp/apex", "."}, loose


def test_what_setup_py_asks_for_is_installed_at_a_pinned_version_that_it_allows(
    installed: dict[str, Requirement], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = _setup_arguments(monkeypatch)
    extras = arguments["extras_require"]
    wanted = arguments["install_requires"] + extras["gpu"] + extras["wandb"] + extras["test"]
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        (pin,) = installed[name].specifier
        assert pin.operator == "==" and pin.version in requirement.specifier, requirement
        assert installed[name].extras == requirement.extras
    assert {"torch", "sglang", "megatron-core", "transformer-engine", "nvidia-ml-py"} <= set(installed)


@pytest.mark.parametrize("engine", ["sglang", "megatron-core"])
def test_pins_are_what_the_engines_allow(engine: str, installed: dict[str, Requirement]) -> None:
    checked = set()
    for wanted in map(Requirement, requires(engine)):
        ours = installed.get(canonicalize_name(wanted.name))
        if ours is None or (wanted.marker and not wanted.marker.evaluate({"extra": "dev"})):
            continue
        pin = next(iter(ours.specifier)).version
        assert wanted.specifier.contains(pin, prereleases=True), f"{engine} wants {wanted}, pinned {ours}"
        checked.add(canonicalize_name(wanted.name))
    assert {"sglang": {"torch", "transformers"}, "megatron-core": {"torch", "transformer-engine"}}[engine] <= checked


def test_one_cuda_version_throughout(commands: list[tuple[str, str]], installed: dict[str, Requirement]) -> None:
    image = next(value for kind, value in commands if kind == "FROM")
    major = image.partition(":")[2].partition(".")[0]
    assert f"core_cu{major}" in installed["transformer-engine"].extras
    kernels = [r for r in map(Requirement, requires("sglang")) if any(e.startswith("cu") for e in r.extras)]
    assert kernels and {e for r in kernels for e in r.extras if e.startswith("cu")} == {f"cu{major}"}
    built = [value for kind, value in commands if kind == "RUN" and "torch.version.cuda" in value]
    assert f'== "{major}"' in built[0]
