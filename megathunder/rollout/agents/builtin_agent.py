"""One trajectory: prompt, sampled turn, command, observation, ... until an end with a reason.

An action that the policy did not finish is never executed. The end reasons:

    ANSWERED    `submit X`                                MAX_TURNS   the last turn's command ran, nothing submitted
    MALFORMED   `max_new_tokens` without the end token    MAX_TOKENS  no room for another token of `max_tokens`
    DEADLINE    the trajectory's own time is used up      (INFRASTRUCTURE is a TrajectoryLost event, never a result)

Called by the collector. Raises InfrastructureFailure when retries and replays are used up.
"""

from __future__ import annotations

from megathunder.rollout.agents.recorder import EpisodeSettings, RowFull, TrajectoryRecorder, turn_seed
from megathunder.rollout.servers.engine import DeadlinePassed
from megathunder.tasks import SubmitAnswer, observation_text, parse_action
from megathunder.types import EndReason, Role, Segment, Trajectory

__all__ = ["Episode", "EpisodeSettings", "turn_seed"]


class Episode:
    """One attempt. `answer` is what was submitted, if anything was, once `run` has returned."""

    def __init__(self, recorder: TrajectoryRecorder) -> None:
        self._recorder = recorder
        self.answer: str | None = None
        self.reward: float | None = None  # the task's grader decides

    async def run(self) -> Trajectory:
        """All tokens of the trajectory."""
        try:
            reason = await self._until_end()
        except DeadlinePassed:
            reason = EndReason.DEADLINE
        except RowFull:
            reason = EndReason.MAX_TOKENS
        finally:
            self._recorder.release()
        return self._recorder.trajectory(reason)

    async def _until_end(self) -> EndReason:
        recorder = self._recorder
        task, chat, config = recorder.task, recorder.chat, recorder.settings.rollout
        pending = Segment(role=Role.PROMPT, token_ids=tuple(recorder.prompt_ids()))
        while True:
            turn = await recorder.sample(pending)
            if not turn.ended:
                return EndReason.MAX_TOKENS if turn.no_room else EndReason.MALFORMED
            if task.single_turn:
                self.answer = turn.text
                return EndReason.ANSWERED
            action = parse_action(turn.text)
            if isinstance(action, SubmitAnswer):
                self.answer = action.answer
                return EndReason.ANSWERED
            result = await recorder.run_command(action.command)
            if recorder.turns >= task.max_turns:
                return EndReason.MAX_TURNS
            shown = observation_text(result.output, config.observation_characters, result.notice)
            pending = Segment(role=Role.OBSERVATION, token_ids=tuple(chat.observation_ids(shown)))
