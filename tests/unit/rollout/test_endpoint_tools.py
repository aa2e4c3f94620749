"""The endpoint's tools, stop words, choices, side conversations, rewards and refusals. The harnesses are scripts."""

from __future__ import annotations

import json

import msgspec
import pytest
from endpoint_harness import FINISH, done, harness
from rollout_fakes import TASK, answer, only, says

from megathunder.errors import ConfigError
from megathunder.rollout.servers.tool_parsers import choose_tool_parser
from megathunder.tasks import Message
from megathunder.types import Rewarded, TurnCompleted

TOOLS = """
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
user = {"role": "user", "content": "go"}
def ask(messages, **more):
    status, answer = call("/chat/completions", {"messages": messages, "tools": TOOLS, **more})
    assert status == 200, answer
    return answer["choices"][0]
"""
CALL = '<tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'


def test_tool_calls_come_back_as_the_tokens_that_were_sampled(tmp_path):
    script = (
        TOOLS
        + """
first = ask([user], tool_choice="required")
said = first["message"]
given = said["tool_calls"][0]
again = dict(said, content=said["content"] or "", tool_calls=[dict(given, id="other", function=dict(
    given["function"], arguments='{"a": 1,  "b": 2}'))])
shown = {"role": "tool", "tool_call_id": "other", "content": "3"}
keep([first["finish_reason"], said, ask([user, again, shown])])
"""
    )
    events, left, bodies, _ = harness(
        tmp_path, script + FINISH, [says("so " + CALL), says("it is 3")], tool_parser="hermes", max_new_tokens=99
    )
    function = {"name": "add", "arguments": '{"b": 2, "a": 1}'}
    assert left[0] == "tool_calls" and left[1]["content"] == "so"
    assert left[1]["tool_calls"] == [{"id": "call00001", "type": "function", "function": function}]
    assert left[2]["message"] == {"role": "assistant", "content": "it is 3"} and left[2]["finish_reason"] == "stop"
    (row,) = done(events).rows
    assert bytes(row.token_ids) == b"\x01add:go" + b"so " + CALL.encode() + b"\0\x023\x03it is 3\0"
    assert list(row.token_ids[: len(bodies[1]["input_ids"])]) == bodies[1]["input_ids"]


def test_a_call_that_cannot_be_parsed_stays_text_and_is_named(tmp_path):
    broken, unknown = "<tool_call>{add}</tool_call>", CALL.replace("add", "sub")
    script = TOOLS + 'keep([ask([user]), ask([user]), ask([user], tool_choice="none")])\n'
    turns = iter([says(broken), says(unknown), says(CALL)])
    events, left, _, _ = harness(
        tmp_path, script + FINISH, lambda body: answer(next(turns)), tool_parser="hermes", max_new_tokens=99
    )
    assert [choice["message"] for choice in left] == [
        {"role": "assistant", "content": text} for text in (broken, unknown, CALL)
    ]
    assert ["no call of one of the tools" in c.get("tool_parse_error", "") for c in left] == [True, True, False]
    assert [choice["finish_reason"] for choice in left] == ["stop"] * 3 and done(events).turns == 3


def test_tools_need_a_parser_and_a_name(tmp_path):
    script = """
body = {"messages": [{"role": "user", "content": "go"}], "tools": [{"type": "function", "function": {"name": "f"}}]}
web = dict(body, tools=[{"type": "web_search"}])
keep([call("/chat/completions", b)[1]["error"] for b in (body, dict(body, tools=[{}]), web)])
"""
    _, left, _, _ = harness(tmp_path, script + FINISH, [])
    assert [error["param"] for error in left] == ["tools"] * 3
    assert "rollout.tool_parser" in left[0]["message"] and "web_search" in left[2]["message"]
    with pytest.raises(ConfigError, match="hermes"):
        choose_tool_parser("hermess", tmp_path)


def test_tool_calls_stream_as_deltas_with_usage(tmp_path):
    script = (
        TOOLS
        + """
body = {"messages": [user], "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
keep(call("/chat/completions", body, raw=True)[1])
"""
    )
    _, left, _, _ = harness(tmp_path, script + FINISH, [says(CALL)], tool_parser="hermes", max_new_tokens=99)
    events = [json.loads(line.removeprefix("data: ")) for line in left.strip().split("\n\n")[:-1]]
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
    (call,) = next(delta["tool_calls"] for delta in deltas if "tool_calls" in delta)
    assert call["index"] == 0 and json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert events[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-1]["usage"]["completion_tokens"] == len(says(CALL))


def test_anthropics_form_is_the_same_conversation(tmp_path):
    pytest.importorskip("anthropic")
    script = """
from anthropic import Anthropic
client = Anthropic(max_retries=0)
tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
def ask(messages, **more):
    return client.messages.create(model="policy", max_tokens=90, messages=messages, tools=tools, **more)
messages = [{"role": "user", "content": "go"}]
first = ask(messages)
use = next(block for block in first.content if block.type == "tool_use")
messages += [{"role": "assistant", "content": first.content},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "3"}]}]
counted = client.messages.count_tokens(model="policy", messages=messages[:1], tools=tools).input_tokens
with client.messages.stream(model="policy", max_tokens=90, messages=messages, tools=tools) as stream:
    second = stream.get_final_message()
try:
    ask(messages, stop_sequences=[""])
except Exception as error:
    refused = error.body["error"]
keep([first.stop_reason, use.name, use.input, counted, second.stop_reason, second.content[0].text, refused["param"]])
"""
    events, left, _, _ = harness(
        tmp_path,
        script + FINISH,
        [says("so " + CALL), says("it is 3")],
        site=True,
        tool_parser="hermes",
        max_new_tokens=99,
    )
    assert left == ["tool_use", "add", {"a": 1, "b": 2}, len(b"\x01add:go"), "end_turn", "it is 3", "stop"]
    (row,) = done(events).rows
    assert bytes(row.token_ids) == b"\x01add:go" + b"so " + CALL.encode() + b"\0\x023\x03it is 3\0"


