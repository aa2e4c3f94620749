"""Makes the policy of examples/swe_cpu.toml and examples/terminal_cpu.toml, which solves their training tasks at times.

    python examples/policies/build/make_mender.py --out examples/policies/mender          (about 13 minutes on one core)

It is the teacher of examples/policies/build/make_policies.py, supervised further on the training tasks
themselves: for each of them a
look, then the change that mends it (from the instance's own patch, or the task's solution), then `submit done`. The
rest of the demonstrations, 1 - soundness, stop after the look and submit nothing mended, so that a sampled attempt
succeeds about as often as the demonstrations do and a group has both rewards. It knows these tasks by heart and no
other: what it earns says that the machinery of such a run works, and nothing about generalisation. Demonstrations are
recorded in real sandboxes, and sound ones must earn 1. Success is measured there too, also on the held-out tasks.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

from examples.policies.build.demonstrations import Demonstration
from examples.policies.build.make_policies import batches, encode, learn, sample, save
from examples.policies.build.repairs import Commands, repository_commands, terminal_commands
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.errors import UserError
from megathunder.registry import TASK_SOURCES
from megathunder.rewards.grading import grade
from megathunder.rollout.agents.workspace import Workspace
from megathunder.sandbox import SandboxPool
from megathunder.tasks import ChatFormat, RunCommand, Task, observation_text, parse_action
from megathunder.tasks.swe import read_instances

CHARACTERS, NEW_TOKENS, MAX_TURNS = 400, 160, 4  # as in the two examples
COMMAND_S, GRADING_S = 10.0, 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the mender is made."""

    out: Path = Path("examples/policies/mender")
    """Folder that gets the policy and its MODEL_CARD.md."""
    start: Path = Path("examples/policies/teacher")
    """The policy that is supervised further."""
    repositories: Path = Path("examples/tasks/swe")
    """Repositories with faults: train.jsonl is taught."""
    terminal: Path = Path("examples/tasks/terminal")
    """Terminal tasks: the training side is taught."""
    soundness: float = 0.45
    """Share of the demonstrations that mend the task."""
    copies: int = 20
    """Demonstrations of each task."""
    steps: int = 700
    """Optimizer steps on all tasks alike."""
    terminal_steps: int = 120
    """Further steps, more than half on terminal tasks: there are few, and their solutions are long."""
    batch: int = 16
    """Demonstrations a step."""
    lr: float = 2e-3
    """Peak learning rate."""
    attempts: int = 4
    """Attempts a task at temperature 1 that success is measured on."""
    seed: int = 0
    """Seed of order and sampling."""
    measure_only: bool = False
    """Measure the policy that lies in `out`, and write its card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A task of `source` mended, and only looked at."""

    source: str
    sound: Demonstration
    idle: Demonstration


def known(recipe: Recipe) -> Iterator[tuple[str, Task, Commands]]:
    """(source, training task, commands that mend it)."""
    instances = {i.instance_id: i for i in read_instances(recipe.repositories / "train.jsonl")}
    for task in given(recipe)["swe"][0]:
        if commands := repository_commands(instances[task.id], recipe.repositories):
            yield "swe", task, commands
    for task in given(recipe)["terminal"][0]:
        if commands := terminal_commands(recipe.terminal / task.id):
            yield "terminal", task, commands


def given(recipe: Recipe) -> dict[str, tuple[list[Task], list[Task]]]:
    """{source: (training tasks, held-out tasks)}."""
    folders = {"swe": recipe.repositories, "terminal": recipe.terminal}
    return {
        source: TASK_SOURCES.get(source)(TasksConfig(source=source, path=str(path), max_turns=MAX_TURNS))
        for source, path in folders.items()
    }


async def record(task: Task, commands: Commands, pool: SandboxPool) -> Demonstration:
    """What `commands` show in a sandbox of the task, and what is earned after them."""
    workspace, turns = Workspace(pool, task, max_replays=0), []
    try:
        for command in commands:
            seen = await workspace.run(command, COMMAND_S)
            turns.append((command, observation_text(seen.output, CHARACTERS, seen.notice)))
        reward = await grade(task, await workspace.ready(), "done", pool, GRADING_S)
    finally:
        await workspace.close()
    return Demonstration(prompt=task.prompt, turns=tuple(turns), answer="done", reward=reward)


async def record_all(recipe: Recipe, pool: SandboxPool) -> list[Recorded]:
    """Both demonstrations of every training task; refuses a sound one that does not earn 1, and a task that needs no
    mending."""
    found = []
    for source, task, commands in known(recipe):
        sound, idle = await record(task, commands, pool), await record(task, commands[:1], pool)
        if sound.reward < 1.0 or idle.reward > 0.0:
            raise UserError(
                f"{task.id}: {commands} earns {sound.reward:g}, looking alone {idle.reward:g}",
                expected="1 and 0",
                remedy="mend the script in examples/policies/build/repairs.py, or leave the task out",
            )
        found.append(Recorded(source=source, sound=sound, idle=idle))
    return found


