"""The wire between coordinator and cells: one command a cell at a time, barriers over all, failures reach the loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest
import zmq

from megathunder.accumulator_keys import BATCH
from megathunder.background import supervised
from megathunder.coordinator.learner_client import LearnerClient
from megathunder.errors import InfrastructureFailure, UserError
from megathunder.identity import Identity, this_package
from megathunder.learner.transport.link import CellLink, Endpoint, LeaderLink
from megathunder.learner.transport.wire import decode_command, encode
from megathunder.learner.transport.worker import serve
from megathunder.types import Differentiate, Done, Fold, Hello, Shutdown, TakeStep, WorkStats


def start_cell(client: LearnerClient, cell: int, token: str, log: list, fail: bool = False) -> threading.Thread:
    """A cell whose commands only write down what was asked."""

    def note(command: object) -> WorkStats:
        log.append((cell, type(command).__name__))
        if fail:
            raise ValueError("broken on purpose")
        return WorkStats(tokens=1)

    def run() -> None:
        hello = Hello(cell=cell, ranks=1, token=token, host="h", package=this_package())
        link = CellLink(LeaderLink(Endpoint(address=client.address, token=token), hello, lambda: True), None, 0)
        try:
            serve(link, cell, {Differentiate: note, Fold: note, TakeStep: note})
        except InfrastructureFailure:
            pass
        link.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def work(item: int) -> Differentiate:
    return Differentiate(item=item, update=0, policy_version=0, target=BATCH, rows=())


def test_streaming_answers_reach_the_inbox_and_a_barrier_waits_for_every_cell() -> None:
    async def scenario() -> list:
        inbox: asyncio.Queue = asyncio.Queue()
        client = LearnerClient(2, "t", inbox)
        log: list = []
        threads = [start_cell(client, c, "t", log) for c in range(2)]
        await client.connect(10)
        assert client.free_cells == (0, 1)
        await client.submit(0, work(7))
        assert (client.free_cells, client.cells_with_room) == ((1,), (0,))
        _, answers = await client.everywhere(lambda i: TakeStep(item=i, update=0, normaliser=1.0), 10)
        done = inbox.get_nowait()
        assert inbox.get_nowait() is None
        await client.everywhere(lambda i: Shutdown(item=i), 10)
        await client.close()
        for thread in threads:
            thread.join(5)
        assert (done.item, done.cell) == (7, 0)
        assert [a.cell for a in answers] == [0, 1]
        return log

    log = asyncio.run(scenario())
    assert log.index((0, "Differentiate")) < log.index((0, "TakeStep"))
    assert (1, "TakeStep") in log


def test_a_failing_command_ends_the_barrier_with_the_cells_own_words() -> None:
    async def scenario() -> None:
        inbox: asyncio.Queue = asyncio.Queue()
        client = LearnerClient(1, "t", inbox)
        start_cell(client, 0, "t", [], fail=True)
        await client.connect(10)
        with pytest.raises(InfrastructureFailure, match="broken on purpose"):
            await client.everywhere(lambda i: TakeStep(item=i, update=0, normaliser=1.0), 10)
        assert isinstance(inbox.get_nowait(), InfrastructureFailure)
        await client.close()

    asyncio.run(scenario())


def test_a_cell_of_another_run_and_bytes_that_are_no_reply_are_ignored() -> None:
    async def scenario() -> None:
        client = LearnerClient(1, "right", asyncio.Queue())
        start_cell(client, 0, "wrong", [])
        stranger = zmq.Context.instance().socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(client.address)
        stranger.send(b"\x00nonsense")
        with pytest.raises(InfrastructureFailure, match=r"cells \[0\] did not report within 1 s"):
            await client.connect(1)
        stranger.close()
        await client.close()

    asyncio.run(scenario())


def test_a_cell_whose_connection_closes_ends_the_barrier_and_the_stream_at_once() -> None:
    async def scenario() -> None:
        inbox: asyncio.Queue = asyncio.Queue()
        client = LearnerClient(2, "t", inbox)
        links = []
        for cell in range(2):
            hello = Hello(cell=cell, ranks=1, token="t", host="h", package=this_package())
            links.append(LeaderLink(Endpoint(address=client.address, token="t"), hello, lambda: True))
        await client.connect(10)
        barrier = asyncio.create_task(client.everywhere(lambda i: TakeStep(item=i, update=0, normaliser=1.0), 60))
        await asyncio.sleep(0.1)
        links[1].close()
        with pytest.raises(InfrastructureFailure, match="learner cell 1 has closed its connection"):
            await asyncio.wait_for(barrier, 10)
        assert isinstance(inbox.get_nowait(), InfrastructureFailure)
        with pytest.raises(InfrastructureFailure, match="cell 1"):
            client.check()
        links[0].close()
        await client.close()

    asyncio.run(scenario())


def test_a_cell_ends_when_the_coordinator_closes_and_not_while_it_is_only_quiet() -> None:
    async def scenario() -> str:
        client = LearnerClient(1, "t", asyncio.Queue())
        hello = Hello(cell=0, ranks=1, token="t", host="h", package=this_package())
        link = LeaderLink(Endpoint(address=client.address, token="t"), hello, lambda: True)
        await client.connect(10)
        waiting = asyncio.get_running_loop().run_in_executor(None, link.receive)
        await asyncio.sleep(2.5)
        assert not waiting.done()
        await client.close()
        with pytest.raises(InfrastructureFailure) as seen:
            await asyncio.wait_for(waiting, 10)
        link.close()
        return str(seen.value)

    assert "closed its connection" in asyncio.run(scenario())


def test_a_coordinator_that_is_alive_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megathunder.learner.transport.link.FIRST_WORD_S", 1.5)
    server = zmq.Context.instance().socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    hello = Hello(cell=0, ranks=1, token="t", host="h", package=this_package())
    link = LeaderLink(Endpoint(address=f"tcp://127.0.0.1:{port}", token="t"), hello, lambda: True)
    with pytest.raises(InfrastructureFailure, match="silent for 2 s"):
        link.receive()
    link.close()
    server.close(linger=0)


def test_answers_of_another_machine_are_told_by_the_coordinators_clock() -> None:
    async def scenario() -> list[Done]:
        client = LearnerClient(2, "t", asyncio.Queue())
        links = []
        for cell, host in enumerate((socket.gethostname(), "elsewhere")):
            hello = Hello(cell=cell, ranks=1, token="t", host=host, package=this_package())
            links.append(LeaderLink(Endpoint(address=client.address, token="t"), hello, lambda: True))
        await client.connect(10)
        told = asyncio.create_task(client.everywhere(lambda i: TakeStep(item=i, update=0, normaliser=1.0), 10))
        for cell, link in enumerate(links):
            item = decode_command(await asyncio.to_thread(link.receive)).item
            now = time.monotonic() + (1e6 if cell else 0.0)  # the other machine was started eleven days earlier
            link.send(Done(item=item, cell=cell, started_s=now - 2.0, ended_s=now, stats=WorkStats()))
        _, answers = await told
        for link in links:
            link.close()
        await client.close()
        return answers

    now, answers = time.monotonic(), asyncio.run(scenario())
    for done in answers:
        assert done.ended_s - done.started_s == pytest.approx(2.0, abs=1e-6)
        assert now - 0.1 < done.ended_s < now + 5


def test_messages_from_elsewhere_are_ignored_and_counted() -> None:
    async def scenario() -> tuple[int, list]:
        inbox: asyncio.Queue = asyncio.Queue()
        client, log, context = LearnerClient(1, "t", inbox), [], zmq.Context.instance()
        start_cell(client, 0, "t", log)
        async with supervised():
            await client.connect(10)
            strays = [context.socket(zmq.REQ), *(context.socket(zmq.DEALER) for _ in range(4))]
            for stray in strays:
                stray.setsockopt(zmq.LINGER, 0)
                stray.connect(client.address)
            strays[0].send(b"x")  # three frames
            strays[1].send_multipart([b"x", b"y"])
            strays[2].send(b"\xc1" * 50)
            strays[3].send(b"")
            strays[4].send(encode(Done(item=0, cell=0, started_s=0.0, ended_s=0.0, stats=WorkStats())))  # no such peer
            with socket.create_connection(client.address.removeprefix("tcp://").split(":")) as raw:
                raw.sendall(b"GET / HTTP/1.0\r\n\r\n")
            await asyncio.sleep(0.3)
            await client.submit(0, work(3))
            answer = await asyncio.wait_for(inbox.get(), 10)
        for stray in strays:
            stray.close()
        await client.everywhere(lambda i: Shutdown(item=i), 10)
        await client.close()
        return client.strays, [answer.item]

    assert asyncio.run(scenario()) == (4, [3])


def test_a_receiver_that_dies_ends_the_run_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> float:
        client = LearnerClient(1, "t", asyncio.Queue())
        start_cell(client, 0, "t", [])
        began = time.monotonic()
        with pytest.raises(InfrastructureFailure, match="receiver of the learner's answers(.|\n)*broken on purpose"):
            async with supervised():
                monkeypatch.setattr(client, "_greet", lambda *_: (_ for _ in ()).throw(ValueError("broken on purpose")))
                await client.connect(30)
        await client.close()
        return time.monotonic() - began

    assert asyncio.run(scenario()) < 5.0


def test_a_cell_that_runs_another_package_is_refused() -> None:
    async def scenario() -> None:
        client = LearnerClient(1, "t", asyncio.Queue())
        other = Identity(version="0.0.1", path="/elsewhere", digest="0" * 12)
        hello = Hello(cell=0, ranks=1, token="t", host="h", package=other)
        link = LeaderLink(Endpoint(address=client.address, token="t"), hello, lambda: True)
        try:
            with pytest.raises(UserError, match="learner cell 0 on h runs megathunder 0.0.1 .* at /elsewhere"):
                async with supervised():
                    await client.connect(30)
        finally:
            link.close()
            await client.close()

    asyncio.run(scenario())
