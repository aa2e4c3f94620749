"""An OpenAI-compatible endpoint in front of the rollout servers, behind which any agent harness can be trained.

    harness --messages--> AgentEndpoint -> Session -> Conversation (known tokens) -> TrajectoryRecorder -> Engine
            --commands-->                          -> TrajectoryRecorder -> Workspace (the sandbox)

`HarnessEpisode` runs a harness for one trajectory, in the place of the built-in agent loop. Called by the collector.
"""

from megathunder.rollout.endpoint.episode import HarnessEpisode, HarnessFailed
from megathunder.rollout.endpoint.server import AgentEndpoint

__all__ = ["AgentEndpoint", "HarnessEpisode", "HarnessFailed"]
