"""SimPy's environment with a clock of whole nanoseconds, and an event that goes first."""

from typing import TYPE_CHECKING

import simpy
from simpy.events import URGENT, Event


class Clock(simpy.Environment):
    """An environment whose every delay is a whole number, and so is its time."""

    if TYPE_CHECKING:

        @property
        def now(self) -> int:
            """Nanoseconds since the start."""


class Alarm(Event):
    """An event after `delay_ns`, before everything else at that time."""

    def __init__(self, env: Clock, delay_ns: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, URGENT, delay_ns)
