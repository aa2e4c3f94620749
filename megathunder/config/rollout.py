"""How trajectories are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from megathunder.config.field_types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """[rollout] the SGLang servers and the agent loop in front of them."""

    agent: Reference = "builtin"
    """Who decides what is asked next: `builtin` (the loop of this package), `command` (a harness that speaks OpenAI's
    chat completions) or your own "file.py:run": async def run(task, client, sandbox) -> float | None."""
    agent_command: str = ""
    """The harness, one process a trajectory: a command line that finds OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL
    in its environment ({base_url} and {model} may stand in it). It runs outside the sandbox and must run nothing there
    that the policy says: commands go to /v1/session/exec."""
    tool_parser: str = "auto"
    """SGLang's function-call parser (`qwen25`, `llama3`, ...) of the calls of a harness's tools; `auto` goes by what
    the model's chat template writes."""
    urls: tuple[str, ...] = ()
    """Servers that already run; empty: this run starts its own."""
    servers: PositiveInt = 1
    """Servers to start when `urls` is empty."""
    host: str = "127.0.0.1"
    """Address the started servers bind to."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """First port of the started servers; 0 picks free ones."""
    device: str = "auto"
    """`cpu`, `cuda` or `auto` (cuda where there is one)."""
    first_gpu: NonNegativeInt = 0
    """GPU of the first started server; each takes as many as its tensor parallelism (`sglang.tp_size`), in order."""
    dtype: str = "float32"
    """Type the servers compute in."""
    cpu_cores: tuple[int, ...] = ()
    """Pin servers, agents and sandboxes to these cores; empty: no pinning."""
    cpu_kernels: Literal["auto", "torch", "off"] = "auto"
    """Servers on a CPU: `auto` computes whole decoder layers by kernels in C, compiled at first use (in plain torch
    where there is no C compiler, or with `torch`); `off` is SGLang's own path. Tokens are the same."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probabilities are those at this temperature."""
    top_p: Annotated[float, Meta(gt=0, le=1.0)] = 1.0
    """Nucleus; below 1 the trained log-probabilities are not those of the sampled distribution, so 1 is advised."""
    max_new_tokens: PositiveInt = 24
    """Tokens one turn may take."""
    max_tokens: PositiveInt = 512
    """Tokens one trajectory may take, prompt included."""
    observation_characters: PositiveInt = 160
    """Characters of tool output shown to the policy."""
    max_concurrent: PositiveInt = 64
    """Trajectories in flight at once."""
    deadline_s: PositiveFloat = 120.0
    """Wall-clock limit of one trajectory; a task may set a shorter one."""
    request_timeout_s: PositiveFloat = 60.0
    """Limit of one request to a server."""
    startup_timeout_s: PositiveFloat = 240.0
    """Limit for a started server to become healthy."""
    health_timeout_s: NonNegativeFloat = 60.0
    """A server that answers no health request for this long is dead (one whose process ends is dead at once)."""
    max_retries: NonNegativeInt = 2
    """Times a trajectory is run again after an infrastructure failure."""
    max_restarts: NonNegativeInt = 3
    """Times one server is restarted in a run."""
    api_key: str = ""
    """Key the servers ask for; empty: none (they bind to loopback)."""
    max_total_tokens: PositiveInt = 65536
    """Key-value cache of one server, tokens."""
    max_running_requests: PositiveInt = 64
    """Requests one server decodes at once."""
    command_latency_s: NonNegativeFloat = 0.0
    """Median of further seconds that each command takes (lognormal with sigma 1, at most 8 medians), as slow tools
    would (workloads for timing only)."""
    ignore_eos: bool = False
    """Sample every turn to its full length (workloads for timing only)."""
    speculation: Literal["off", "suffix"] = "off"
    """`suffix`: servers draft from earlier trajectories where that pays ([speculation]); samples are the same."""
    sglang: dict[str, str] = field(default_factory=dict)
    """Further SGLang server arguments by name, as strings (`{"mem_fraction_static": "0.5"}`)."""

    @property
    def gpus_per_server(self) -> int:
        """SGLang's tensor parallelism, by any of its names."""
        names = ("tp_size", "tensor_parallel_size", "tp")
        return next((int(self.sglang[name]) for name in names if name in self.sglang), 1)