def test_a_stop_word_ends_a_turn_with_the_token_that_completes_it(tmp_path):
    script = """
status, answer = say([("user", "go")], stop=["END", "zz"])
choice = answer["choices"][0]
b = text([("user", "go"), ("assistant", choice["message"]["content"]), ("user", "x")])
keep([choice["message"]["content"], choice["finish_reason"], call("/session/exec", {"command": "ls"})[0], b])
"""
    events, left, _, _ = harness(tmp_path, script + FINISH, [says("abENDcd"), says("e")])
    assert left == ["ab", "stop", 200, "e"]
    (row,) = done(events).rows
    assert bytes(row.token_ids) == b"\x01go" + b"abEND" + b"\0\x02x\x03" + b"e\0"
    assert list(row.loss_mask) == [0] * 3 + [1] * 5 + [0] * 4 + [1] * 2, (
        "what was sampled after it is no part of the row"
    )


def test_several_choices_are_turns_of_their_own_and_each_can_be_continued(tmp_path):
    script = """
status, answer = say([("user", "go")], n=2)
texts = [choice["message"]["content"] for choice in answer["choices"]]
keep([texts, text([("user", "go"), ("assistant", texts[0]), ("user", "x")])])
"""
    turns = iter([says("a"), says("b"), says("c")])
    events, left, bodies, _ = harness(tmp_path, script + FINISH, lambda body: answer(next(turns)))
    assert left == [["a", "b"], "c"] and done(events).turns == 3
    rows = [bytes(row.token_ids) for row in done(events).rows]
    assert rows == [b"\x01goa\0", b"\x01gob\0", b"\x01goa\0\x02x\x03c\0"]
    assert [sum(row.loss_mask) for row in done(events).rows] == [2, 2, 2]
    assert len({body["sampling_params"]["sampling_seed"] for body in bodies}) == 3


def test_what_a_harness_asks_beside_its_conversation_is_marked_and_not_trained(tmp_path):
    script = """
first = [("user", "go")]
a = text(first)
text([("user", "a title for: go")])
b = text(first + [("assistant", a), ("user", "x")])
say([("user", "marked")], metadata={"conversation": "side"})
keep([a, b])
"""
    turns = iter([says("ls"), says("Title"), says("found"), says("aside")])
    events, _, _, _ = harness(tmp_path, script + FINISH, lambda body: answer(next(turns)))
    trajectory = done(events)
    (row,) = trajectory.rows
    assert bytes(row.token_ids) == b"\x01gols\0\x02x\x03found\0" and trajectory.turns == 2
    assert [bytes(row.token_ids) for row in trajectory.side_rows] == [
        b"\x01a title for: goTitle\0",
        b"\x01markedaside\0",
    ]
    assert [(event.turn, event.row) for event in only(events, TurnCompleted)] == [(0, 0), (1, 0)]


def test_a_harness_may_give_the_reward_and_sees_the_tasks_metadata(tmp_path):
    task = msgspec.structs.replace(TASK, row={"level": 3}, messages=(Message("user", "go"),))
    script = """
task = call("/session")[1]
refused = [call("/session/end", {"reward": r})[1]["error"] for r in ("x",)]
keep([task["metadata"], task["messages"], refused[0]["param"]])
text([("user", "go")])
call("/session/end", {"answer": "7", "reward": 0.25})
"""
    events, left, _, sandboxes = harness(tmp_path, script, [says("ls")], groups=((task,),))
    assert left == [{"level": 3}, [{"role": "user", "content": "go"}], "reward"]
    assert only(events, Rewarded)[0].reward == 0.25
    assert sandboxes.leased == [], "no sandbox where nothing runs"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/session/exec", {"command": "ls", "timeout_s": -1}, "timeout_s"),
        ("/session/exec", {"command": "ls", "timeout_s": 0}, "timeout_s"),
        ("/session/exec", {"command": 3}, "command"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "go"}], "max_tokens": -5}, "max_tokens"),
        ("/chat/completions", {"messages": [{"role": "user", "content": "go"}], "max_tokens": "x"}, "max_tokens"),
        ("/session/end", {"reason": "won"}, "reason"),
    ],
)
def test_nonsense_is_refused_with_the_name_of_its_field(tmp_path, path, body, field):
    script = f"found = call({path!r}, {body!r})\nkeep([found[0], found[1]['error']['param']])\n"
    _, left, bodies, sandboxes = harness(tmp_path, script + FINISH, [])
    assert left == [400, field] and not bodies and not any(sandbox.ran for sandbox in sandboxes.leased)


def test_a_longer_time_than_the_limit_is_the_limit(tmp_path):
    script = 'keep(call("/session/exec", {"command": "ls", "timeout_s": 1e308})[0])\n'
    _, left, _, sandboxes = harness(tmp_path, script + FINISH, [])
    assert left == 200 and sandboxes.leased[0].ran == ["ls"]
