"""Routing: who may go where, in which order, and that nothing waits for ever, whatever comes and goes."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.naive_routing import NaiveCacheAware, NaiveRoutingState

from megathunder.errors import InfrastructureFailure
from megathunder.rollout.routing import PolicyRouter, Request, RoutingState
from megathunder.rollout.routing.routing_policies import CacheAware, LeastLoaded, RoundRobin, SessionAffinity
from megathunder.types import ServerAddress, TrajectoryId

A, B = "a", "b"


def cache_aware(**changes: int) -> CacheAware:
    return CacheAware(**{"cache_tokens": 1000, "in_flight": 2, "spill_gap": 3, "spill_tokens": 400, **changes})


class Front:
    """A state whose requests are numbered as they come."""

    def __init__(self, policy) -> None:
        self.state, self.serial = RoutingState(policy), 0

    def arrive(self, index: int, tokens: int = 100, *, group: int = 0, version: int = 0) -> Request:
        self.serial += 1
        made = Request(trajectory=TrajectoryId(0, group, index), tokens=tokens, version=version, serial=self.serial)
        self.state.arrive(made)
        return made

    def grants(self, *servers: str) -> list[tuple[int, str]]:
        return [(request.trajectory.index, server) for request, server in self.state.grants(servers or (A, B))]

    def turn(self, index: int, tokens: int = 100, *servers: str, **kind: int) -> str:
        """One request from its arrival to its end; the server it ran on."""
        request = self.arrive(index, tokens, **kind)
        ((_, server),) = self.grants(*servers)
        self.state.ended(request, server, tokens=tokens + 10)
        return server


def test_a_trajectory_keeps_its_home_and_new_ones_go_where_fewest_live():
    front = Front(SessionAffinity())
    homes = [front.turn(i) for i in range(4)]
    assert sorted(homes) == [A, A, B, B] and [front.turn(i, 200) for i in range(4)] == homes
    for index in (i for i, home in enumerate(homes) if home == B):
        front.state.release(TrajectoryId(0, 0, index))
    assert front.turn(4) == B
    assert front.turn(4, 100, A) == A, "its home is gone"


def test_baselines_ignore_homes():
    assert [Front(RoundRobin()).turn(0) for _ in range(1)] == [A]
    front = Front(RoundRobin())
    assert [front.turn(0) for _ in range(3)] == [A, B, A]
    front = Front(LeastLoaded())
    assert [front.arrive(i) and front.grants()[0][1] for i in range(3)] == [A, B, A]


def test_the_most_advanced_trajectory_goes_first_where_a_server_is_full():
    front = Front(cache_aware(in_flight=1, cache_tokens=10**6))
    for index in range(3):
        front.turn(index, 100 + index, A)
    running = front.arrive(0, 150)
    assert front.grants(A) == [(0, A)]
    front.arrive(1, 160), front.arrive(2, 300)
    assert front.grants(A) == [], "one in flight"
    front.state.ended(running, A, tokens=160)
    assert front.grants(A) == [(2, A)]


def test_a_group_nearest_to_closure_goes_before_a_longer_context():
    front = Front(cache_aware(in_flight=1, cache_tokens=10**6))
    for index, group in ((0, 0), (1, 0), (2, 1)):
        front.turn(index, 100, A, group=group)
    front.state.release(TrajectoryId(0, 0, 0))
    running = front.arrive(3, 50, group=2)
    assert front.grants(A) == [(3, A)]
    front.arrive(2, 900, group=1), front.arrive(1, 200, group=0)
    front.state.ended(running, A)
    assert front.grants(A) == [(1, A)]


def test_trajectories_start_only_while_the_caches_hold_them():
    front = Front(cache_aware(in_flight=8, cache_tokens=1000))
    for index in range(2):
        assert front.turn(index, 590, group=index) == (A, B)[index]
    front.arrive(2, 590, group=2)
    assert front.grants() == [], "600 of 1000 tokens are taken on either server"
    front.state.release(TrajectoryId(0, 1, 1))
    assert front.grants() == [(2, B)]


def test_an_empty_server_takes_a_trajectory_that_no_cache_holds():
    front = Front(cache_aware(cache_tokens=100))
    assert front.turn(0, 5000, A) == A


def test_the_prompt_of_a_group_counts_once():
    policy = cache_aware(cache_tokens=1000)
    front = Front(policy)
    front.turn(0, 800, A)
    request = front.arrive(1, 800)
    assert policy.held_tokens(front.state, A, request, grown=True) == 810
    assert front.grants(A) == [(1, A)]


def test_admission_expects_the_length_at_which_trajectories_end():
    front = Front(cache_aware(in_flight=8, cache_tokens=1000))
    front.turn(0, 890, A)
    front.state.release(TrajectoryId(0, 0, 0))
    front.turn(1, 100, A, group=1)
    front.arrive(2, 100, group=2)
    assert front.grants(A) == [], "two on their way from 100 tokens to 900 do not fit 1000"


def test_a_short_context_leaves_a_crowded_home_once_and_a_long_one_never():
    front = Front(cache_aware(in_flight=1, cache_tokens=10**6))
    for index in range(4):
        front.turn(index, 100, A)
    for index in range(4):
        front.arrive(index, 500 if index == 3 else 120)
    assert front.grants() == [(3, A), (0, B)], "wanted by four there, by none here; the long one goes first"
    assert front.state.moves == 1
    assert front.grants() == [], "both servers are full"


def test_new_weights_void_a_home():
    front = Front(cache_aware())
    front.turn(0), front.turn(1)
    homes = {i: front.state.active[TrajectoryId(0, 0, i)].affinity for i in range(2)}
    assert homes == {0: A, 1: B}
    front.turn(0, 150, version=1)
    assert front.state.moves == 0, "a flushed cache holds nothing to come home to"


POLICIES = (RoundRobin, LeastLoaded, SessionAffinity, cache_aware)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(1, 4), st.integers(10, 1500)), min_size=1, max_size=14),
    st.lists(st.sampled_from([(A, B), (A,), (B,), ()]), min_size=1, max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_request_is_granted_once_whatever_servers_come_and_go(policy, trajectories, phases, random):
    front = Front(policy())
    left = {index: turns for index, (turns, _) in enumerate(trajectories)}
    length = {index: tokens for index, (_, tokens) in enumerate(trajectories)}
    running: list[tuple[Request, str]] = []
    for index in left:
        front.arrive(index, length[index], group=index % 3)
    granted = 0
    for step in range(10**4):
        servers = phases[step % len(phases)] if step < 50 else (A, B)
        for request, server in front.state.grants(servers):
            assert server in servers
            running.append((request, server))
            granted += 1
        for name in (A, B):
            in_flight = sum(server == name for _, server in running)
            assert in_flight == (front.state.loads[name].in_flight if name in front.state.loads else 0)
            assert policy is not cache_aware or in_flight <= 2
        if not running and not front.state.waiting:
            break
        if running:
            request, server = running.pop(random.randrange(len(running)))
            index = request.trajectory.index
            length[index] += 20
            front.state.ended(request, server, tokens=length[index])
            left[index] -= 1
            if left[index]:
                front.arrive(index, length[index], group=index % 3)
            else:
                front.state.release(request.trajectory)
    assert granted == sum(turns for turns, _ in trajectories) and not front.state.active
    assert all(load.in_flight == 0 and not load.assigned for load in front.state.loads.values())


def pool(*names: str) -> SimpleNamespace:
    addresses = tuple(ServerAddress(name=name, url="") for name in names)
    return SimpleNamespace(ready=addresses, servers=addresses, listeners=[])


def test_a_cancelled_request_gives_its_turn_back_and_lost_servers_fail_what_waits():
    async def main():
        servers = pool(A)
        router = PolicyRouter(RoutingState(cache_aware(in_flight=1, cache_tokens=10**6)), servers)
        first, second, third = (asyncio.create_task(router.assign(TrajectoryId(0, 0, i), 10, 0)) for i in range(3))
        place = await first
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        router.done(place)
        assert (await third).server.name == A
        fourth = asyncio.create_task(router.assign(TrajectoryId(0, 0, 4), 10, 0))
        await asyncio.sleep(0)
        servers.ready = servers.servers = ()
        for listener in servers.listeners:
            listener()
        with pytest.raises(InfrastructureFailure, match="lost"):
            await fourth
        assert router.state.waiting == 0

    asyncio.run(asyncio.wait_for(main(), 5))


def test_a_server_that_becomes_ready_takes_what_waits():
    async def main():
        servers = pool(A)
        servers.ready = ()
        router = PolicyRouter(RoutingState(cache_aware()), servers)
        waiting = asyncio.create_task(router.assign(TrajectoryId(0, 0, 0), 10, 0))
        await asyncio.sleep(0)
        assert not waiting.done()
        servers.ready = servers.servers
        for listener in servers.listeners:
            listener()
        assert (await waiting).server.name == A

    asyncio.run(asyncio.wait_for(main(), 5))


@pytest.mark.parametrize("seed", range(12))
def test_running_sums_decide_as_the_naive_sums_do(seed):
    """Random events in front of both: the same grants in the same order, also when servers come and go."""
    random = Random(seed)
    limits = {"cache_tokens": random.choice((400, 1500, 10**6)), "in_flight": random.choice((1, 2, 8))}
    limits |= {"spill_gap": random.choice((1, 4)), "spill_tokens": random.choice((0, 150, 10**6))}
    fast, naive = RoutingState(CacheAware(**limits)), NaiveRoutingState(NaiveCacheAware(**limits))
    prompts, lengths = {g: random.randrange(20, 120) for g in range(9)}, {}
    idle = [TrajectoryId(0, g, i) for g in range(9) for i in range(6)]
    waiting, running, version, serial, total = [], [], 0, 0, 0
    for _ in range(600):
        event = random.random()
        if event < 0.45 and idle:
            trajectory = idle.pop(random.randrange(len(idle)))
            tokens = lengths.get(trajectory, prompts[trajectory.group])
            request = Request(trajectory=trajectory, tokens=tokens, version=version, serial=serial)
            serial += 1
            waiting.append(request)
            _ = [state.arrive(request) for state in (fast, naive)]
        elif event < 0.85 and running:
            request, server = running.pop(random.randrange(len(running)))
            tokens = random.choice((0, request.tokens + random.randrange(1, 60)))
            _ = [state.ended(request, server, tokens=tokens) for state in (fast, naive)]
            lengths[request.trajectory] = tokens or request.tokens
            if random.random() < 0.3:
                _ = [state.release(request.trajectory) for state in (fast, naive)]
                lengths.pop(request.trajectory)
            idle.append(request.trajectory)
        elif event < 0.9 and waiting:
            request = waiting.pop(random.randrange(len(waiting)))
            _ = [state.withdraw(request) for state in (fast, naive)]
            idle.append(request.trajectory)
        elif event > 0.98:
            version += 1
        servers = random.choice(((A, B), (A, B), (A, B), (A, B, "c"), (B,), ()))
        granted = fast.grants(servers)
        assert granted == naive.grants(servers)
        waiting = [request for request in waiting if request not in [r for r, _ in granted]]
        running += granted
        total += len(granted)
        loads = {name: (load.in_flight, load.waiting) for name, load in fast.loads.items()}
        assert loads == {name: (load.in_flight, load.waiting) for name, load in naive.loads.items()} or not servers
    assert total > 100 and fast.moves == naive.moves
