"""A task: a message for the policy, the files it finds, and how its result is judged.

Grading is data and not code: `sandbox.grade` interprets it, so a task crosses processes and is logged as it is.
"""

from __future__ import annotations

from megathunder.types import Wire


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


Grading = ExactAnswer | ProgramCheck


class Task(Wire):
    """One task of a source. `id` is unique in its source; `kind` groups tasks in reports."""

    id: str
    kind: str
    prompt: str
    files: tuple[TaskFile, ...]
    grading: Grading
    max_turns: int = 6

    @property
    def content_key(self) -> str:
        """What must not be shared by training and held-out tasks: the request together with its answer."""
        grading = self.grading
        secret = grading.answer if isinstance(grading, ExactAnswer) else grading.expected
        return f"{self.kind}\0{self.prompt}\0{secret}"
