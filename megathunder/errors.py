"""Errors a person can act on: each says what was seen, what was expected and the remedy.

`UserError` is printed without a traceback by the tools. `InfrastructureFailure` is a fault of the
machinery (a dead server, a hung sandbox): the trajectory is lost, it is never a reward of zero.
"""

from __future__ import annotations


class MegathunderError(Exception):
    """Base of every error this package raises on purpose."""


class UserError(MegathunderError):
    """Something a person can mend: `seen` is what was found, `expected` what is legal, `remedy` what to do."""

    def __init__(self, seen: str, *, expected: str, remedy: str) -> None:
        super().__init__(f"{seen}\n  expected: {expected}\n  remedy:   {remedy}")
        self.seen, self.expected, self.remedy = seen, expected, remedy


class ConfigError(UserError):
    """A setting, or a combination of settings, that cannot work; raised before anything expensive starts."""


class IsolationError(UserError):
    """The sandbox does not isolate on this machine; the run refuses to start."""


class InfrastructureFailure(MegathunderError):
    """A fault outside the policy (server, sandbox, grader). The trajectory is DROPPED or retried, never scored."""


class StalePolicyError(MegathunderError):
    """A token of another policy version reached an update that allows none."""


class IllegalMove(MegathunderError):
    """A contribution was asked to make a move that its lifecycle does not have."""
