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
