"""Checks of the machine a run starts on: cores, devices, ports, folders. Called by `checks.py`."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from megathunder.config.kernels import choose_layers, choose_optimizer
from megathunder.config.root import Config
from megathunder.errors import ConfigError
from megathunder.hardware import GPUS
from megathunder.processes import missing_cores, port_error
from megathunder.registry import SINKS

SINK_PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboardX", "trackio": "trackio", "mlflow": "mlflow"}

PYTHON = "/usr/bin/python3"  # what sandboxes have
LOOPBACK = {"127.0.0.1", "localhost", "::1"}


def check_harness_exists(config: Config) -> None:
    """With `rollout.agent = "command"`: its program, and the scripts that its command line names."""
    rollout = config.rollout
    if rollout.agent != "command":
        return
    words = shlex.split(rollout.agent_command)
    if not words:
        raise ConfigError(
            "rollout.agent = 'command' with no rollout.agent_command",
            expected="the command line of an agent harness",
            remedy="for example 'python examples/agents/mini_swe_agent.py', or set rollout.agent = 'builtin'",
        )
    missing = [] if words[0] == "python" or shutil.which(words[0]) else [words[0]]
    missing += [word for word in words[1:] if word.endswith(".py") and not Path(word).is_file()]
    if missing:
        raise ConfigError(
            f"rollout.agent_command names {', '.join(missing)}",
            expected="programs and scripts that exist, seen from the folder the run is started in",
            remedy="correct the name, or install the harness (tools/setup.sh has mini-swe-agent)",
        )


def check_task_files(config: Config) -> None:
    """Tasks from files need their files, and a Python with pytest for sandboxes, which hold /usr and pytest alone."""
    tasks = config.tasks
    if tasks.source == "math" and tasks.path and not Path(tasks.path).is_file():
        raise ConfigError(
            f"tasks.source = 'math' with tasks.path = {tasks.path!r}",
            expected="a file of problems with answers (JSON, JSONL or Parquet)",
            remedy="name one, or set tasks.path = '' for arithmetic that is made up",
        )
    if tasks.source not in ("swe", "terminal"):
        return
    if not tasks.path or not Path(tasks.path).exists():
        raise ConfigError(
            f"tasks.source = {tasks.source!r} with tasks.path = {tasks.path!r}",
            expected="an existing file or folder of tasks",
            remedy=f"set tasks.path = 'examples/tasks/{tasks.source}', or prepare some with tools/prepare_data.py",
        )
    missing = [name for name, there in (("pytest", find_spec("pytest")), (PYTHON, Path(PYTHON).exists())) if not there]
    if missing:
        raise ConfigError(
            f"tasks.source = {tasks.source!r}, and {' and '.join(missing)} is missing",
            expected=f"{PYTHON} (3.10 or newer), and pytest beside this package",
            remedy="bash tools/setup.sh; apt-get install python3",
        )


def check_router_installed(config: Config) -> None:
    """An external router is a package of its own."""
    if config.routing.policy == "sglang_router" and find_spec("sglang_router") is None:
        raise ConfigError(
            "routing.policy = 'sglang_router', and the package sglang-router is not installed",
            expected="sglang-router in this environment",
            remedy="pip install --no-deps -r requirements/router.txt, or choose another routing.policy",
        )


def check_sinks(config: Config) -> None:
    """Every sink is known, and what it needs is installed."""
    for name in config.metrics.sinks:
        SINKS.get(name)
        package = SINK_PACKAGES.get(name, name)
        if name in SINK_PACKAGES and find_spec(package) is None:
            raise ConfigError(
                f"metrics.sinks names {name!r}, and the package {package} is not installed",
                expected=f"{package} in this environment",
                remedy=f"pip install -e .[{name}], or leave {name!r} out of metrics.sinks",
            )


def check_cpu_cores(config: Config) -> None:
    available = sorted(os.sched_getaffinity(0))
    wanted = {"rollout.cpu_cores": config.rollout.cpu_cores, "learner.cpu_cores": config.learner.cpu_cores}
    for setting, cores in wanted.items():
        if missing := missing_cores(cores):
            raise ConfigError(
                f"{setting} = {list(cores)}; this process may not use {missing}",
                expected=f"cores out of {available}",
                remedy=f"set {setting} = [] for no pinning",
            )


def check_devices(config: Config) -> None:
    for setting, device in (("rollout.device", config.rollout.device), ("learner.device", config.learner.device)):
        if device not in ("cpu", "cuda", "auto"):
            raise ConfigError(f"{setting} = {device!r}", expected="cpu, cuda or auto", remedy=f"set {setting} = 'auto'")
        if device == "cuda" and not Path("/dev/nvidiactl").exists():
            raise ConfigError(
                f"{setting} = 'cuda', and no NVIDIA driver on this machine",
                expected="a GPU",
                remedy=f"set {setting} = 'auto' or 'cpu'",
            )


def check_kernels(config: Config) -> None:
    """On this machine; every rank asks again on its own."""
    device = config.learner.device
    cuda = device == "cuda" or (device == "auto" and Path("/dev/nvidiactl").exists())
    choose_layers(config.learner, cuda=cuda)
    choose_optimizer(config.learner, cuda=cuda)


def check_ports(config: Config) -> None:
    rollout = config.rollout
    if rollout.urls or not rollout.port:
        return
    for port in range(rollout.port, rollout.port + rollout.servers):
        if error := port_error(rollout.host, port):
            raise ConfigError(
                f"rollout.port = {rollout.port} with {rollout.servers} server(s): cannot listen at "
                f"{rollout.host}:{port} ({error})",
                expected="free ports from rollout.port on",
                remedy="set rollout.port = 0 to have free ones chosen, or stop what is in use there",
            )


def check_server_urls(config: Config) -> None:
    """Those of the policy and of the teacher that already run."""
    check_urls("rollout.urls", config.rollout.urls)
    check_urls("opd.teacher_urls", config.opd.teacher_urls)


def check_urls(setting: str, urls: Sequence[str]) -> None:
    """Raise ConfigError, naming `setting`, at the first of `urls` that no request could be sent to."""
    for url in urls:
        try:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port or a bracketed host that is none
            whole = False
        if not whole:
            raise ConfigError(
                f"{setting} names {url!r}",
                expected="addresses as http://HOST:PORT, or https",
                remedy=f"correct {setting}",
            )


def check_server_exposure(config: Config) -> None:
    rollout = config.rollout
    if not rollout.urls and rollout.host not in LOOPBACK and not rollout.api_key:
        raise ConfigError(
            f"rollout.host = {rollout.host!r} with no rollout.api_key",
            expected="a key where others can reach the servers: whoever reaches one can replace its weights",
            remedy="set rollout.api_key, or rollout.host = '127.0.0.1'",
        )


def check_gpu_name(config: Config) -> None:
    hardware = config.hardware
    if hardware.gpu and not hardware.gpu_memory_gib and hardware.gpu.upper() not in GPUS:
        raise ConfigError(
            f"hardware.gpu = {hardware.gpu!r}",
            expected=f"one of {', '.join(GPUS)}",
            remedy="set hardware.gpu_memory_gib to the memory of one GPU",
        )


def check_rank_count(config: Config, ranks: int) -> None:
    """Not among CHECKS: `ranks` is what torchrun started."""
    meant = config.hardware.learner_ranks
    if meant and meant != ranks:
        raise ConfigError(
            f"{ranks} learner rank(s), hardware.learner_ranks = {meant}",
            expected=f"{meant}: the layout and its memory plan are made for that many",
            remedy=f"torchrun --nnodes N --nproc-per-node M with N x M = {meant}, or set hardware.learner_ranks = 0",
        )


def check_server_count(config: Config) -> None:
    servers = len(config.rollout.urls) or config.rollout.servers
    if config.publish.min_servers > servers:
        raise ConfigError(
            f"publish.min_servers = {config.publish.min_servers}, {servers} rollout server(s)",
            expected="no more than there are servers",
            remedy=f"set publish.min_servers = {servers}, or rollout.servers = {config.publish.min_servers}",
        )


def check_delta_checksum(config: Config) -> None:
    publish = config.publish
    if publish.transport in ("delta", "auto") and not publish.checksum:
        raise ConfigError(
            f"publish.transport = {publish.transport!r} with publish.checksum = false",
            expected="true: a change may only be added to weights whose checksum is known",
            remedy="set publish.checksum = true, or publish.transport = 'distributed'",
        )


def check_publish_folder(config: Config) -> None:
    """Where weights travel by file, and a folder is named."""
    publish = config.publish
    if not publish.folder or not (publish.transport == "disk" or publish.delta_through == "folder"):
        return
    folder = Path(publish.folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise ConfigError(
            f"publish.folder = {publish.folder!r}: {there} is no folder that this process may write to",
            expected="a folder that learner and servers share",
            remedy="set publish.folder to one, or leave it empty for the run's own folder",
        )


def check_adapter_publication(config: Config) -> None:
    publish, learner = config.publish, config.learner
    if publish.lora == "merged":
        return
    if not learner.lora_rank:
        raise ConfigError(
            "publish.lora = 'adapter' with learner.lora_rank = 0",
            expected="adapters that are trained",
            remedy="set learner.lora_rank, say 16, or publish.lora = 'merged'",
        )
    if not publish.checksum or learner.dtype == "float64":
        raise ConfigError(
            f"publish.lora = 'adapter' with publish.checksum = {str(publish.checksum).lower()} and learner.dtype = "
            f"{learner.dtype!r}",
            expected="acknowledged checksums, and factors in float32 or bfloat16: the servers merge to the same bits",
            remedy="set publish.checksum = true and learner.dtype = 'float32', or publish.lora = 'merged'",
        )


def check_run_folder(config: Config) -> None:
    run = config.run
    if run.name in ("", ".", "..") or "/" in run.name:
        raise ConfigError(
            f"run.name = {run.name!r}", expected="the name of one folder", remedy="set run.folder for its parent"
        )
    if run.resume and run.overwrite:
        raise ConfigError(
            "run.resume and run.overwrite", expected="one of them", remedy="drop --run.overwrite to continue the run"
        )
    folder = Path(run.folder) / run.name
    rows = folder / "metrics.jsonl"
    holds = (rows.exists() and rows.stat().st_size > 0) or any((folder / "checkpoints").glob("*"))
    if holds and not (run.resume or run.overwrite):
        raise ConfigError(
            f"{folder} already holds a run",
            expected="a new name",
            remedy="--run.name NEW, --run.resume to continue it, or --run.overwrite to start it anew",
        )
