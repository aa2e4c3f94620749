"""Real servers and a stand-in for the learner, for the tests of publication."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from megathunder.config.publish import PublishConfig
from megathunder.config.root import Config
from megathunder.publish.publisher import Publisher
from megathunder.publish.transports.base import Transport
from megathunder.rollout.servers.command import choose_port
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.server import ServerProcess, start_server
from megathunder.types import Publish, ServerAddress, WorkStats

POLICY = Path(__file__).parents[2] / "examples" / "policies" / "student"
PROMPT = tuple(range(20, 60))
versions = itertools.count(1)  # one count for all tests of a server: versions only grow


class Servers:
    """`addresses` of running servers; everything asynchronous runs on one loop in a thread of its own."""

    def __init__(
        self, folder: Path, models: tuple[Path, ...], tensor_parallel: tuple[int, ...] = (), **settings: object
    ) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.config = dataclasses.replace(Config().rollout, max_total_tokens=8192, max_running_requests=8, **settings)
        self._folder, self._models = folder, models
        self._tensor_parallel = tensor_parallel or (1,) * len(models)
        self.processes: list[ServerProcess] = self.run(self._start(len(models)))
        self.addresses = tuple(
            ServerAddress(name=f"rollout-{i}", url=process.url) for i, process in enumerate(self.processes)
        )

    def run(self, work: object) -> object:
        """The result of a coroutine."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=200)

    async def _start(self, count: int) -> list[ServerProcess]:
        return await asyncio.gather(*(self._start_one(i) for i in range(count)))

    async def _start_one(self, index: int) -> ServerProcess:
        return await start_server(
            dataclasses.replace(self.config, sglang={"tp_size": str(self._tensor_parallel[index])}),
            model=self._models[index],
            port=choose_port("127.0.0.1", 0),
            device="cpu",
            version=0,
            log=self._folder / f"server-{index}.log",
        )

    def restart(self, index: int) -> ServerAddress:
        """End a server, start one with the first weights in its place; its address, one incarnation later."""
        self.run(self.processes[index].kill())
        self.processes[index] = self.run(self._start_one(index))
        old = self.addresses[index]
        new = ServerAddress(name=old.name, url=self.processes[index].url, incarnation=old.incarnation + 1)
        self.addresses = tuple(new if i == index else a for i, a in enumerate(self.addresses))
        return new

    def version(self, server: ServerAddress) -> int:
        async def ask() -> int:
            async with ServerControl(timeout_s=20.0) as control:
                return await control.version(server)

        return self.run(ask())

    def logprobs(self, server: ServerAddress, tokens: tuple[int, ...] = PROMPT) -> torch.Tensor:
        """[T - 1] log-probabilities of tokens[1:] by the server."""

        async def ask() -> list[float]:
            body = {
                "input_ids": list(tokens),
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            async with aiohttp.ClientSession() as session, session.post(server.url + "/generate", json=body) as answer:
                found = await answer.json()
            return [x[0] for x in found["meta_info"]["input_token_logprobs"][1:]]

        return torch.tensor(self.run(ask()))

    def fill_cache(self, server: ServerAddress) -> None:
        """Leave keys and values of PROMPT under the current weights in the server's prefix cache."""

        async def ask() -> None:
            body = {"input_ids": list(PROMPT), "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
            async with aiohttp.ClientSession() as session, session.post(server.url + "/generate", json=body) as answer:
                await answer.json()

        self.run(ask())

    def continuation(self, server: ServerAddress) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens after PROMPT and their log-probabilities, through whatever the prefix cache holds."""

        async def ask() -> dict:
            params = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": list(PROMPT), "sampling_params": params, "return_logprob": True}
            async with aiohttp.ClientSession() as session, session.post(server.url + "/generate", json=body) as answer:
                return await answer.json()

        found = self.run(ask())
        return found["output_ids"], torch.tensor([x[0] for x in found["meta_info"]["output_token_logprobs"]])

    def close(self) -> None:
        for process in self.processes:
            self.run(process.kill())
        self._loop.call_soon_threadsafe(self._loop.stop)


class Policy:
    """The learner's weights: a transformers model that is changed at random and published."""

    def __init__(self, servers: Servers, folder: Path, sender: Transport | None = None, **settings: object) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32).eval()
        self._random = torch.Generator().manual_seed(7)
        self.servers = servers
        config = Config(publish=PublishConfig(**{"timeout_s": 20.0, **settings}))
        config = dataclasses.replace(
            config,
            rollout=servers.config,
            learner=dataclasses.replace(config.learner, model=str(POLICY)),
        )
        self.publisher = Publisher(
            config,
            export_weights=self.export,
            rank=0,
            device=torch.device("cpu"),
            host="127.0.0.1",
            folder=folder,
            transport=sender,
        )

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.data

    @torch.no_grad()
    def step(self, fraction: float = 0.05, size: float = 0.02) -> None:
        """Change about `fraction` of the elements."""
        for parameter in self.model.parameters():
            chosen = torch.rand(parameter.shape, generator=self._random) < fraction
            parameter.add_(chosen * size * torch.randn(parameter.shape, generator=self._random))

    def publish(self, addresses: tuple[ServerAddress, ...] | None = None) -> tuple[int, WorkStats]:
        """The version and what the publisher reports."""
        version = next(versions)
        servers = self.servers.addresses if addresses is None else addresses
        return version, self.publisher.publish(Publish(item=0, version=version, servers=servers))

    @torch.no_grad()
    def logprobs(self, tokens: tuple[int, ...] = PROMPT) -> torch.Tensor:
        """[T - 1] recomputed in full."""
        logits = self.model(torch.tensor([tokens])).logits[0, :-1]
        return logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@contextlib.contextmanager
def running(
    folder: Path, *models: Path, tensor_parallel: tuple[int, ...] = (), **settings: object
) -> Iterator[Servers]:
    """A server of each model; `settings` are those of the rollout section."""
    servers = Servers(folder, models, tensor_parallel, **settings)
    try:
        yield servers
    finally:
        servers.close()
