"""Lanes of traces and timelines: one for each device, and more where a device serves several stages at once."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_lab.sim.machine import Span
from holdfast_lab.sim.system import System

NO_DEVICE = "no device"  # of stages that only take time
_TOUCHING_S = 1e-12  # by so much spans may overlap that follow one another


def lanes_of(spans: Sequence[Span]) -> list[int]:
    """For each span the number of its lane, from 0: the first that is free when it begins."""
    lanes = [0] * len(spans)
    free_from_s: list[float] = []
    for number in sorted(range(len(spans)), key=lambda number: (spans[number].begin_s, spans[number].end_s)):
        span = spans[number]
        found = next((lane for lane, at in enumerate(free_from_s) if at <= span.begin_s + _TOUCHING_S), None)
        if found is None:
            found = len(free_from_s)
            free_from_s.append(0.0)
        free_from_s[found] = span.end_s
        lanes[number] = found
    return lanes


def stages_by_role(system: System) -> dict[str, tuple[str, ...]]:
    """The stages that run on each device, in the system's order; devices without any are left out."""
    found = {role: tuple(name for name, stage in system.active.items() if role in stage.on) for role in system.devices}
    found[NO_DEVICE] = tuple(name for name, stage in system.active.items() if not stage.on)
    return {role: stages for role, stages in found.items() if stages}
