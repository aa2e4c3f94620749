"""OpenAI's Agents SDK (PyPI: openai-agents) as the harness of a run with `rollout.agent = "command"`.

    python examples/agents/openai_agents.py

Its own loop and tool calling, with one tool: a command in the sandbox of the session. Its final output is the answer.
A limit of the run ends it with an error, which the run knows the reason of.
"""

from __future__ import annotations

import os

import requests
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

BASE = os.environ["OPENAI_BASE_URL"]
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}


@function_tool
def run_command(command: str) -> str:
    """Run a shell command in the task's folder and return what it prints.

    Args:
        command: The command line for bash.
    """
    answer = requests.post(f"{BASE}/session/exec", headers=HEADERS, json={"command": command})
    answer.raise_for_status()
    result = answer.json()
    return "\n".join(filter(None, (result["output"], result["notice"])))


def main() -> None:
    """One attempt at the session's task."""
    set_tracing_disabled(True)
    task = requests.get(f"{BASE}/session", headers=HEADERS).json()
    agent = Agent(
        name="shell",
        instructions="Solve the task with the tool. Answer with the result alone.",
        tools=[run_command],
        model=OpenAIChatCompletionsModel(model=task["model"], openai_client=AsyncOpenAI(max_retries=0)),
    )
    result = Runner.run_sync(agent, task["request"], max_turns=task["max_turns"])
    requests.post(f"{BASE}/session/end", headers=HEADERS, json={"answer": str(result.final_output)})


if __name__ == "__main__":
    main()
