"""Tasks: what an agent is asked to do, in which order, in which chat format, and what decides the reward.

Called by sandbox/ (grading), rollout/ (agent loop), evaluation/ and loop.py. Refuses batches larger than an unwrapped
source, unknown kinds, and tokenizers without a chat template.
"""

from megathunder.tasks.build_source import build_source, heldout_tasks
from megathunder.tasks.chat import Action, ChatFormat, RunCommand, SubmitAnswer, observation_text, parse_action
from megathunder.tasks.prompt_lengths import fitting
from megathunder.tasks.source import ListedSource, SourceState, TaskSource
from megathunder.tasks.task import (
    BoxedAnswer,
    ExactAnswer,
    Example,
    Grading,
    Message,
    ProgramCheck,
    RepositoryTests,
    RewardFunction,
    Task,
    TaskFile,
    TerminalTests,
    ToolCall,
)

__all__ = [
    "Action",
    "BoxedAnswer",
    "ChatFormat",
    "ExactAnswer",
    "Example",
    "Grading",
    "ListedSource",
    "Message",
    "ProgramCheck",
    "RepositoryTests",
    "RewardFunction",
    "RunCommand",
    "SourceState",
    "SubmitAnswer",
    "Task",
    "TaskFile",
    "TaskSource",
    "TerminalTests",
    "ToolCall",
    "build_source",
    "fitting",
    "heldout_tasks",
    "observation_text",
    "parse_action",
]
