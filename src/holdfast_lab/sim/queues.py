"""Who waits for a device: those with the lowest priority first, and of these the first that came.

As SimPy's PriorityResource, with its order of events at the same instant, and little else: most of what a
simulation does is to ask for devices and to give them back.
"""

from __future__ import annotations

import heapq
from itertools import count

import simpy


class DeviceQueue:
    """A device that serves `capacity` at a time. Whoever was told that it is his gives it back once."""

    def __init__(self, environment: simpy.Environment, capacity: int) -> None:
        self._environment = environment
        self._free = capacity
        self._waiting: list[tuple[int, float, int, simpy.Event]] = []
        self._numbers = count()

    def request(self, priority: int) -> simpy.Event:
        """Succeeds when the device is the caller's."""
        event = simpy.Event(self._environment)
        heapq.heappush(self._waiting, (priority, self._environment.now, next(self._numbers), event))
        self._serve_next()
        return event

    def give_back(self) -> None:
        """The next one is served after what else happens at this instant by now."""
        self._free += 1
        served = simpy.Event(self._environment)
        served.callbacks.append(self._serve_next)
        served.succeed()

    def _serve_next(self, _: simpy.Event | None = None) -> None:
        if self._free > 0 and self._waiting:
            self._free -= 1
            heapq.heappop(self._waiting)[-1].succeed()
