"""Where a policy's commands run, isolated and limited.

Called by rollout/ and evaluation/. Refuses to start where the isolation does not hold; never runs anything on the host.
"""

from megathunder.sandbox.interface import ExecResult, Pool, Sandbox
from megathunder.sandbox.pool import SandboxPool, open_pool

__all__ = ["ExecResult", "Pool", "Sandbox", "SandboxPool", "open_pool"]
