"""Whose time a batch takes: every instant of a steady batch is given to one stage of those that run in it.

Stages overlap, so their durations do not sum to a batch's. Where several run at one instant, it belongs to the first of
them in the order of PARTS: compute before memory, memory before movement, logs last. A stage's share is the time by
which nothing before it in that order hides it; shares and the time in which nothing runs sum to the batch's time.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from holdfast_lab.sim.machine import Run
from holdfast_lab.sim.system import Does, System

PARTS: Final[Mapping[str, tuple[Does, ...]]] = {
    "top MLP": ("interaction_top",),
    "bottom MLP forward": ("bottom_forward",),
    "bottom MLP backward": ("bottom_backward",),
    "update": ("update",),
    "lookup": ("lookup",),
    "cache": ("fetch", "evict"),
    "transfer": ("move_rows", "move_pooled", "move_indices", "move_row_gradients", "move_gradients", "all_reduce"),
    "row log": ("log_rows", "append_rows"),
    "MLP log": ("log_network",),
}
OTHER = "other"
WAITING = "waiting"


def part_of(does: str) -> str:
    """The part of a batch that a kind of work belongs to."""
    return next((part for part, kinds in PARTS.items() if does in kinds), OTHER)


def exposed_s(run: Run, system: System) -> dict[str, float]:
    """Seconds of a batch by stage, the mean over the steady ones, and under WAITING those in which nothing runs."""
    begin_s = max(span.end_s for span in run.spans if span.batch == run.steady.start - 1)
    end_s = max(span.end_s for span in run.spans if span.batch == run.steady.stop - 1)
    order = {stage: place for place, stage in enumerate(sorted(system.active, key=lambda name: _rank(system, name)))}
    spans = [span for span in run.spans if span.end_s > begin_s and span.begin_s < end_s]
    cuts = sorted({begin_s, end_s, *(at for s in spans for at in (s.begin_s, s.end_s) if begin_s < at < end_s)})
    found = dict.fromkeys((*system.active, WAITING), 0.0)
    for left, right in pairwise(cuts):
        running = {span.stage for span in spans if span.begin_s <= left and span.end_s >= right}
        found[min(running, key=order.__getitem__, default=WAITING)] += (right - left) / len(run.steady)
    return found


def exposed_by_part_s(run: Run, system: System) -> dict[str, float]:
    """As `exposed_s`, the stages of a part together. In the order of PARTS; parts without time are left out."""
    found = dict.fromkeys((*PARTS, OTHER, WAITING), 0.0)
    for stage, seconds in exposed_s(run, system).items():
        found[WAITING if stage == WAITING else part_of(system.stages[stage].does)] += seconds
    return {part: seconds for part, seconds in found.items() if seconds > 0}


def _rank(system: System, stage: str) -> int:
    part = part_of(system.stages[stage].does)
    return list(PARTS).index(part) if part in PARTS else len(PARTS)
