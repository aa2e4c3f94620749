"""The load controller: hysteresis on scripted loads, and servers that cannot be asked or told."""

from __future__ import annotations

import asyncio

from megathunder.config.speculation import SpeculationConfig
from megathunder.coordinator.load_controller import LoadController, Regime, Regimes
from megathunder.errors import InfrastructureFailure
from megathunder.types import ServerAddress

SETTINGS = SpeculationConfig(low_load_requests=4, high_load_requests=10)
SERVER = ServerAddress(name="rollout-0", url="http://127.0.0.1:1")


class Control:
    """Servers with scripted loads; None: does not answer."""

    def __init__(self, loads: list[int | None], refuses: int = 0) -> None:
        self.loads, self.refuses, self.told = loads, refuses, []

    async def requests(self, server: ServerAddress) -> int:
        load = self.loads.pop(0)
        if load is None:
            raise InfrastructureFailure("no answer")
        return load

    async def set_state(self, server: ServerAddress, numbers: dict[str, float]) -> None:
        if self.refuses:
            self.refuses -= 1
            raise InfrastructureFailure("refused")
        self.told.append(numbers["speculation_max_draft_tokens"])


def run(control: Control) -> LoadController:
    controller = LoadController(SETTINGS, control, lambda: [SERVER])

    async def main() -> None:
        async def sleep(seconds: float) -> None:
            assert seconds == SETTINGS.load_every_s
            if not control.loads:
                raise asyncio.CancelledError

        try:
            await controller.watch(sleep)
        except asyncio.CancelledError:
            pass

    asyncio.run(main())
    return controller


def test_a_switch_takes_two_answers_in_a_row_and_between_the_limits_nothing_changes():
    control = Control([10, 9, 10, 10, 12, 7, 5, 4, 5, 4, 4, 9, 9])
    controller = run(control)
    assert control.told == [0, SETTINGS.max_draft_tokens]
    assert controller.regimes.regime(SERVER) is Regime.LOW


def test_load_that_swings_between_the_limits_never_switches():
    control = Control([9, 5] * 20)
    run(control)
    assert control.told == []


def test_a_server_that_does_not_answer_stays_as_it_is_and_delays_nobody():
    control = Control([10, None, 10, None, None, 10])
    controller = run(control)
    assert control.told == [0] and controller.regimes.regime(SERVER) is Regime.HIGH


def test_a_server_that_could_not_be_told_is_told_again():
    control = Control([10, 10, 10, 10], refuses=2)
    controller = run(control)
    assert control.told == [0] and controller.regimes.regime(SERVER) is Regime.HIGH


def test_a_restarted_server_begins_anew():
    regimes = Regimes(SETTINGS)
    regimes.entered(SERVER, Regime.HIGH)
    again = ServerAddress(name=SERVER.name, url=SERVER.url, incarnation=1)
    assert regimes.regime(again) is Regime.LOW and regimes.regime(SERVER) is Regime.HIGH


def test_switched_off_nothing_drafts_until_it_is_switched_on_whatever_the_load():
    async def main() -> None:
        control, ready = Control([0, 0, 10, 10]), [SERVER]
        controller = LoadController(SETTINGS, control, lambda: ready)
        await controller.attend(SERVER)
        await controller.switch(on=False)
        assert control.told == [0]
        again = ServerAddress(name=SERVER.name, url=SERVER.url, incarnation=1)
        ready[:] = [again]
        for _ in range(3):
            await controller.attend(again)
        assert control.told == [0, 0] and len(control.loads) == 3, "told once each; the load does not matter"
        await controller.switch(on=True)
        assert control.told == [0, 0, SETTINGS.max_draft_tokens]
        await controller.attend(again), await controller.attend(again)
        assert control.told[3:] == [0] and controller.regimes.regime(again) is Regime.HIGH

    asyncio.run(main())


def test_a_server_that_was_not_told_of_the_switch_is_told_by_the_next_round():
    async def main() -> None:
        control = Control([4, 4], refuses=1)
        controller = LoadController(SETTINGS, control, lambda: [SERVER])
        await controller.switch(on=False)
        assert control.told == []
        await controller.attend(SERVER)
        assert control.told == [0]
        control.refuses = 1
        await controller.switch(on=True)
        await controller.attend(SERVER)
        assert control.told == [0, SETTINGS.max_draft_tokens]

    asyncio.run(main())


def test_a_server_whose_load_was_asked_for_before_the_switch_is_not_told_after_it():
    async def main() -> None:
        asked = asyncio.Event()

        class Slow(Control):
            async def requests(self, server: ServerAddress) -> int:
                asked.set()
                await asyncio.sleep(0.01)
                return await super().requests(server)

        control = Slow([0])
        controller = LoadController(SETTINGS, control, lambda: [SERVER])
        controller.regimes.entered(SERVER, Regime.HIGH)
        controller.regimes.saw(SERVER, 0)  # one more answer switches it on
        watching = asyncio.create_task(controller.watch())
        await asked.wait()
        await controller.switch(on=False)
        assert control.told[-1:] == [0]
        watching.cancel()

    asyncio.run(main())
