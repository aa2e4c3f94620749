"""A script as an agent harness behind the endpoint, in front of a fake engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rollout_fakes import collect, only, scripted

from megathunder.types import TrajectoryCompleted, TrajectoryLost

CLIENT = """
import json, os, sys, time, urllib.error, urllib.request
BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]

def call(path, body=None, key=KEY, raw=False):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(BASE + path, data, headers)) as answer:
            text = answer.read().decode()
            return (200, text if raw else json.loads(text))
    except urllib.error.HTTPError as error:
        return (error.code, json.loads(error.read()))

def say(messages, **more):
    body = {"model": "policy", "messages": [{"role": r, "content": c} for r, c in messages], **more}
    return call("/chat/completions", body)

def text(messages, **more):
    status, answer = say(messages, **more)
    assert status == 200, answer
    return answer["choices"][0]["message"]["content"]
"""
FINISH = 'call("/session/end", {"answer": "42"})\n'


def harness(tmp_path: Path, script: str, turns=(), site: bool = False, **settings):
    """(events, what the script left in `result`, request bodies) of one trajectory by a harness."""
    file, result = tmp_path / "harness.py", tmp_path / "result.json"
    keep = f"def keep(value):\n    open({str(result)!r}, 'w').write(json.dumps(value))\n"
    file.write_text(CLIENT + keep + script)
    script_of = turns if callable(turns) else scripted(*turns)
    command = f"{sys.executable} {'' if site else '-S'} {file}"
    settings = {"deadline_s": 60.0} | settings  # a busy machine is no fault of the harness
    events, sandboxes, bodies = collect(script_of, tmp_path, agent="command", agent_command=command, **settings)
    left = json.loads(result.read_text()) if result.exists() else None
    return events, left, bodies, sandboxes


def done(events):
    assert not only(events, TrajectoryLost), events[-1]
    return only(events, TrajectoryCompleted)[0].trajectory
