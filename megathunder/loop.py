"""The training loop: one for every schedule.

    rollouts --events--> scheduler --commands--> cells --Done--> scheduler         (`stream`)
    every contribution APPLIED or DROPPED -> TakeStep -> Publish -> next update    (the barrier)

Backpressure, what each side waits for and who unblocks it:
    a trajectory    a place in the collector           a trajectory that ends
    a cell          a runnable contribution            an event (turn, reward, score), or a free accumulator
    a new group     a group that closes with equal rewards (dynamic sampling)
    the step        `scheduler.finished`               the last Done, and the last reward
    next rollouts   every live server's acknowledgement of the new version

A schedule that samples one update ahead starts the next rollouts before it learns from these; publication then waits
for them to end, so that no trajectory ever holds tokens of two versions.
"""

from __future__ import annotations

import time

from megathunder.coordinator.coordinator import Coordinator
from megathunder.coordinator.rollouts import Rollouts
from megathunder.schedule.scheduler import UpdateScheduler
from megathunder.types import Done


async def train(run: Coordinator) -> None:
    """Take every remaining update of the run."""
    ahead: Rollouts | None = None
    for update in run.remaining_updates():
        rollouts = ahead if ahead and run.continues(update) else run.start_rollouts(update)
        ahead = run.start_rollouts(update + 1) if run.samples_ahead(update) else None
        scheduler = run.schedule(rollouts)
        await stream(run, scheduler, rollouts)
        await run.take_step(scheduler, rollouts)
        if ahead:
            await ahead.ended()
        await run.publish(rollouts)
        await run.close_update(scheduler, rollouts)


async def stream(run: Coordinator, scheduler: UpdateScheduler, rollouts: Rollouts) -> None:
    """Feed events to the scheduler and commands to free cells until all work is done and the last reward is in."""
    run.listen(rollouts)
    while not (scheduler.finished and rollouts.drained):
        run.replace_groups(scheduler, rollouts)
        for cell in run.free_cells:
            if command := scheduler.next_work(cell, time.monotonic()):
                await run.submit(cell, command)
        for cell in run.cells_with_room:
            if command := scheduler.next_ahead(cell, time.monotonic()):
                await run.submit(cell, command)
        for message in await rollouts.messages(run.config.stall_limit_s):
            if isinstance(message, Done):
                run.on_done(message, rollouts)
                scheduler.on_done(message, time.monotonic())
            else:
                run.on_event(message, rollouts)
                scheduler.on_event(message, time.monotonic())
        run.show(scheduler, rollouts)
