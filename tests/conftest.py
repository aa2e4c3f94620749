"""Property tests have no deadline an example: a busy machine is not a fault."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("megathunder", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("megathunder")
