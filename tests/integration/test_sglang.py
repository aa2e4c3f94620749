"""One real SGLang server: its tokens, log-probabilities, versions and cache, its weights, its death."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from tiny_model import VOCABULARY, largest_difference, logprobs, make_model

from megathunder.config.rollout import RolloutConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.errors import ConfigError, InfrastructureFailure
from megathunder.publish.group import Pairs
from megathunder.publish.publish_session import PublishSession
from megathunder.publish.transports.distributed import DistributedTransport
from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.servers.client import EngineClient
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.protocol import SamplingParams
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.tasks import ExactAnswer, Task
from megathunder.types import Rewarded, TrajectoryCompleted, TrajectoryLost

FIRST_VERSION = 3
CONFIG = RolloutConfig(device="cpu", ignore_eos=True, max_new_tokens=6, max_tokens=120)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server, a loop to talk to it in, and the same model in transformers (`.model`, kept at its weights)."""
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder)
    restarted = []

    async def on_restart(address):
        async with ServerControl(timeout_s=10.0) as control:
            restarted.append((address.incarnation, await control.version(address), pool.ready))
            await control.set_version(address, world.version)

    pool = ServerPool(
        CONFIG, folder, folder=tmp_path_factory.mktemp("logs"), policy_version=FIRST_VERSION, on_restart=on_restart
    )
    with asyncio.Runner() as runner:
        world = SimpleNamespace(
            run=runner.run, pool=pool, model=model, folder=folder, restarted=restarted, version=FIRST_VERSION
        )
        runner.run(pool.start())
        yield world
        started = pool.process_ids
        runner.run(pool.close())
    assert not any(psutil.pid_exists(pid) for pid in started)


def ask(served, act):
    """Run act(client, control, address) against the server."""

    async def main():
        async with EngineClient(timeout_s=30.0) as client, ServerControl(timeout_s=30.0) as control:
            return await act(client, control, served.pool.ready[0])

    return served.run(main())


def prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(1, VOCABULARY) for _ in range(length))


def sampling(tokens: int = 8, temperature: float = 1.0, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=temperature, ignore_eos=True, sampling_seed=seed)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_engine_logprobs_equal_transformers_alone_and_in_a_batch(served, temperature):
    async def act(client, control, server):
        prompts = [prompt(5 + 7 * i, seed=i) for i in range(12)]
        together = [
            client.generate(server, p, sampling(temperature=temperature, seed=i)) for i, p in enumerate(prompts)
        ]
        alone = await client.generate(server, prompts[0], sampling(temperature=temperature))
        return [(prompts[0], alone), *zip(prompts, await asyncio.gather(*together))]

    for given, generation in ask(served, act):
        expected = logprobs(served.model, given + generation.token_ids, temperature)[len(given) - 1 :]
        assert largest_difference(expected, list(generation.logprobs)) < 1e-4
        assert len(generation.token_ids) == 8 and generation.finish_reason == "length"


def test_greedy_sampling_reports_logprobs_at_temperature_one(served):
    given = prompt(9, seed=50)
    generation = ask(served, lambda client, control, server: client.generate(server, given, sampling(temperature=0.0)))
    expected = logprobs(served.model, given + generation.token_ids)[len(given) - 1 :]
    assert largest_difference(expected, list(generation.logprobs)) < 1e-4


def test_the_stop_token_is_part_of_the_turn_and_has_a_logprob(served):
    given = prompt(9, seed=51)

    async def act(client, control, server):
        free = await client.generate(server, given, sampling(tokens=20, seed=5))
        stop = SamplingParams(max_new_tokens=20, stop_token_ids=(free.token_ids[4],), sampling_seed=5)
        return free, await client.generate(server, given, stop)

    free, stopped = ask(served, act)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(free.token_ids[4]) + 1]
    assert len(stopped.logprobs) == len(stopped.token_ids) == len(stopped.policy_versions)


def test_a_seed_draws_the_same_tokens_whatever_else_is_in_the_batch(served):
    given = prompt(9, seed=52)

    async def act(client, control, server):
        alone = await client.generate(server, given, sampling(tokens=12, seed=7))
        crowd = [client.generate(server, given, sampling(tokens=12, seed=7 + i)) for i in range(8)]
        return alone, await asyncio.gather(*crowd)

    alone, crowd = ask(served, act)
    assert crowd[0].token_ids == alone.token_ids
    assert len({generation.token_ids for generation in crowd}) == len(crowd)


