"""Systems: schedules over devices.

A system is a list of stages. A stage does one kind of work (work.py) on some devices, named by their roles, after the
stages that it waits for: of its own batch, or, with `previous.` before the name, of the batch before. `base` names the
system from which everything else is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from holdfast_lab.sim.model import Sharding

Does = Literal[
    "bottom_forward", "interaction_top", "bottom_backward", "lookup", "update", "log_rows", "log_network",
    "move_pooled", "move_gradients", "move_rows", "move_row_gradients", "move_indices", "fetch", "evict",
    "append_rows", "all_reduce", "given",
]  # fmt: skip
RowScope = Literal["accesses", "unique", "missed"]

PREVIOUS = "previous."


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """on: roles, all held while it runs. rows: which of the batch's. part: of the work, done in one batch. calls: of
    software that begin it. skip: it is not there, and who waits for it waits for what it would wait for. priority:
    where several wait for a device, the lowest is served first.

    seconds: how long it takes where it does "given" work, which was measured. after_earlier: further stages that it
    waits for, of the batch so many before. beside: processors (roles) that it takes a part of while others hold them,
    by how many seconds each of its seconds makes those longer. slice_s: it gives its devices back after so long,
    and asks for them again, as work of many requests does."""

    does: Does
    on: tuple[str, ...]
    after: tuple[str, ...] = ()
    rows: RowScope = "accesses"
    part: float = 1.0
    calls: float = 1.0
    skip: bool = False
    priority: int = 0
    seconds: float | None = None
    after_earlier: dict[str, int] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    slice_s: float = math.inf

    def __post_init__(self) -> None:
        if (self.does == "given") != (self.seconds is not None):
            raise ValueError('does = "given" and seconds mean something only together')
        numbers = {"seconds": self.seconds or 0.0} | {f"beside.{role}": part for role, part in self.beside.items()}
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} = {value}; it must be 0 or more")
        if not self.slice_s > 0:
            raise ValueError(f"slice_s = {self.slice_s}; it must be more than 0")
        if any(batches < 1 for batches in self.after_earlier.values()):
            raise ValueError(f"after_earlier = {self.after_earlier}; it counts batches back, at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Rows kept in faster memory: `share` of all rows, chosen as `policy` says."""

    policy: Literal["static", "lru", "look_forward"]
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """devices: by role, the name of a device; one that no stage uses takes power as well. gpus: how many there are of
    each processor (device.Processor), which share samples evenly, and tables as `sharding` says (sharding.py).

    Raises ValueError where a stage waits for one that is not there, or for itself, or names a role without a device.
    """

    title: str
    base: str | None = None
    devices: dict[str, str]
    stages: dict[str, Stage]
    cache: Cache | None = None
    gpus: int = 1
    sharding: Sharding = "table"
    source: str = ""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"gpus = {self.gpus}; there is at least one")
        for name, stage in self.stages.items():
            if not (stage.on or stage.does == "given") or len(set(stage.on)) < len(stage.on):
                raise ValueError(f"stages.{name}.on = {list(stage.on)}; it names one device at least, and none twice")
            for role in (*stage.on, *stage.beside):
                if role not in self.devices:
                    raise ValueError(f"stages.{name}.on: there is no device {role!r}; there are {_names(self.devices)}")
            for other in (*stage.after, *stage.after_earlier):
                if other.removeprefix(PREVIOUS) not in self.stages:
                    raise ValueError(f"stages.{name}.after: there is no stage {other!r}; {_names(self.stages)}")
        if not self.active:
            raise ValueError("stages: there is none, or all are skipped")
        self._refuse_circles()

    def waits(self, name: str) -> tuple[str, ...]:
        """What a stage waits for, through those that are skipped."""
        return tuple(dict.fromkeys(self._waits(name, "", set())))

    def _waits(self, name: str, prefix: str, passed: set[tuple[str, str]]) -> Iterator[str]:
        for other in self.stages[name].after:
            plain = other.removeprefix(PREVIOUS)
            # What is two batches back counts as one batch back, where it ends no earlier.
            at = prefix if other == plain else PREVIOUS
            if not self.stages[plain].skip:
                yield at + plain
            elif (at, plain) not in passed:
                passed.add((at, plain))
                yield from self._waits(plain, at, passed)

    def _refuse_circles(self) -> None:
        within_a_batch = {
            name: [other for other in stage.after if not other.startswith(PREVIOUS)]
            for name, stage in self.stages.items()
        }
        try:
            TopologicalSorter(within_a_batch).prepare()
        except CycleError as error:
            circle = " after ".join(reversed(error.args[1]))
            raise ValueError(f"stages wait for each other within a batch: {circle}") from None

    @property
    def active(self) -> dict[str, Stage]:
        return {name: stage for name, stage in self.stages.items() if not stage.skip}


def _names(table: dict[str, object] | dict[str, str] | dict[str, Stage]) -> str:
    return ", ".join(table)
