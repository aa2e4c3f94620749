"""SGLang servers, the client in front of them, and the agent loop that turns tasks into trajectories.

ServerPool (start, watch, restart) <- Engine (place, retry) <- Episode (one trajectory) <- Collector (a batch)
ServerControl (weights, versions, prefix cache) is what publish/ uses
"""

from megathunder.rollout.agents.collector import Collector
from megathunder.rollout.servers.client import EngineClient, Generation
from megathunder.rollout.servers.control import ServerControl
from megathunder.rollout.servers.supervisor import ServerPool

__all__ = ["Collector", "EngineClient", "Generation", "ServerControl", "ServerPool"]