def teach(
    recipe: Recipe,
    model: Qwen3ForCausalLM,
    chat: ChatFormat,
    tokenizer: PreTrainedTokenizerFast,
    recorded: list[Recorded],
) -> None:
    """Both stages, on demonstrations of which `soundness` are sound."""
    few, many = max(1, recipe.copies // 5), 2 * recipe.copies
    stages = (
        ({"swe": recipe.copies, "terminal": recipe.copies}, recipe.steps, recipe.lr),
        ({"swe": few, "terminal": many}, recipe.terminal_steps, recipe.lr / 2),
    )
    for stage, (copies, steps, lr) in enumerate(stages):
        chosen = []
        for task in recorded:
            number = copies[task.source]
            sound = round(number * recipe.soundness)
            chosen += [task.sound] * sound + [task.idle] * (number - sound)
        order = random.Random(recipe.seed + stage)
        learn(model, batches([encode(d, chat, tokenizer) for d in chosen], recipe.batch, order), steps, lr)


async def attempt_all(
    model: Qwen3ForCausalLM, chat: ChatFormat, tasks: list[Task], temperature: float, pool: SandboxPool
) -> list[float]:
    """The reward of one attempt at each task, in real sandboxes."""
    spaces = [Workspace(pool, task, max_replays=0) for task in tasks]
    contexts, live = [chat.prompt_ids(task.prompt) for task in tasks], list(range(len(tasks)))
    for _ in range(MAX_TURNS):
        chosen = [contexts[i] for i in live]
        sampled = sample(model, chosen, temperature, chat.end_token_id, NEW_TOKENS) if live else []
        goes_on = []
        for i, tokens in zip(live, sampled, strict=True):
            action = parse_action(chat.action_text(tokens))
            if tokens[-1] == chat.end_token_id and isinstance(action, RunCommand):
                seen = await spaces[i].run(action.command, COMMAND_S)
                shown = observation_text(seen.output, CHARACTERS, seen.notice)
                contexts[i] += tokens + chat.observation_ids(shown)
                goes_on.append(i)
        live = goes_on

    async def reward(task: Task, space: Workspace) -> float:
        try:
            return await grade(task, await space.ready(), None, pool, GRADING_S)
        finally:
            await space.close()

    return await asyncio.gather(*map(reward, tasks, spaces))


CARD = """# mender

The teacher of the folder above ({parameters:,} parameters, fp32), supervised for {steps} further steps of {batch} on
the {tasks} training tasks of `examples/tasks/`: {share:.0%} of the demonstrations look and mend the task with the
change that its own patch or solution holds, the rest look and submit nothing mended. {terminal_steps} further steps
see terminal tasks more often than not. It has learnt these tasks by heart, so that two updates on two CPU cores see
rewards of both kinds; it is no evidence of generalisation, and on tasks it was not taught it earns what the last column
says.

| tasks | training: greedy | temperature 1, {attempts} attempts: mean | tasks with both rewards | held-out, sampled |
|---|--:|--:|--:|--:|
{table}

Made by `python examples/policies/build/make_mender.py --seed {seed}` on one CPU core. License: that of the repository.
"""


async def measured(recipe: Recipe, model: Qwen3ForCausalLM, chat: ChatFormat, pool: SandboxPool) -> str:
    """Rows of the card's table."""
    rows = []
    for source, (train, heldout) in given(recipe).items():
        greedy = await attempt_all(model, chat, train, 0.0, pool)
        tries = [await attempt_all(model, chat, train, 1.0, pool) for _ in range(recipe.attempts)]
        mixed = sum(len({t[i] for t in tries}) > 1 for i in range(len(train)))
        other = [r for _ in range(recipe.attempts) for r in await attempt_all(model, chat, heldout, 1.0, pool)]
        means = [sum(r) / len(r) for r in (greedy, [x for t in tries for x in t], other)]
        row = f"| {source} | {means[0]:.2f} | {means[1]:.2f} | {mixed} of {len(train)} | {means[2]:.2f} |"
        print(row, flush=True)
        rows.append(row)
    return "\n".join(rows)


async def main(recipe: Recipe) -> None:
    """Demonstrations, policy, measurement, card."""
    torch.manual_seed(recipe.seed)
    torch.set_num_threads(1)
    start = recipe.out if recipe.measure_only else recipe.start
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(start)
    chat = ChatFormat(tokenizer)
    pool = SandboxPool(SandboxConfig(warm=1, max_running=2))
    await pool.start()
    try:
        if not recipe.measure_only:
            recorded = await record_all(recipe, pool)
            print(f"{len(recorded)} tasks recorded", flush=True)
            teach(recipe, model, chat, tokenizer, recorded)
            save(model, tokenizer, recipe.out)
            shutil.copy(recipe.start / "tokenizer_config.json", recipe.out)  # without the traces of this loading
        table = await measured(recipe, model, chat, pool)
    finally:
        await pool.close()
    (recipe.out / "MODEL_CARD.md").write_text(
        CARD.format(
            parameters=sum(p.numel() for p in model.parameters()),
            steps=recipe.steps,
            terminal_steps=recipe.terminal_steps,
            batch=recipe.batch,
            tasks=len(list(known(recipe))),
            share=recipe.soundness,
            attempts=recipe.attempts,
            table=table,
            seed=recipe.seed,
        )
    )


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Recipe, description=__doc__)))
