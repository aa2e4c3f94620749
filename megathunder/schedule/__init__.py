"""The schedule: which learner work may run when. `scheduler.py` has the interface and the event/command table."""

from megathunder.schedule.scheduler import ScheduleReport, UpdateScheduler

__all__ = ["ScheduleReport", "UpdateScheduler"]