def test_given_tokens_are_scored_as_transformers_scores_them(served):
    chain = prompt(40, seed=53)

    async def act(client, control, server):
        await client.generate(server, chain[:30], sampling())  # a cached prefix must not shift the slice
        return [await client.score(server, chain, start) for start in (1, 17, 39)]

    for start, scored in zip((1, 17, 39), ask(served, act)):
        assert largest_difference(logprobs(served.model, chain)[start - 1 :], list(scored)) < 1e-4


def test_every_token_carries_the_version_the_server_was_given(served):
    async def act(client, control, server):
        first = await client.generate(server, prompt(4, seed=54), sampling())
        await control.set_version(server, 57)
        second = await client.generate(server, prompt(4, seed=54), sampling())
        version = await control.version(server)
        await control.set_version(server, served.version)
        return first, second, version

    first, second, version = ask(served, act)
    assert set(first.policy_versions) == {FIRST_VERSION} and len(first.policy_versions) == 8
    assert set(second.policy_versions) == {57} and version == 57


def test_a_shared_prefix_is_cached_until_it_is_flushed(served):
    given = prompt(64, seed=55)

    async def act(client, control, server):
        cached = []
        for flush in (True, False, True):
            if flush:
                await control.flush_cache(server)
            cached.append((await client.generate(server, given, sampling())).cached_tokens)
        return cached

    assert ask(served, act) == [0, 63, 0]


def test_an_abort_ends_a_request_early(served):
    async def act(client, control, server):
        request = asyncio.create_task(client.generate(server, prompt(4, seed=56), sampling(tokens=900), timeout_s=2.0))
        await asyncio.sleep(0.3)
        for _ in range(4):  # the client asks again each time, as it does when a server dies under it
            await control.abort(server)
            await asyncio.sleep(0.3)
        with pytest.raises(InfrastructureFailure):
            await request

    ask(served, act)


def test_new_weights_leave_nothing_of_the_old_ones_in_the_cache(served):
    given = prompt(64, seed=57)
    ask(served, lambda client, control, server: client.generate(server, given, sampling()))
    with torch.no_grad():
        for parameter in served.model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    weights = [(name, value.detach()) for name, value in served.model.named_parameters()]
    pairs = Pairs(backend="gloo", timeout_s=30.0, host="127.0.0.1")
    transport = DistributedTransport(pairs, bucket_bytes=1 << 17)
    served.version = FIRST_VERSION + 1
    servers = served.pool.ready
    with PublishSession(servers, api_key="", timeout_s=30.0) as round:
        round.each(round.open_update, servers)
        sent = transport.send(round, servers, served.version, weights)
    assert not round.failed and sent == sum(value.nbytes for _, value in weights)
    generation = ask(served, lambda client, control, server: client.generate(server, given, sampling()))
    assert generation.cached_tokens == 0 and set(generation.policy_versions) == {served.version}
    expected = logprobs(served.model, given + generation.token_ids)[len(given) - 1 :]
    assert largest_difference(expected, list(generation.logprobs)) < 1e-4
    served.model.save_pretrained(served.folder)  # what a restarted server will load


class NumberChat:
    """Prompts and observations of raw ids; every turn is a command."""

    end_token_id = 0

    def prompt_ids(self, text: str) -> list[int]:
        return [1, 2, 3, *text.encode()]

    def observation_ids(self, text: str) -> list[int]:
        return [4, *text.encode()]

    def action_text(self, token_ids: tuple[int, ...]) -> str:
        return " ".join(map(str, token_ids))


class EchoSandboxes:
    """A sandbox that takes a moment and shows the length of the command."""

    async def lease(self, files: object, image: str) -> EchoSandboxes:
        return self

    async def exec(self, command: str, deadline_s: float) -> SimpleNamespace:
        await asyncio.sleep(0.05)
        return SimpleNamespace(output=str(len(command)), exit_status=0, notice="", wall_s=0.05)

    async def close(self) -> None:
        pass


async def never(*_: object) -> float:
    raise AssertionError("nothing was submitted, so nothing is graded")


def collect(served, groups, during=None):
    """Run one trajectory a task on the server; `during` acts while they run."""
    events = []

    async def main():
        async with Collector(
            CONFIG,
            SandboxConfig(),
            servers=served.pool,
            sandboxes=EchoSandboxes(),
            grade=never,
            chat=NumberChat(),
            seed=0,
            teacher=served.pool,
        ) as collector:
            sampled = asyncio.create_task(collector.collect(0, served.version, groups, events.append))
            if during is not None:
                await during(events)
            await asyncio.wait_for(sampled, 150.0)

    served.run(main())
    return events


