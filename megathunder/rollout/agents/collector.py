"""All trajectories of one batch at once: sampled, graded, scored by the teacher, reported as events.

    per trajectory   TurnCompleted ...  TrajectoryCompleted  Rewarded            (TurnScored per turn with a teacher)
                     or TrajectoryLost at any point, and nothing after it

Infrastructure failures are retried inside a trajectory (`engine.py` repeats a request with the same tokens,
`workspace.py` replays commands), so no event is ever withdrawn. Called by the coordinator and by evaluation/.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megathunder import tracing
from megathunder.config.reward import RewardConfig
from megathunder.config.rollout import RolloutConfig
from megathunder.config.sandbox import SandboxConfig
from megathunder.config.tasks import TasksConfig
from megathunder.environments.build_environment import environment_maker, open_environment
from megathunder.errors import InfrastructureFailure, MegathunderError
from megathunder.registry import AGENTS
from megathunder.rewards.scorer import RewardScorer
from megathunder.rollout.agents.builtin_agent import Episode
from megathunder.rollout.agents.end_tokens import end_token_ids
from megathunder.rollout.agents.environment_agent import EnvironmentEpisode
from megathunder.rollout.agents.python_agent import PythonAgentEpisode
from megathunder.rollout.agents.recorder import EpisodeSettings, TrajectoryRecorder
from megathunder.rollout.agents.task_grader import Grade, TaskGrader, finished_episode
from megathunder.rollout.agents.workspace import Sandboxes, Workspace
from megathunder.rollout.endpoint import AgentEndpoint, HarnessEpisode, HarnessFailed
from megathunder.rollout.routing import RequestRouter
from megathunder.rollout.servers.client import EngineClient
from megathunder.rollout.servers.engine import DeadlinePassed, Engine, EpisodeClock
from megathunder.rollout.servers.supervisor import ServerPool
from megathunder.tasks import ChatFormat, Task
from megathunder.types import (
    Event,
    Rewarded,
    Role,
    Trajectory,
    TrajectoryCompleted,
    TrajectoryId,
    TrajectoryLost,
    TurnCompleted,
    TurnScored,
)
from megathunder.user_code import UserCode

Emit = Callable[[Event], None]
Attempt = Episode | EnvironmentEpisode | HarnessEpisode | PythonAgentEpisode
BUILT_IN_AGENTS = ("builtin", "command")
log = logging.getLogger(__name__)


class Collector:
    """`async with Collector(...) as collector:`. `grade` is rewards.grading.grade, `reward` the section [reward]; a
    `teacher` scores turns. What harnesses print goes to `logs`/agents."""

    def __init__(
        self,
        config: RolloutConfig,
        sandbox: SandboxConfig,
        *,
        servers: ServerPool,
        sandboxes: Sandboxes,
        grade: Grade,
        chat: ChatFormat,
        seed: int,
        teacher: ServerPool | None = None,
        router: RequestRouter | None = None,
        reward: RewardConfig | None = None,
        tasks: TasksConfig | None = None,
        logs: Path | None = None,
    ) -> None:
        self._logs, self._harness_failed = logs, False
        self._config, self._sandbox = config, sandbox
        self._sandboxes, self._chat, self._seed = sandboxes, chat, seed
        self._client = EngineClient(timeout_s=config.request_timeout_s, api_key=config.api_key)
        self._end_token_ids = end_token_ids(servers.model, chat.end_token_id)
        self._engine = Engine(servers, self._client, config, router)
        self._places = asyncio.Semaphore(config.max_concurrent)  # of all batches that run at once
        self._grader = TaskGrader(grade, sandbox, sandboxes)
        self._rewards = RewardScorer(
            reward or RewardConfig(), retries=config.max_retries, budget_s=sandbox.grading_budget_s
        )
        self._teacher = Engine(teacher, self._client, config) if teacher else None
        self._endpoint = AgentEndpoint()
        self._code, self._tasks = UserCode(threads=config.max_concurrent), tasks or TasksConfig()
        self._environment = environment_maker(self._tasks)
        self._agent = None if config.agent in BUILT_IN_AGENTS else AGENTS.get(config.agent)
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Collector:
        await self._open.enter_async_context(self._client)
        await self._open.enter_async_context(self._rewards)
        self._open.callback(self._code.close)
        if self._config.agent != "builtin":
            await self._open.enter_async_context(self._endpoint)
        return self

    async def __aexit__(self, *exception: object) -> None:
        for engine in filter(None, (self._engine, self._teacher)):
            await engine.close()
        await self._open.aclose()

    async def collect(
        self,
        update: int,
        policy_version: int,
        groups: Sequence[Sequence[Task]],
        emit: Emit,
        *,
        batch: int | None = None,
        temperature: float | None = None,
        score: bool = True,
        first_group: int = 0,
        first_lane: int = 0,
    ) -> None:
        """Run trajectory i of group b on groups[b - first_group][i]; returns when every one is rewarded (and scored)
        or lost.

        `first_lane` is how many trajectories this update had before: each has a lane of the timeline to itself.
        Sampling seeds come from `batch` (default `update`): two updates of one batch draw the same tokens.
        """
        numbered = enumerate(groups, first_group)
        work = [(TrajectoryId(update, b, i), task) for b, group in numbered for i, task in enumerate(group)]
        drawn = update if batch is None else batch
        await self.attempt(
            policy_version, work, emit, batch=drawn, temperature=temperature, score=score, first_lane=first_lane
        )

    async def attempt(
        self,
        policy_version: int,
        work: Sequence[tuple[TrajectoryId, Task]],
        emit: Emit,
        *,
        batch: int,
        temperature: float | None = None,
        score: bool = True,
        first_lane: int = 0,
    ) -> None:
        """The same for any set of trajectories: what one draws does not depend on which others run beside it."""
        settings = EpisodeSettings(
            rollout=self._config,
            command_timeout_s=self._sandbox.command_timeout_s,
            policy_version=policy_version,
            seed=self._seed,
            batch=batch,
            temperature=self._config.temperature if temperature is None else temperature,
            end_token_ids=self._end_token_ids,
        )
        async with asyncio.TaskGroup() as running:
            for lane, (trajectory, task) in enumerate(work, first_lane):
                report = Report(trajectory, tracing.rollout_lane(lane), emit)
                scorer = Scorer(self._teacher, report, self._config) if self._teacher and score else None
                running.create_task(self._one(task, report, settings, scorer))

    async def _one(self, task: Task, report: Report, settings: EpisodeSettings, scorer: Scorer | None) -> None:
        workspace = Workspace(self._sandboxes, task, max_replays=self._config.max_retries)
        async with self._places:
            try:
                with tracing.span(report.lane, "trajectory"):
                    await self._sample_and_grade(task, report, settings, workspace, scorer)
            except InfrastructureFailure as failure:
                report.lost(str(failure))
            except MegathunderError:
                raise
            except Exception as error:  # of a grader, a tokenizer or a template: it costs this trajectory alone
                log.exception("task %s: trajectory %s is lost", task.id, report.id)
                report.lost(f"{type(error).__name__}: {error}")
            except asyncio.CancelledError:
                if scorer is not None:
                    scorer.cancel()
                raise
            finally:
                await workspace.close()
        if scorer is not None:
            await scorer.ended()

    async def _sample_and_grade(
        self, task: Task, report: Report, settings: EpisodeSettings, workspace: Workspace, scorer: Scorer | None
    ) -> None:
        def on_turn(turn: TurnCompleted, token_ids: tuple[int, ...]) -> None:
            report.emit(turn)
            if scorer is not None:
                scorer.begin(turn, token_ids)

        def recorder() -> TrajectoryRecorder:
            return TrajectoryRecorder(
                task,
                report.id,
                lane=report.lane,
                settings=settings,
                engine=self._engine,
                chat=self._chat,
                workspace=workspace,
                on_turn=on_turn,
            )

        episode, trajectory = await self._until_it_ends(recorder, workspace, scorer)
        report.emit(TrajectoryCompleted(trajectory=trajectory, at_s=time.monotonic()))
        started_s = time.monotonic()
        with tracing.span(report.lane, "verifier"):
            score = await self._rewards.score(
                task,
                lambda: finished_episode(task, trajectory, self._chat, episode.answer, episode.reward),
                self._sandboxes,
                lambda: self._grader.reward(task, workspace, episode.answer),
                episode.reward,
            )
        now = time.monotonic()
        rewarded = Rewarded(id=report.id, reward=score.reward, parts=score.parts, verifier_s=now - started_s, at_s=now)
        report.emit(rewarded)

    async def _until_it_ends(
        self, recorder: Callable[[], TrajectoryRecorder], workspace: Workspace, scorer: Scorer | None
    ) -> tuple[Attempt, Trajectory]:
        """A harness that breaks is started anew, in a clean sandbox; twice in the same way it would a third time."""
        said = ""
        for attempt in itertools.count():
            episode = self._episode(recorder())
            try:
                return episode, await episode.run()
            except HarnessFailed as failure:
                self._show_once(failure)
                if attempt >= self._config.max_retries or str(failure) == said:
                    raise
                said = str(failure)
            await workspace.restart()
            if scorer is not None:
                scorer.cancel()

    def _show_once(self, failure: HarnessFailed) -> None:
        """The first failure of a harness with what it printed; the others are in the reasons of what is lost."""
        if not self._harness_failed:
            log.warning("%s", failure)
        self._harness_failed = True

    def _episode(self, recorder: TrajectoryRecorder) -> Attempt:
        """Who decides what the policy is asked next."""
        if self._environment is not None:
            session = open_environment(
                self._environment, self._tasks, recorder.task, self._code, self._config.max_retries
            )
            return EnvironmentEpisode(recorder, session)
        if self._agent is not None:
            return PythonAgentEpisode(recorder, self._endpoint, self._agent, self._config.agent, self._code)
        if self._config.agent == "command":
            name = f"{recorder.id}.log".replace("/", "-")
            log_file = self._logs / "agents" / name if self._logs else None
            return HarnessEpisode(recorder, self._endpoint, self._config.agent_command, log_file)
        return Episode(recorder)


class Report:
    """What is said about one trajectory: nothing after its loss."""

    def __init__(self, trajectory: TrajectoryId, lane: str, emit: Emit) -> None:
        self.id, self.lane = trajectory, lane
        self._emit, self._lost = emit, False

    def emit(self, event: Event) -> None:
        if not self._lost:
            self._emit(event)

    def lost(self, reason: str) -> None:
        """The machinery failed it for good."""
        self.emit(TrajectoryLost(id=self.id, reason=reason, at_s=time.monotonic()))
        self._lost = True


class Scorer:
    """The teacher's log-probabilities of one trajectory's turns, asked for while the next turn is sampled."""

    def __init__(self, teacher: Engine, report: Report, config: RolloutConfig) -> None:
        self._teacher, self._report, self._config = teacher, report, config
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, turn: TurnCompleted, token_ids: tuple[int, ...]) -> None:
        """Score the ACTION that ends `token_ids` [T]."""
        self._tasks.append(asyncio.create_task(self._score(turn, token_ids)))

    async def ended(self) -> None:
        """Every score arrived, or the trajectory is lost."""
        try:
            await asyncio.gather(*self._tasks)
        finally:
            self.cancel()

    def cancel(self) -> None:
        """Stop what is still asked for. Idempotent."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        self._teacher.release(self._report.id)

    async def _score(self, turn: TurnCompleted, token_ids: tuple[int, ...]) -> None:
        action = turn.segments[-1]
        assert action.role is Role.ACTION
        try:
            with tracing.span(self._report.lane, "score", turn=turn.turn):
                logprobs = await self._teacher.score(
                    self._report.id,
                    token_ids,
                    len(token_ids) - len(action.token_ids),
                    EpisodeClock(self._config.deadline_s),
                )
        except (InfrastructureFailure, DeadlinePassed) as failure:
            self._report.lost(f"turn {turn.turn} was not scored: {failure or 'deadline'}")
            return
        scored = TurnScored(id=self._report.id, turn=turn.turn, teacher_logprobs=logprobs, at_s=time.monotonic())
        self._report.emit(scored)
