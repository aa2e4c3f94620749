"""Real shell tasks in real sandboxes: sound scripts earn reward, tricks do not, and the emulator tells the truth."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

from examples.policies.build.demonstrations import Demonstration, demonstrate
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.rewards import verifiers
from megathunder.rewards.grading import grade
from megathunder.sandbox import Sandbox, SandboxPool
from megathunder.tasks import ProgramCheck, RepositoryTests, Task, TaskFile, build_source, observation_text
from megathunder.tasks.shell import KINDS

CONFIG = SandboxConfig(warm=2)


def tasks(kinds: tuple[str, ...], n: int) -> list[Task]:
    return build_source(TasksConfig(kinds=kinds, size=n, latency_scale=0.0)).take(n)


async def replay(pool: SandboxPool, task: Task, demonstration: Demonstration) -> float:
    """Runs a demonstration's commands for real; every observation must be the emulated one. Returns the reward."""
    sandbox = await pool.lease(task.files)
    try:
        for command, emulated in demonstration.turns:
            result = await sandbox.exec(command, 5.0)
            assert observation_text(result.output, 160) == emulated, command
        return await grade(task, sandbox, demonstration.answer, pool, 5.0)
    finally:
        await sandbox.close()


def test_demonstrations_see_and_earn_in_a_sandbox_what_the_emulator_says() -> None:
    async def body() -> None:
        pool, rng = SandboxPool(CONFIG), random.Random(0)
        await pool.start()
        for soundness in (1.0, 0.0):
            pairs = [(t, demonstrate(t, rng, soundness, 160)) for t in tasks(KINDS, 84)]
            rewards = await asyncio.gather(*(replay(pool, t, d) for t, d in pairs))
            assert rewards == [d.reward for _, d in pairs]
        await pool.close()
        assert pool.leaks() == []

    asyncio.run(body())


def graded(task: Task, commands: str, answer: str | None = "done", config: SandboxConfig = CONFIG) -> float:
    """The reward after running `commands` in a sandbox of `task`."""

    async def body() -> float:
        pool = SandboxPool(config)
        await pool.start()
        sandbox = await pool.lease(task.files)
        await sandbox.exec(commands, 5.0)
        reward = await grade(task, sandbox, answer, pool, 1.0)
        await pool.close()
        return reward

    return asyncio.run(body())


def test_a_program_is_judged_by_what_it_computes_in_a_clean_sandbox() -> None:
    (task,) = tasks(("fix",), 1)
    assert isinstance(task.grading, ProgramCheck)
    name, right = task.grading.taken[0], task.prompt.split()[-1]
    tricks = {
        f"echo 'expr $1 + {right}' > {name}": 1.0,
        f"echo 'echo $(($1 + {right}))' > {name}": 1.0,
        "true": 0.0,
        f"echo 'echo {right}' > {name}": 0.0,
        f"rm {name}": 0.0,
        f"rm {name}; mkfifo {name}": 0.0,
        f"rm {name}; ln -s /dev/zero {name}": 0.0,
        f"yes > {name}": 0.0,
        f"echo 'sleep 100' > {name}": 0.0,
        f"mkdir -p .bin; printf '#!/bin/sh\\necho 1' > .bin/expr; chmod +x .bin/expr; cp .bin/expr /tmp/{name}": 0.0,
        f"printf 'kill -9 -1; kill -9 1' > {name}": 0.0,
    }
    for commands, reward in tricks.items():
        assert graded(task, commands) == reward, commands
    assert graded(task, f"echo 'expr $1 + {right}' > {name}", answer=None) == 0.0


def test_more_hanging_graders_than_places_and_the_pool_still_serves() -> None:
    async def body() -> None:
        config = replace(CONFIG, max_open=2, max_running=2, warm=0)
        pool = SandboxPool(config)
        await pool.start()

        async def episode(task: Task) -> float:
            sandbox: Sandbox = await pool.lease(task.files)
            name = task.grading.taken[0]
            await sandbox.upload([TaskFile(path=name, content="sleep 100\n")])
            try:
                return await grade(task, sandbox, "done", pool, 0.4)
            finally:
                await sandbox.close()

        started = time.monotonic()
        assert await asyncio.gather(*(episode(t) for t in tasks(("fix",), 3))) == [0.0, 0.0, 0.0]
        assert time.monotonic() - started < 5
        sandbox = await pool.lease()
        assert (await sandbox.exec("echo served", 5.0)).output == "served\n"
        await sandbox.close()
        await pool.close()
        assert pool.leaks() == []

    asyncio.run(body())


def test_grading_works_from_the_event_loop_of_a_worker_thread() -> None:
    (task,) = tasks(("read",), 1)
    answer = task.grading.answer

    async def body() -> float:
        return await asyncio.to_thread(graded, task, "true", answer)

    assert asyncio.run(body()) == 1.0


def test_a_verifier_may_name_thousands_of_tests() -> None:
    """Its result is longer than what a sandbox keeps of an output."""
    names = [f"test_a.py::test_{'a_long_name_of_one_test_' * 2}{i:05d}" for i in range(3000)]
    body = "\n".join(f"def {name.partition('::')[2]}(): assert value" for name in names)
    check = RepositoryTests(
        fail_to_pass=tuple(names),
        pass_to_pass=(),
        files=(TaskFile(path="test_a.py", content=f"from a import value\n{body}\n"),),
    )

    async def rewards() -> list[float]:
        pool = SandboxPool(CONFIG)
        await pool.start()
        try:
            sources = [[TaskFile(path="a.py", content=f"value = {value}\n")] for value in (True, False)]
            return [await verifiers.tests_reward(check, source, pool, 60.0) for source in sources]
        finally:
            await pool.close()

    assert len("".join(names)) > CONFIG.output_bytes and asyncio.run(rewards()) == [1.0, 0.0]
