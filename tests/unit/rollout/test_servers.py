"""Command lines, ports, addresses, and the supervision of servers given by address."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rollout_fakes import answer, serving, settings

from megathunder.config import Config
from megathunder.config.machine_checks import check_ports
from megathunder.config.rollout import RolloutConfig
from megathunder.errors import ConfigError, InfrastructureFailure, UserError
from megathunder.processes import PARENT_GONE, guarded, missing_cores, port_error, url_of
from megathunder.rollout.servers.command import choose_port, server_command, server_environment
from megathunder.rollout.servers.supervisor import ServerPool


def command(device: str, **sglang: str) -> list[str]:
    return server_command(RolloutConfig(sglang=sglang), model=Path("m"), port=5, device=device, version=7)


def test_settings_become_arguments_and_pass_through_replaces_them():
    line = command("cpu", mem_fraction_static="0.3", sleep_on_idle="false", enable_metrics="true")
    pairs = dict(itertools.pairwise(line))
    assert pairs["--model-path"] == "m" and pairs["--weight-version"] == "7" and pairs["--device"] == "cpu"
    assert pairs["--mem-fraction-static"] == "0.3" and "--enable-metrics" in line
    assert "--sleep-on-idle" not in line


def test_a_gpu_server_gets_no_stand_ins(tmp_path):
    assert "torch_native" not in command("cuda")
    assert "cpu_engine" not in server_environment("cuda", tmp_path).get("PYTHONPATH", "")
    assert "cpu_engine" in server_environment("cpu", tmp_path)["PYTHONPATH"]


def test_a_free_port_is_chosen_below_the_ephemeral_range():
    assert 20000 <= choose_port("127.0.0.1", 0) < 32000


def test_cores_that_do_not_exist_are_named():
    assert missing_cores(tuple(os.sched_getaffinity(0))) == [] and missing_cores((4096,)) == [4096]


def test_a_guarded_command_is_pinned_and_never_runs_as_an_orphan():
    core = min(os.sched_getaffinity(0))
    show = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    pinned = subprocess.run(guarded(show, cores=(core,)), capture_output=True, text=True)
    assert pinned.stdout.strip() == f"{{{core}}}"
    orphaned = [part if part != str(os.getpid()) else "1" for part in guarded(show)]
    assert subprocess.run(orphaned, capture_output=True).returncode == PARENT_GONE


def test_an_ipv6_host_stands_in_brackets_in_an_address_and_its_ports_are_probed():
    assert url_of("::1", 5) == "http://[::1]:5" and url_of("127.0.0.1", 5) == "http://127.0.0.1:5"
    with socket.socket(socket.AF_INET6) as listener:
        listener.bind(("::1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert port_error("::1", port) and not port_error("127.0.0.1", port)
        check_ports(Config(rollout=RolloutConfig(host="::1", port=0)))
        with pytest.raises(ConfigError, match="in use"):
            check_ports(Config(rollout=RolloutConfig(host="::1", port=port)))


def test_an_address_without_a_server_is_an_error_that_names_it(tmp_path):
    pool = ServerPool(settings(), tmp_path, folder=tmp_path, urls=("http://127.0.0.1:1",))
    with pytest.raises(UserError, match="127.0.0.1:1"):
        asyncio.run(pool.start())


def test_a_server_that_comes_back_is_a_new_incarnation_and_waits_for_its_weights(tmp_path):
    async def main():
        seen = []

        async def on_restart(address):
            seen.append((address.incarnation, pool.ready))

        async with serving(lambda body: answer([5])) as fake:
            pool = ServerPool(
                settings(health_timeout_s=2.0),
                tmp_path,
                folder=tmp_path,
                urls=(fake.address.url,),
                on_restart=on_restart,
            )
            await pool.start()
            first = pool.ready[0]
            fake.engine.healthy = False
            pool.probe_now(first)
            while pool.ready:
                await asyncio.sleep(0.01)
            with pytest.raises(InfrastructureFailure, match="ready within"):
                await pool.wait_ready(0.1)
            fake.engine.healthy = True
            (second,) = await pool.wait_ready(10.0)
            await pool.close()
            return first, second, seen

    first, second, seen = asyncio.run(asyncio.wait_for(main(), 20))
    assert (second.name, second.incarnation) == (first.name, 1) and seen == [(1, ())]


def test_a_condemned_server_gets_no_work_until_it_has_its_weights(tmp_path):
    async def main():
        async with serving(lambda body: answer([1])) as fake:
            sent, go = [], asyncio.Event()

            async def on_restart(server):
                sent.append(server)
                await go.wait()

            pool = ServerPool(settings(), tmp_path, folder=tmp_path, urls=(fake.address.url,), on_restart=on_restart)
            await pool.start()
            (server,) = pool.ready
            pool.mark_unhealthy(server, "it holds version 3, not 4")
            assert pool.ready == (), "at once"
            while not sent:
                await asyncio.sleep(0.01)
            assert pool.ready == () and sent[0].incarnation == server.incarnation + 1
            go.set()
            assert await pool.wait_ready(5.0) == (sent[0],)
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_server_that_hangs_behind_a_healthy_address_is_found_out_once_and_comes_back(tmp_path):
    async def main():
        async with serving(lambda body: answer([1])) as fake:
            pool = ServerPool(settings(), tmp_path, folder=tmp_path, urls=(fake.address.url,))
            await pool.start()
            (server,) = pool.ready
            assert await pool.can_generate(server) and pool.ready == (server,), "slow is not dead"
            fake.engine.hangs, fake.engine.questions = True, 0
            assert await asyncio.gather(*(pool.can_generate(server) for _ in range(5))) == [False] * 5
            assert pool.ready == () and fake.engine.questions == 1
            assert not await pool.can_generate(server)
            fake.engine.hangs = False
            (back,) = await pool.wait_ready(10.0)
            assert back.incarnation == server.incarnation + 1 and not await pool.can_generate(server), (
                "the old one is gone"
            )
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_pool_whose_servers_are_all_lost_says_so(tmp_path):
    async def main():
        async with serving(lambda body: answer([5])) as fake:
            config = settings(health_timeout_s=2.0, max_restarts=0)
            pool = ServerPool(config, tmp_path, folder=tmp_path, urls=(fake.address.url,))
            await pool.start()
            fake.engine.healthy = False
            pool.probe_now(pool.ready[0])
            with pytest.raises(InfrastructureFailure, match="every rollout server is lost"):
                while True:
                    await pool.wait_ready(5.0)
                    await asyncio.sleep(0.01)
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_servers_on_gpus_take_them_in_turn():
    config = RolloutConfig(first_gpu=4, sglang={"tp_size": "2"})
    lines = [server_command(config, model=Path("m"), port=5, device="cuda", version=0, index=i) for i in (0, 1)]
    assert [line[line.index("--base-gpu-id") + 1] for line in lines] == ["4", "6"]
    assert "--base-gpu-id" not in command("cpu")
