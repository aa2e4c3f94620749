"""Which trajectory, group and task a request belongs to: what a server is told so that it can draft from its kin.

It travels as `sampling_params.custom_params` of /generate, which SGLang hands to its scheduler unread.
"""

from __future__ import annotations

import msgspec

from megathunder.types import TrajectoryId


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exact identities; empty: unknown, and then kin to nothing."""

    trajectory: str = ""
    group: str = ""
    task: str = ""


def origin_of(trajectory: TrajectoryId, task_id: str) -> Origin:
    """What a server that drafts is told of a trajectory's requests."""
    return Origin(trajectory=str(trajectory), group=f"u{trajectory.update}/g{trajectory.group}", task=task_id)


def read_origin(custom_params: object, request: str) -> Origin:
    """The origin in a request's `custom_params`; one without is a trajectory of its own, named after `request`."""
    if not isinstance(custom_params, dict) or "trajectory" not in custom_params:
        return Origin(trajectory=request)
    known = {name: custom_params[name] for name in Origin.__struct_fields__ if name in custom_params}
    return msgspec.convert(known, Origin)
