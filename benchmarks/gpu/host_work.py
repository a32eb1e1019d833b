"""What the host does in a step of training on a device, without what it waits for: from the steps' reports alone.

Two stages wait. ``plan`` begins with the loader's next batch, which a worker may not have planned yet: the report of
that batch says when its planning ended. ``commit`` waits for an earlier step, whose rows may not have come back yet:
the report of that step says when its last work on the device ended. Whatever else these stages take is work, the
training thread's own or the pool's thread's that it waits for, and so are all the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.train.step_report import StepReport


@dataclass(frozen=True, slots=True)
class HostTime:
    """Of one step, in milliseconds."""

    work: float
    for_loader: float
    for_device: float


def host_times(reports: Mapping[int, StepReport], retired_in: Mapping[int, int], window: int) -> dict[int, HostTime]:
    """By step, where all that it takes is known.

    reports: by step. retired_in: of a step, during which step's commit the pool got it. window: batches that are taken
    ahead, the current one included.
    """
    retired = {later: step for step, later in retired_in.items()}
    times: dict[int, HostTime] = {}
    for step, report in reports.items():
        taken, back = reports.get(step + window - 1), reports.get(retired.get(step, 0))
        if taken is None or back is None or not back.device:
            continue
        stages = report.stage_ms
        begin_of_commit = report.began + (sum(stages.values()) - stages["commit"]) * 1e-3
        for_loader = _waited(report.began, stages["plan"], taken.planning.ended)
        for_device = _waited(begin_of_commit, stages["commit"], max(span.ended for span in back.device.values()))
        times[step] = HostTime(sum(stages.values()) - for_loader - for_device, for_loader, for_device)
    return times


def _waited(began: float, stage_ms: float, until: float) -> float:
    """Of a stage, the milliseconds before `until`."""
    return min(max(0.0, (until - began) * 1e3), stage_ms)