def tasks(turns: int) -> list[list[Task]]:
    return [[Task(id="t", kind="k", prompt="go", files=(), grading=ExactAnswer(answer=""), max_turns=turns)] * 4] * 2


def test_a_trajectory_is_the_same_chain_of_tokens_in_engine_and_transformers(served):
    events = collect(served, tasks(turns=3))
    done = [event.trajectory for event in events if isinstance(event, TrajectoryCompleted)]
    scores = [event for event in events if type(event).__name__ == "TurnScored"]
    assert len(done) == 8 and len(scores) == 24
    for trajectory in done:
        row = trajectory.rows[0]
        assert sum(row.loss_mask) == 18 and set(row.policy_versions) == {served.version}
        expected = logprobs(served.model, row.token_ids)
        pairs = [(x, y) for x, y, m in zip(expected, row.engine_logprobs[1:], row.loss_mask[1:]) if m]
        assert max(abs(x - y) for x, y in pairs) < 1e-4
        mine = sorted((s.turn, s.teacher_logprobs) for s in scores if s.id == trajectory.id)
        assert max(abs(x - y) for (x, _), y in zip(pairs, (v for _, values in mine for v in values))) < 1e-4


def test_the_same_seeds_collect_the_same_tokens_again(served):
    runs = [collect(served, tasks(turns=3)) for _ in range(2)]
    first, second = (
        {e.trajectory.id: e.trajectory.rows[0].token_ids for e in events if isinstance(e, TrajectoryCompleted)}
        for events in runs
    )
    assert first == second


@pytest.mark.parametrize("victim", ["server", "scheduler"])
def test_a_killed_server_comes_back_and_no_trajectory_is_lost(served, victim):
    known = len(served.restarted)
    (leader,) = served.pool.process_ids
    family = [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]
    target = leader if victim == "server" else next(p.pid for p in family if "scheduler" in p.name())

    async def kill(events):
        while len(events) < 10:
            await asyncio.sleep(0.01)
        os.kill(target, signal.SIGKILL)

    before = collect(served, tasks(turns=5))
    after = collect(served, tasks(turns=5), kill)
    rows = [
        {e.trajectory.id: e.trajectory.rows[0].token_ids for e in events if isinstance(e, TrajectoryCompleted)}
        for events in (before, after)
    ]
    assert rows[0] == rows[1] and len(rows[1]) == 8
    assert sum(isinstance(event, Rewarded) for event in after) == 8
    assert not any(isinstance(event, TrajectoryLost) for event in after)
    incarnation, version, ready = served.restarted[known]
    assert incarnation == known + 1 and version == FIRST_VERSION  # what the new process calls its weights
    assert not ready  # no work before the weights were sent again
    assert not any(process.is_running() for process in family)


def test_a_port_in_use_is_an_error_at_once(tmp_path):
    make_model(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        pool = ServerPool(RolloutConfig(device="cpu", port=port), tmp_path, folder=tmp_path)
        started = time.monotonic()
        with pytest.raises(ConfigError, match=f"port {port}.*in use(.|\n)*rollout.port = 0"):
            asyncio.run(pool.start())
        assert time.monotonic() - started < 5


def test_a_missing_model_folder_is_an_error_at_once(tmp_path):
    pool = ServerPool(RolloutConfig(device="cpu"), tmp_path / "absent", folder=tmp_path)
    with pytest.raises(ConfigError, match="config.json"):
        asyncio.run(pool.start())


STARTER = """
import asyncio, sys
from pathlib import Path
from megathunder.config.rollout import RolloutConfig
from megathunder.rollout.servers.supervisor import ServerPool
folder = Path(sys.argv[1])
asyncio.run(ServerPool(RolloutConfig(device="cpu"), folder, folder=folder).start())
"""


def test_no_server_outlives_a_killed_coordinator(tmp_path):
    make_model(tmp_path)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], env=environment)
    server = None
    deadline = time.monotonic() + 30
    while server is None and time.monotonic() < deadline:
        found = [p for p in psutil.Process(starter.pid).children() if "sglang.launch_server" in p.cmdline()]
        server = found[0] if found else None
        time.sleep(0.05)
    assert server is not None
    starter.kill()
    starter.wait()
    psutil.wait_procs([server], timeout=5)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
