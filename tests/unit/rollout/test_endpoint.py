"""The endpoint for agent harnesses: exact tokens, rows, limits, and what is refused. The harnesses are scripts."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import msgspec
import psutil
import pytest
from endpoint_harness import FINISH, done, harness
from rollout_fakes import TASK, ByteChat, FakeSandboxes, answer, only, says

from megathunder.rollout.endpoint.conversation import Conversations
from megathunder.tasks import Message
from megathunder.types import EndReason, Rewarded, Role, TrajectoryCompleted, TrajectoryLost, TurnCompleted

TWO_TURNS = """
first = [("user", "go")]
a = text(first)
shown = call("/session/exec", {"command": a})[1]["output"]
b = text(first + [("assistant", a), ("user", shown)])
keep([a, shown, b])
"""


def test_a_conversation_that_grows_is_one_row_of_exact_tokens_and_trains_as_the_built_in_loops_does(tmp_path):
    events, left, bodies, _ = harness(tmp_path, TWO_TURNS + FINISH, [says("ls"), says("found")])
    trajectory = done(events)
    expected = [1, *b"go", *says("ls"), 2, *b"LS", 3, *says("found")]
    (row,) = trajectory.rows
    assert list(row.token_ids) == expected and bodies[1]["input_ids"] == expected[: -len(says("found"))]
    assert list(row.loss_mask) == [0] * 3 + [1] * 3 + [0] * 4 + [1] * 6
    assert row.policy_versions == (0,) * 9 and set(row.engine_logprobs) == {0.0, -1.0}
    assert left == ["ls", "LS", "found"]
    assert trajectory.end_reason is EndReason.ANSWERED and trajectory.turns == 2 and trajectory.tool_s == 0.01
    assert only(events, Rewarded)[0].reward == 1.0
    turns = only(events, TurnCompleted)
    assert [t.turn for t in turns] == [0, 1] and [s for t in turns for s in t.segments] == list(row.segments)


def test_sampled_ids_come_back_as_they_were_whatever_their_text_would_encode_to(tmp_path):
    class Merging(ByteChat):
        def action_text(self, token_ids, *, keep_special=False):
            return super().action_text(token_ids).replace("ab", "C")

    chat = Conversations(Merging())
    first = [Message("user", "go")]
    chat.answered(first, Message("assistant", "C"), (1, *b"go", *b"ab", 0), ended=True)
    pending = chat.locate([*first, Message("assistant", "C"), Message("user", "x")]).pending
    assert pending.role is Role.OBSERVATION and pending.token_ids == (2, *b"x", 3)


def test_a_harness_that_strips_what_was_said_still_extends_its_row():
    chat, first = Conversations(ByteChat()), [Message("user", "go")]
    chat.answered(first, Message("assistant", " ls\n"), (1, *b"go ls\n", 0), ended=True)
    for said, role in (("ls", Role.OBSERVATION), (" ls\n", Role.OBSERVATION), ("l s", Role.PROMPT)):
        assert chat.locate([*first, Message("assistant", said), Message("user", " x")]).pending.role is role
    other = [Message("user", "go "), Message("assistant", "ls"), Message("user", "x")]
    assert chat.locate(other).pending.role is Role.PROMPT  # what others said counts to the blank


def test_edited_history_is_a_reset_and_an_earlier_turn_a_branch_and_both_share_the_reward(tmp_path):
    script = TWO_TURNS + (
        'text(first + [("assistant", a), ("user", "otherwise")])\n'  # from the first turn on
        'text([("user", "in short: " + shown)])\n'  # forgets
    )
    turns = [says("ls"), says("found")]

    def answers(body):
        ids = body["input_ids"]
        return answer(says("branch") if b"otherwise" in bytes(ids) else turns[ids.count(2)])

    events, _, _, _ = harness(
        tmp_path, script + FINISH, answers, groups=((msgspec.structs.replace(TASK, max_turns=5),),)
    )
    trajectory = done(events)
    rows = [bytes(row.token_ids) for row in trajectory.rows]
    assert rows[1] == b"\x01go" + b"ls\0" + b"\x02otherwise\x03" + b"branch\0"
    assert rows[2] == b"\x01in short: LS" + b"ls\0"
    assert [sum(row.loss_mask) for row in trajectory.rows] == [9, 7, 3]  # every sampled token is trained once
    assert [(t.turn, t.row) for t in only(events, TurnCompleted)] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert only(events, Rewarded)[0].reward == 1.0


@pytest.mark.parametrize(
    ("settings", "status", "code", "reason"),
    [
        ({}, 403, "max_turns", EndReason.MAX_TURNS),
        ({"max_tokens": 9}, 400, "context_length_exceeded", EndReason.MAX_TOKENS),
    ],
)
def test_a_limit_refuses_further_turns_and_is_the_reason(tmp_path, settings, status, code, reason):
    script = """
