"""The vocabulary every room shares: what is sampled, what is asked of the learner, what happened.

    Segment -> Row -> Trajectory      what a rollout produced (exact token ids, never re-tokenised)
    TrainRow                          what the learner differentiates: one chain of tokens, [T]
    Differentiate / Fold / Score / TakeStep / Publish ...   commands to a learner cell (one union: `Command`)
    Done / Failed                                   its answers               (one union: `Reply`)
    TurnCompleted / TrajectoryCompleted / Rewarded / TurnScored / TrajectoryLost    rollout events (`Event`)

Everything is frozen and encodes with msgspec's MessagePack: coordinator and learner exchange no pickle.
Times are seconds of `time.monotonic()` on the host that made them. Sign: every objective is a loss to minimise;
g_i is the gradient of -s_i with s_i = sum_t m_t w_t log pi(y_t).
"""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

import msgspec

from megathunder.accumulator_keys import AccumulatorKey, FoldTerm
from megathunder.identity import Identity
from megathunder.work_stats import WorkStats


class Wire(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything that crosses a process: frozen, keyword-only, tagged with its class name."""


class TrajectoryId(NamedTuple):
    """Trajectory `index` of group `group` of update `update`; groups and indices count from 0 in each update."""

    update: int
    group: int
    index: int

    def __str__(self) -> str:
        return f"u{self.update}/g{self.group}/t{self.index}"


class ContributionId(NamedTuple):
    """The unit of work: a whole trajectory (turn == -1) or its turn `turn` (0-based action count)."""

    update: int
    group: int
    trajectory: int
    turn: int = -1

    def __str__(self) -> str:
        suffix = "" if self.turn < 0 else f"/s{self.turn}"
        return f"u{self.update}/g{self.group}/t{self.trajectory}{suffix}"


class Role(str, Enum):
    """Who wrote a segment. Only ACTION tokens are sampled, and only they are trained."""

    PROMPT = "prompt"
    ACTION = "action"
    OBSERVATION = "observation"


class EndReason(str, Enum):
    """Why a trajectory ended; INFRASTRUCTURE alone is not a result of the policy."""

    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    DEADLINE = "deadline"
    MALFORMED = "malformed"
    INFRASTRUCTURE = "infrastructure"


class Segment(Wire):
    """T tokens by one author. `logprobs` (of the engine, at the sampling temperature) and `policy_versions` are [T]
    for an ACTION and empty otherwise."""

    role: Role
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    policy_versions: tuple[int, ...] = ()


class Row(Wire):
    """Segments that extend each other token for token: segment s was sampled after exactly the tokens before it."""

    segments: tuple[Segment, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:  # [T]
        return tuple(t for s in self.segments for t in s.token_ids)

    @property
    def loss_mask(self) -> tuple[int, ...]:  # [T], 1 on sampled tokens
        return tuple(int(s.role is Role.ACTION) for s in self.segments for _ in s.token_ids)

    @property
    def engine_logprobs(self) -> tuple[float, ...]:  # [T], 0 where the mask is 0
        return tuple(x for s in self.segments for x in (s.logprobs or (0.0,) * len(s.token_ids)))

    @property
    def policy_versions(self) -> tuple[int, ...]:  # of the sampled tokens only
        return tuple(v for s in self.segments for v in s.policy_versions)


class Trajectory(Wire):
    """One attempt at one task. Several rows only after a context reset; they share the one reward. `side_rows` are what
    a harness asked beside its main conversation (a title, a sub-agent): recorded, never trained, in no count."""

    id: TrajectoryId
    task_id: str
    rows: tuple[Row, ...]
    end_reason: EndReason
    started_s: float
    completed_s: float
    turns: int
    reward: float | None = None
    rewarded_s: float = 0.0
    tool_s: float = 0.0
    reward_parts: dict[str, float] = {}  # what the reward is made of, by name, where it has parts
    side_rows: tuple[Row, ...] = ()

    @property
    def sampled_tokens(self) -> int:
        return sum(sum(r.loss_mask) for r in self.rows)

    @property
    def side_turns(self) -> int:
        return sum(s.role is Role.ACTION for row in self.side_rows for s in row.segments)

    @property
    def total_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.rows)


class TurnCompleted(Wire):
    """Turn `turn` of row `row` is fixed: `segments` are the new ones since the previous turn, ending in the ACTION. Of
    the `context_tokens` before it the engine found `cached_tokens` in its cache; both 0: not known."""

    id: TrajectoryId
    turn: int
    row: int
    segments: tuple[Segment, ...]
    at_s: float
    context_tokens: int = 0
    cached_tokens: int = 0


class TurnScored(Wire):
    """The teacher's log-probabilities of the ACTION tokens of one turn, [T of that ACTION]."""

    id: TrajectoryId
    turn: int
    teacher_logprobs: tuple[float, ...]
    at_s: float


class TrajectoryCompleted(Wire):
    """All tokens of a trajectory are fixed; its reward may still be unknown (`trajectory.reward is None`)."""

    trajectory: Trajectory
    at_s: float


class Rewarded(Wire):
    """The verifier's finite reward and its named parts; `verifier_s` is what grading took."""

    id: TrajectoryId
    reward: float
    verifier_s: float
    at_s: float
    parts: dict[str, float] = {}


class TrajectoryLost(Wire):
    """The machinery failed this trajectory and its retries; it has no reward."""

    id: TrajectoryId
    reason: str
    at_s: float


Event = TurnCompleted | TurnScored | TrajectoryCompleted | Rewarded | TrajectoryLost


class TrainRow(Wire):
    """One chain of T tokens to differentiate for one contribution.

    Token t is predicted from the tokens before it. Its loss weight is scale * loss_mask[t] * w_t, where w_t is 1 or a
    truncated importance weight (GRPO), or stopgrad(log pi - log q) (OPD, when `teacher_logprobs` is set).
    `cuts` are the positions at which turns start (for prefix-cut release), `context_tokens` how many leading tokens
    are already forwarded in this cell for this trajectory and enter as cached keys and values.
    """

    source: ContributionId
    token_ids: tuple[int, ...]  # [T]
    loss_mask: tuple[int, ...]  # [T]
    engine_logprobs: tuple[float, ...]  # [T]
    teacher_logprobs: tuple[float, ...] = ()  # [T] or empty
    scale: float = 1.0
    unit: float = 1.0  # the part of `scale` that is not the advantage
    row: int = 0
    prompt_tokens: int = 0
    group_size: int = 0  # trajectories of its group; 0: as the run's settings say
    context_tokens: int = 0
    cuts: tuple[int, ...] = ()


class Differentiate(Wire):
    """One packed micro-batch: forward and backward of `rows`, added to `target` with each row's own scale.

    A moment target adds features[k] * gradient to slot k (one row per item; `features` are 1, r_1, ..., r_K).
    `last` marks rows whose chain is complete, so cached context is replayed and freed (prefix-cut release):

    release        rows with last = False                             rows with last = True
    trajectory     never                                              the whole chain, context_tokens = 0
    turn           backward of the masked new turns, dK/dV deferred   the same, then the replay of what was deferred
    turn_forward   forward of the new turns only; mask as sampled,    the reverse pass: mask, teacher_logprobs, scale
                   scale and target mean nothing yet                  and target are those of the whole chain

    Tokens before `context_tokens` were forwarded by this cell for the same (trajectory, row); context_tokens = 0 starts
    anew and forgets what was cached. A row with context_tokens = T adds no tokens: it replays what is deferred (or runs
    the reverse pass), and with an all-zero mask and nothing deferred it only frees the cache. `release` is the mode of
    the command's schedule; empty: the learner's setting.
    """

    item: int
    update: int
    policy_version: int
    target: AccumulatorKey
    rows: tuple[TrainRow, ...]
    features: tuple[float, ...] = ()
    last: bool = True
    release: Literal["", "trajectory", "turn", "turn_forward"] = ""


class Fold(Wire):
    """Accumulator arithmetic at the closure of a group: apply `terms` in order, then release `free`."""

    item: int
    update: int
    terms: tuple[FoldTerm, ...] = ()
    free: tuple[AccumulatorKey, ...] = ()


class Score(Wire):
    """Forward passes without gradient under the reference policy, for a divergence inside the reward. The answer's
    `divergences` are, for each row, sum_t m_t (log pi_engine(y_t) - log pi_ref(y_t))."""

    item: int
    update: int
    policy_version: int
    rows: tuple[TrainRow, ...]


class TakeStep(Wire):
    """The barrier: reduce over data-parallel ranks once, divide by `normaliser`, clip, step. Every rank takes part.
    `skip` makes no step (an all-equal batch) but still clears the buffers and answers."""

    item: int
    update: int
    normaliser: float
    skip: bool = False


class ServerAddress(Wire):
    """A rollout server. `incarnation` grows when it is restarted, so a stale weight-update group is never reused."""

    name: str
    url: str
    incarnation: int = 0


class Publish(Wire):
    """Send the current weights to `servers` as policy version `version`."""

    item: int
    version: int
    servers: tuple[ServerAddress, ...]


class SaveCheckpoint(Wire):
    """Every rank writes its state into `folder`; in the background from a copy in host memory."""

    item: int
    folder: str
    background: bool = False


class FinishCheckpoint(Wire):
    """Complete what a save in the background has written. Every rank takes part, once each has written."""

    item: int


class LoadCheckpoint(Wire):
    """Go on from what `SaveCheckpoint` wrote. Every rank takes part."""

    item: int
    folder: str


class ExportPolicy(Wire):
    """Write the policy as a Hugging Face folder; the cell that holds rank 0 does."""

    item: int
    folder: str


class Shutdown(Wire):
    item: int


# fmt: off
Command = (
    Differentiate | Fold | Score | TakeStep | Publish | SaveCheckpoint | FinishCheckpoint | LoadCheckpoint
    | ExportPolicy | Shutdown
)
# fmt: on


class Done(Wire):
    """`started_s`/`ended_s` bound the work on the cell's own clock."""

    item: int
    cell: int
    started_s: float
    ended_s: float
    stats: WorkStats


class Failed(Wire):
    item: int
    cell: int
    error: str


class Hello(Wire):
    """First message of a cell's leader; `token` proves that it belongs to this run."""

    cell: int
    ranks: int
    token: str
    host: str
    package: Identity
    device: str = ""  # of its leader: "NVIDIA H200", "" on a CPU
    local_parameters: int = 0


Reply = Done | Failed | Hello
