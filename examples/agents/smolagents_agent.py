"""smolagents (PyPI) as the harness of a run: `rollout.agent = "command"` starts one per trajectory.

    python examples/agents/smolagents_agent.py

Its ToolCallingAgent with one tool of ours, a command in the sandbox of the session; its `final_answer` is the answer.
It writes its history anew at every step, so that each turn is a row of its own. A limit of the run ends it with an
error, which the run knows the reason of.
"""

from __future__ import annotations

import os

import requests
from smolagents import OpenAIServerModel, ToolCallingAgent, tool

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
HEADERS = {"Authorization": f"Bearer {KEY}"}


@tool
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
    task = requests.get(f"{BASE}/session", headers=HEADERS).json()
    model = OpenAIServerModel(model_id=task["model"], api_base=BASE, api_key=KEY, client_kwargs={"max_retries": 0})
    agent = ToolCallingAgent(tools=[run_command], model=model, max_steps=task["max_turns"])
    answer = agent.run(task["request"])
    requests.post(f"{BASE}/session/end", headers=HEADERS, json={"answer": str(answer)})


if __name__ == "__main__":
    main()