messages, statuses = [("user", "go")], []
while True:
    status, answer = say(messages)
    if status != 200:
        keep([status, answer["error"]["code"]])
        break
    messages += [("assistant", answer["choices"][0]["message"]["content"]), ("user", "x")]
"""
    events, left, _, _ = harness(tmp_path, script, [says("a")] * 9, **settings)
    assert left == [status, code]
    assert done(events).end_reason is reason and only(events, Rewarded)[0].reward == 0.0
    assert done(events).turns == (3 if code == "max_turns" else 2)


def test_a_turn_that_was_cut_off_is_closed_and_nothing_of_it_is_executed(tmp_path):
    script = """
status, answer = say([("user", "go")])
finish = answer["choices"][0]["finish_reason"]
refused = call("/session/exec", {"command": "rm -rf x"})
text([("user", "go"), ("assistant", "rm"), ("user", "again")])
keep([finish, refused[0], refused[1]["error"]["code"], call("/session/exec", {"command": "b"})[0]])
"""
    events, left, _, sandboxes = harness(tmp_path, script + FINISH, [says("rm", end=False), says("b")])
    assert left == ["length", 409, "cut_off", 200]
    assert [command for sandbox in sandboxes.leased for command in sandbox.ran] == ["b"]
    row = done(events).rows[0]
    assert bytes(row.token_ids) == b"\x01go" + b"rm" + b"\0\x02again\x03" + b"b\0"
    assert list(row.loss_mask) == [0] * 3 + [1, 1] + [0] * 8 + [1, 1]  # the end token was not sampled


def test_keys_models_streams_parts_and_what_is_refused(tmp_path):
    script = """
one = [{"role": "user", "content": "go"}]
parts = [{"role": "user", "content": [{"type": "text", "text": "g"}, {"type": "text", "text": "o"}]}]
image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
status = lambda path, body=None, key=KEY: call(path, body, key)[0]
url, BASE = BASE, BASE.replace("/v1", "/s/" + KEY + "/v1")
by_path = call("/models", key="")[1]["data"][0]["id"]
BASE = url
keep([
    status("/models", key="wrong"), status("/chat/completions", {"messages": one}, key="wrong"), by_path,
    [status("/chat/completions", {"messages": one, "max_tokens": 1, **more}) for more in
     ({"tools": [{}]}, {"n": 0}, {"stop": [""]}, {"messages": []}, {"messages": image})],
    status("/chat/completions", {"messages": one + [{"role": "assistant", "content": "a"}]}),
    status("/session/end", {"reason": "won"}), status("/session")
    , call("/session")[1]["request"],
    call("/chat/completions", {"messages": parts, "stream": True}, raw=True)[1],
])
"""
    events, left, bodies, _ = harness(tmp_path, script + FINISH, [says("ls")])
    assert left[:3] == [401, 401, "policy"] and left[3] == [400] * 5
    assert left[4:8] == [400, 400, 200, "go"]
    lines = [line.removeprefix("data: ") for line in left[8].split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == "ls"
    assert chunks[-1]["finish_reason"] == "stop" and len(bodies) == 1
    assert done(events).turns == 1 and bytes(done(events).rows[0].token_ids) == b"\x01gols\0"


def test_openais_own_client_is_understood(tmp_path):
    script = """
from openai import BadRequestError, OpenAI
client, messages = OpenAI(max_retries=0), [{"role": "user", "content": "go"}]
said = client.chat.completions.create(model=client.models.list().data[0].id, messages=messages)
messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "x"}]
parts = [p for p in client.chat.completions.create(model="policy", messages=messages, stream=True)]
try:
    client.chat.completions.create(model="policy", messages=messages, max_tokens=-5)
