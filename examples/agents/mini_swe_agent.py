"""mini-swe-agent (PyPI, version 2) as the harness of a run: `rollout.agent = "command"` starts one for each trajectory.

    python examples/agents/mini_swe_agent.py [--tools] [--config FILE.yaml]

Its own agent loop, prompts and parser, with two parts from here: a model that asks the run's endpoint (OPENAI_BASE_URL,
OPENAI_API_KEY), and an environment whose commands run in the sandbox of the session, never on this machine.
--tools   commands are tool calls, not text
--config  sections agent, model, environment as mini-swe-agent has them; default: its own mini_textbased.yaml, with
          --tools its mini.yaml

litellm, which its own model classes need, is not used. Exits with 0 when the session is ended, or a limit ended it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", tempfile.gettempdir())

import requests
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_path
from minisweagent.exceptions import FormatError, LimitsExceeded, Submitted
from minisweagent.models.openrouter_model import OpenRouterModel
from minisweagent.models.openrouter_textbased_model import OpenRouterTextbasedModel
from minisweagent.models.utils.actions_toolcall import BASH_TOOL

BASE = os.environ["OPENAI_BASE_URL"]
HEADERS = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
NO_LIMIT_S = 3600.0  # the run has its own
OVER = ("max_turns", "deadline", "context_length_exceeded", "over")
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent's sign
SUBMIT = "submit"  # and that of the shipped policies: `submit X`


def call(path: str, body: dict | None = None) -> dict:
    """The endpoint's answer. Raises LimitsExceeded where it says that a limit is reached."""
    if body is None:
        answer = requests.get(BASE + path, headers=HEADERS, timeout=NO_LIMIT_S)
    else:
        answer = requests.post(BASE + path, headers=HEADERS, json=body, timeout=NO_LIMIT_S)
    if answer.ok:
        return answer.json()
    error = answer.json()["error"]
    if error["code"] in OVER:
        extra = {"exit_status": "LimitsExceeded", "submission": ""}
        raise LimitsExceeded({"role": "exit", "content": error["code"], "extra": extra})
    raise RuntimeError(f"{path}: {answer.status_code} {error}")


class EndpointModel(OpenRouterTextbasedModel):
    """Asks the run's endpoint; an answer that was cut off is no action. An empty system message is none;
    `observation_role` is what the policy's chat template calls what a command shows."""

    def __init__(self, *, observation_role: str = "user", **config: object) -> None:
        super().__init__(**config)
        self._observation_role = observation_role

    def format_observation_messages(self, *given: object, **named: object) -> list[dict]:
        shown = super().format_observation_messages(*given, **named)
        return [message | {"role": self._observation_role} for message in shown]

    def query(self, messages: list[dict], **_: object) -> dict:
        said = [m for m in self._prepare_messages_for_api(messages) if m["role"] != "system" or m["content"]]
        answer = call("/chat/completions", {"messages": said})
        choice = answer["choices"][0]
        spoken = dict(choice["message"])
        try:
            if choice["finish_reason"] != "stop":
                text = "Your answer was cut off before it ended."
                raise FormatError({"role": "user", "content": text, "extra": {}})
            actions = self._parse_actions(answer)
        except FormatError as error:  # what was said stays in the conversation, so that the next turn extends it
            raise FormatError(spoken | {"extra": {}}, *error.messages) from None
        return spoken | {"extra": {"actions": actions}}


class ToolModel(OpenRouterModel):
    """mini-swe-agent's own tool calls, of its one tool bash, at the run's endpoint."""

    def _query(self, messages: list[dict], **_: object) -> dict:
        return call("/chat/completions", {"messages": messages, "tools": [BASH_TOOL]})


class SessionEnvironment:
    """Commands run in the session's sandbox."""

    def __init__(self, folder: str, **config: object) -> None:
        self.folder, self.config = folder, config

    def execute(self, action: dict, cwd: str = "") -> dict:
        """Output and exit status of one command. Raises Submitted when it says that the work is done."""
        command = action["command"].strip()
        word, _, rest = command.partition(" ")
        if word == SUBMIT:
            self._submit(rest.strip())
        exports = "".join(f"export {name}={value!r}; " for name, value in self.config.get("env", {}).items())
        result = call("/session/exec", {"command": f"{exports}{f'cd {cwd}; ' if cwd else ''}{command}"})
        lines = result["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == DONE and result["exit_status"] == 0:
            self._submit("".join(lines[1:]))
        return {
            "output": result["output"],
            "returncode": result["exit_status"],
            "exception_info": result["notice"],
        }

    def _submit(self, answer: str) -> None:
        extra = {"exit_status": "Submitted", "submission": answer}
        raise Submitted({"role": "exit", "content": answer, "extra": extra})

    def get_template_vars(self, **more: object) -> dict:
        system = {"system": "Linux", "release": "", "version": "", "machine": os.uname().machine}
        return {"cwd": self.folder, **system, **self.config, **more}

    def serialize(self) -> dict:
        return {"info": {"config": {"environment_type": "megathunder session"}}}


def main(argv: list[str]) -> int:
    """One attempt at the session's task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", action="store_true")
    parser.add_argument("--config", default="")
    options = parser.parse_args(argv)
    name = options.config or ("mini.yaml" if options.tools else "mini_textbased.yaml")
    own = Path(name)
    config = yaml.safe_load((own if own.is_file() else get_config_path(name)).read_text())
    model = ToolModel if options.tools else EndpointModel
    task = call("/session")
    for key in ("mode", "cost_limit"):
        config["agent"].pop(key, None)
    agent = DefaultAgent(
        model(model_name=task["model"], cost_tracking="ignore_errors", **config.get("model", {})),
        SessionEnvironment(task["folder"], **config.get("environment", {})),
        **config["agent"],
    )
    end = agent.run(task["request"])
    if end["exit_status"] == "Submitted":
        call("/session/end", {"answer": end["submission"]})
    elif end["exit_status"] == "RepeatedFormatError":
        call("/session/end", {"reason": "malformed"})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
