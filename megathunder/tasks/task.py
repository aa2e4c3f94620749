"""A task: a message for the policy, the files it finds, and how its result is judged.

Grading is data and not code: `sandbox.grade` interprets it, so a task crosses processes and is logged as it is.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import msgspec

from megathunder.types import Wire


class ToolCall(NamedTuple):
    """A call of a function by the policy; `arguments` is a JSON object as text."""

    name: str
    arguments: str
    id: str = ""


class Message(NamedTuple):
    """One message of a conversation; `role` is what the chat template calls it. `call_id`: of the call that a tool
    message answers."""

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""


class TaskFile(Wire):
    """One text file of the sandbox; `path` is relative to the work folder, `mode` is octal permission bits."""

    path: str
    content: str
    mode: int = 0o644


class ExactAnswer(Wire):
    """Reward 1 if the submitted text equals `answer` after stripping blanks, else 0."""

    answer: str


class ProgramCheck(Wire):
    """Reward 1 if `command` prints `expected` in a clean sandbox, else 0.

    Of the agent's work only the files named in `taken` go into the clean sandbox, beside the pristine `files`;
    `expected` never enters any sandbox.
    """

    taken: tuple[str, ...]
    command: str
    expected: str
    files: tuple[TaskFile, ...] = ()


class RepositoryTests(Wire):
    """Reward 1 if every named test passes on the agent's sources in a clean sandbox, else 0.

    `files` are the pristine tests and settings of the repository; whatever the agent wrote in such places is dropped
    (`tasks.protected`). A name is a pytest node id (`tests/test_a.py::test_b`); one that does not report has failed.
    """

    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    files: tuple[TaskFile, ...]


class TerminalTests(Wire):
    """Reward of an outside check of what the agent left in `folder`, in a clean sandbox with `files` added after it.

    With `command` (Harbor): the finite number that it writes to /logs/verifier/reward.json or reward.txt. Without:
    pytest over `files`, the sum of `weights` (test, weight) that pass (SETA), or 1 if all pass (Terminal-Bench 1).
    """

    folder: str
    files: tuple[TaskFile, ...]
    command: str = ""
    weights: tuple[tuple[str, float], ...] = ()


class BoxedAnswer(Wire):
    """Reward 1 if the last \\boxed{...} of the text equals `answer` mathematically, else 0. With `or_last_number` a
    text without a box answers with its last number."""

    answer: str
    or_last_number: bool = False


class RewardFunction(Wire):
    """The functions of [reward] decide; they see the task's `row`."""


Grading = ExactAnswer | ProgramCheck | RepositoryTests | TerminalTests | BoxedAnswer | RewardFunction


class Example(Wire):
    """An earlier question with its answer, shown to the policy as turns of the conversation."""

    question: str
    answer: str


class Task(Wire):
    """One task of a source. `id` is unique in its source; `kind` groups tasks in reports. `request` is the prompt
    without the built-in agent's protocol, for a harness that brings its own (empty: the prompt has none)."""

    id: str
    kind: str
    prompt: str
    files: tuple[TaskFile, ...]
    grading: Grading
    max_turns: int = 6
    setup: str = ""  # a command that runs once before the policy's first
    folder: str = ""  # where the policy's commands start; empty: the work folder
    examples: tuple[Example, ...] = ()  # before `prompt`
    request: str = ""
    image: str = ""  # of a container, where sandboxes are containers; empty: the usual one
    agent_limit_s: float = 0.0  # of an attempt, as its author set it; 0: none. A run's own limits bound both
    verifier_limit_s: float = 0.0  # of its grading
    messages: tuple[Message, ...] = ()  # the conversation before the first turn; empty: `prompt` as a user message
    row: dict[str, Any] = msgspec.field(default_factory=dict)  # of its table: rewards and environments see it
    single_turn: bool = False  # the first turn is the answer: nothing of it is executed

    def __hash__(self) -> int:  # its row is a table, which has no hash
        return hash((self.id, self.prompt))

    @property
    def judges_what_is_left(self) -> bool:
        """Whether the state of the work folder is graded however the episode ended, and nothing must be submitted."""
        return isinstance(self.grading, RepositoryTests | TerminalTests | RewardFunction)

    def attempt_s(self, run_s: float) -> float:
        """Time for an attempt: what its author set, at most what the run allows."""
        return min(self.agent_limit_s or run_s, run_s)

    def grading_s(self, run_s: float) -> float:
        """Time for its grader, likewise."""
        return min(self.verifier_limit_s or run_s, run_s)

    @property
    def digest_bytes(self) -> bytes:
        """Everything of it, as bytes that are equal where tasks are."""
        try:
            return msgspec.msgpack.encode(self, enc_hook=str)
        except OverflowError:  # an integer of more than 64 bits in its row
            return msgspec.json.encode(self, enc_hook=str)

    @property
    def content_key(self) -> str:
        """What must not be shared by training and held-out tasks: the request together with its answer."""
        grading = self.grading
        if isinstance(grading, RewardFunction):
            secret = "" if self.prompt else json.dumps(self.row, sort_keys=True, default=str)
        elif isinstance(grading, ExactAnswer | BoxedAnswer):
            secret = grading.answer
        else:
            secret = grading.expected if isinstance(grading, ProgramCheck) else self.id
        return f"{self.kind}\0{self.prompt}\0{secret}"