except BadRequestError as error:
    keep([said.choices[0].message.content, said.usage.total_tokens,
          "".join(p.choices[0].delta.content or "" for p in parts), parts[-1].choices[0].finish_reason,
          error.code, error.param])
"""
    events, left, _, _ = harness(tmp_path, script + FINISH, [says("ls"), says("found")], site=True)
    assert left == ["ls", 6, "found", "stop", "invalid_value", "max_tokens"]
    assert len(done(events).rows) == 1 and done(events).turns == 2


def test_the_sampling_of_the_run_is_kept_and_fewer_tokens_may_be_asked_for(tmp_path):
    script = 'text([("user", "go")], temperature=0.0, top_p=0.1, seed=3, max_tokens=5)\n'
    _, _, bodies, _ = harness(tmp_path, script + FINISH, [says("ls")], temperature=0.7)
    sampling = bodies[0]["sampling_params"]
    assert sampling["max_new_tokens"] == 5 and sampling["temperature"] == 0.7 and sampling["top_p"] == 1.0


def test_an_answer_that_did_not_arrive_is_given_again_and_not_sampled_again(tmp_path):
    script = """
import socket
host, port = BASE.split("/")[2].split(":")
body = json.dumps({"messages": [{"role": "user", "content": "go"}]})
request = (f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\nAuthorization: Bearer {KEY}\\r\\n"
           f"Content-Length: {len(body)}\\r\\n\\r\\n{body}")
with socket.create_connection((host, int(port))) as gone:
    gone.sendall(request.encode())
    time.sleep(0.1)
keep([text([("user", "go")]), text([("user", "go")])])
"""
    seen = []

    async def slow(body):
        seen.append(body)
        await asyncio.sleep(0.4)
        return answer(says("abc"[len(seen) - 1]))

    events, left, _, _ = harness(tmp_path, script + FINISH, slow)
    assert left == ["a", "b"] and len(seen) == 2
    assert [bytes(row.token_ids) for row in done(events).rows] == [b"\x01goa\0", b"\x01gob\0"]


@pytest.mark.parametrize(
    ("script", "reason", "deadline_s"),
    [
        ("text([('user', 'go')])\n", EndReason.ANSWERED, 30.0),
        (
            "text([('user', 'go')])\ncall('/session/end', {'reason': 'malformed'})\nsys.exit(3)\n",
            EndReason.MALFORMED,
            30.0,
        ),
        ("time.sleep(60)\n", EndReason.DEADLINE, 1.0),
    ],
)
def test_every_end_of_a_harness_has_its_reason(tmp_path, script, reason, deadline_s):
    started_s = time.monotonic()
    events, _, _, sandboxes = harness(tmp_path, script, [says("ls")], deadline_s=deadline_s)
    assert done(events).end_reason is reason and only(events, Rewarded)[0].reward == 0.0
    assert time.monotonic() - started_s < 15 and all(sandbox.closed for sandbox in sandboxes.leased)


def test_what_is_under_way_when_the_time_is_up_is_given_up_and_no_turn_follows_the_end(tmp_path):
    async def slow(body):
        await asyncio.sleep(0.2 if body["input_ids"].count(2) == 0 else 30.0)
        return answer(says("ls"))

    script = "m = [('user', 'go')]\na = text(m)\ntext(m + [('assistant', a), ('user', 'x')])\n"
    started_s = time.monotonic()
    events, _, _, _ = harness(tmp_path, script, slow, deadline_s=2.0, request_timeout_s=40.0)
    assert done(events).end_reason is EndReason.DEADLINE and done(events).turns == 1
    assert [type(event) for event in events] == [TurnCompleted, TrajectoryCompleted, Rewarded]
    assert time.monotonic() - started_s < 10


def test_a_harness_that_exits_while_it_is_answered_leaves_no_turn_behind(tmp_path):
    async def slow(body):
        await asyncio.sleep(1.0)
        return answer(says("late"))

    script = "import threading\nthreading.Thread(target=lambda: text([('user', 'go')]), daemon=True).start()\n"
    events, _, _, _ = harness(tmp_path, script + "time.sleep(0.3)\nos._exit(0)\n", slow, request_timeout_s=5.0)
    assert [type(event) for event in events] == [TrajectoryCompleted, Rewarded] and done(events).turns == 0


def test_a_harness_that_breaks_is_a_fault_of_the_machinery_says_why_and_is_not_tried_a_third_time(tmp_path, caplog):
    tries = tmp_path / "tries"
    script = f"open({str(tries)!r}, 'a').write('x')\nprint('starting')\nraise RuntimeError('no such template')\n"
    events, _, _, _ = harness(tmp_path, script, max_retries=9, logs=tmp_path / "logs")
    lost = only(events, TrajectoryLost)[0].reason
    assert "exited with status 1" in lost and "no such template" in lost and not only(events, Rewarded)
    assert tries.read_text() == "xx" and sum("no such template" in said for said in caplog.messages) == 1
    assert (tmp_path / "logs/agents/u4-g0-t0.log").read_text().count("starting") == 2


def test_a_harness_that_dies_after_its_first_turn_is_started_anew_in_a_clean_sandbox(tmp_path):
    script = """
