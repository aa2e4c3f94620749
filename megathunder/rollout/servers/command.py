"""The command line and environment of one SGLang server, on a CPU or a GPU.

Settings that `RolloutConfig` owns come first; `rollout.sglang` adds to them or replaces them by SGLang's own names
("true" is a bare flag, "false" leaves it out). Token ids travel both ways, so the server loads no tokenizer.
Called by `server.py`. Refuses ports in use.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from megathunder.config.rollout import RolloutConfig
from megathunder.config.speculation import PLUGIN, SpeculationConfig
from megathunder.errors import ConfigError
from megathunder.processes import port_error
from megathunder.rollout.servers.cpu_kernels import settings
from megathunder.speculation.settings import settings_variable

CPU_ENGINE = Path(__file__).parent / "cpu_engine"
PACKAGE_PARENT = Path(__file__).parents[3]
WEIGHT_LOADER = "megathunder.publish.engine.loader.load"  # imported by the server when weights first come that way
PORTS = range(20000, 32000)  # below the range the kernel hands out, so a port stays free while a server loads

CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "mem_fraction_static": "0.5",
    "sleep_on_idle": "true",  # otherwise an idle server burns a core
    "disable_overlap_schedule": "true",  # one thread: the overlap has nothing to hide behind
}
GPU_ARGUMENTS = {"device": "cuda"}
CPU_PLUGINS = ("megathunder_seeded_sampling", "megathunder_forked_start", settings.PLUGIN, "megathunder_core_sharing")


def resolve_device(device: str) -> str:
    """`cpu` or `cuda`; `auto` is `cuda` where torch sees one."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def server_command(
    config: RolloutConfig,
    *,
    model: Path,
    port: int,
    device: str,
    version: int,
    index: int = 0,
    speculation: SpeculationConfig | None = None,
) -> list[str]:
    """`python -m sglang.launch_server ...` for a server of `model` that starts at policy version `version`; on GPUs the
    `index`-th server takes the GPUs after those of the servers before it. `speculation`: it drafts."""
    arguments = {
        "model_path": str(model),
        "host": config.host,
        "port": str(port),
        "dtype": config.dtype,
        "weight_version": str(version),
        "max_total_tokens": str(config.max_total_tokens),
        "max_running_requests": str(config.max_running_requests),
        "skip_tokenizer_init": "true",
        "skip_server_warmup": "true",
        "custom_weight_loader": WEIGHT_LOADER,
        "log_level": "warning",
        **(CPU_ARGUMENTS if device == "cpu" else GPU_ARGUMENTS | _gpus(config, index)),
        **({"api_key": config.api_key} if config.api_key else {}),
        **(_speculation(speculation) if speculation else {}),
        **config.sglang,
    }
    command = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        if value.lower() != "false":
            command.append("--" + name.replace("_", "-"))
            command.extend([] if value.lower() == "true" else [value])
    return command


def _speculation(speculation: SpeculationConfig) -> dict[str, str]:
    width = speculation.max_draft_tokens + 1  # and the token that is sampled anyway
    return {"speculative_algorithm": "SUFFIX", "speculative_num_draft_tokens": str(width)}


def _gpus(config: RolloutConfig, index: int) -> dict[str, str]:
    return {"base_gpu_id": str(config.first_gpu + index * config.gpus_per_server)}


def server_environment(
    device: str,
    temporary: Path,
    *,
    ranks: int = 1,
    speculation: SpeculationConfig | None = None,
    cpu_kernels: str = "auto",
) -> dict[str, str]:
    """The caller's environment, no network look-ups, on a CPU one thread and the stand-ins on the path, and the
    plug-ins the server loads with the settings of `speculation`. `ranks`: the server's tensor parallelism.
    `cpu_kernels`: as `RolloutConfig.cpu_kernels`."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TMPDIR": str(temporary)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)  # torchrun's: the server is no rank of the learner
    path = [str(PACKAGE_PARENT), *filter(None, [environment.get("PYTHONPATH")])]
    if device == "cpu":
        path.insert(0, str(CPU_ENGINE))
        environment.update(SGLANG_USE_CPU_ENGINE="1", OMP_NUM_THREADS="1")
        environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
        environment[settings.VARIABLE] = cpu_kernels
        environment["TORCHDYNAMO_DISABLE"] = "1"  # the sharded embedding would be compiled with triton
        if ranks > 1:  # SGLang wants a place for each rank, and would bind to it with the real kernels
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    plugins = [*(CPU_PLUGINS if device == "cpu" else ()), *([PLUGIN] if speculation else ())]
    if plugins:
        environment["SGLANG_PLUGINS"] = ",".join(plugins)
    if speculation:
        environment.update(settings_variable(speculation))
    environment["PYTHONPATH"] = os.pathsep.join(path)
    return environment


def choose_port(host: str, wanted: int) -> int:
    """`wanted`, or a free port where it is 0; an error where it is taken."""
    if wanted:
        if error := port_error(host, wanted):
            raise ConfigError(
                f"port {wanted} on {host}: {error}",
                expected="a free port for a rollout server",
                remedy="stop the program that listens there, or set rollout.port = 0 to pick a free one",
            )
        return wanted
    for port in random.sample(PORTS, 200):
        if not port_error(host, port):
            return port
    raise ConfigError(
        f"no free port among 200 tried in {PORTS.start}-{PORTS.stop} on {host}",
        expected="a free port for a rollout server",
        remedy="set rollout.port to a free one",
    )
