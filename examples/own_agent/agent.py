"""An agent of one's own: it asks the policy for shell commands and runs them, until the policy submits an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from megathunder.rollout.agents.python_agent import AgentSandbox
    from megathunder.tasks import Task


async def run(task: Task, client: AsyncOpenAI, sandbox: AgentSandbox) -> float | None:
    """One trajectory; the number returned is its reward."""
    messages = [{"role": "user", "content": task.prompt}]
    for _ in range(task.max_turns):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        command = (reply.choices[0].message.content or "").strip()
        if command.startswith("submit "):
            return float(command.removeprefix("submit ").strip() == task.row["number"])
        result = await sandbox.exec(f"echo {task.row['number']} > {task.row['file']}; {command}", timeout_s=5)
        messages += [
            {"role": "assistant", "content": command},
            {"role": "tool", "content": result.output.strip() or "-"},
        ]
    return 0.0