a = text([("user", "go")])
tried = call("/session/exec", {"command": a})[1]["output"]
if not os.path.exists(TRIED):
    open(TRIED, "w").close()
    sys.exit(3)
text([("user", "go"), ("assistant", a), ("user", tried)])
"""
    script = f"TRIED = {str(tmp_path / 'tried')!r}\n" + script
    events, _, bodies, sandboxes = harness(tmp_path, script + FINISH, [says("ls"), says("found")])
    assert done(events).turns == 2 and only(events, Rewarded)[0].reward == 1.0
    assert [event.turn for event in only(events, TurnCompleted)] == [0, 0, 1], "turn 0 again starts it anew"
    assert [sandbox.ran for sandbox in sandboxes.leased] == [["ls"], ["ls"]] and sandboxes.leased[0].closed
    seeds = [body["sampling_params"]["sampling_seed"] for body in bodies]
    assert seeds[0] == seeds[1] and bodies[0]["input_ids"] == bodies[1]["input_ids"]


def test_a_sandbox_that_cannot_be_replaced_loses_the_trajectory_of_a_harness_too(tmp_path):
    sandboxes = FakeSandboxes(faults=({0}, {0}, {0}, {0}))
    events, _, _, _ = harness(tmp_path, TWO_TURNS, [says("ls"), says("found")], sandboxes=sandboxes)
    assert "the sandbox died" in only(events, TrajectoryLost)[0].reason


def test_nothing_of_a_harness_outlives_its_trajectory(tmp_path):
    script = """
import subprocess
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
keep([child.pid, sorted(os.environ), os.environ["HOME"]])
call("/session/end", {"answer": "42"})
time.sleep(60)
"""
    started_s = time.monotonic()
    events, (child, names, home), _, _ = harness(tmp_path, script)
    assert time.monotonic() - started_s < 15 and only(events, Rewarded)[0].reward == 1.0
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert not Path(home).exists()
    assert set(names) <= {"ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL", "HOME", "LANG", "LC_ALL", "LC_CTYPE",
                          "LD_LIBRARY_PATH", "NO_PROXY", "OMP_NUM_THREADS",
                          "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL", "PATH", "PYTHONPATH", "TMPDIR",
                          "TZ"}  # fmt: skip


def test_bodies_that_are_too_deep_or_too_long_for_any_row_are_refused_at_once(tmp_path):
    script = """
def post(path, body):
    request = urllib.request.Request(BASE + path, body, {"Authorization": f"Bearer {KEY}"})
    try:
        return urllib.request.urlopen(request).status
    except urllib.error.HTTPError as error:
        return [error.code, json.loads(error.read())["error"]["code"]]

deep = b'{"messages": [{"role": "user", "content": "x"}], "other": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
long = json.dumps({"messages": [{"role": "user", "content": "some words " * 500_000}]}).encode()
started = time.monotonic()
found = [post("/chat/completions", deep), post("/messages/count_tokens", long), post("/chat/completions", long)]
keep([found, time.monotonic() - started])
"""
    _, (found, took_s), _, _ = harness(tmp_path, script + FINISH, ("a",))
    assert found == [[400, "invalid_request"], [400, "context_length_exceeded"], [400, "context_length_exceeded"]]
    assert took_s < 15.0
