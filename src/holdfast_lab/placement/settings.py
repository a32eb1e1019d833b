"""The settings of a pool that a plan comes to: a scratchpad, and a log, for the tiers that there are.

DRAM holds the scratchpad and the log's index, which has an entry for each row of the log: so a larger log, which is a
tier of the rows that were updated last, leaves less to the scratchpad. Sizes of the log are tried in doublings, each
with the step that it makes; the smallest of those within 2% of the best one is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast_lab.placement.step_plan import StepInputs
from holdfast_lab.placement.step_time import StepTime
from holdfast_lab.placement.tiers import Tier

_ENTRY_BYTES = 10 / 0.54  # of the log's index (core/rows/row_index.h): between its growth and half of that full
_LEAST_LOG_BYTES = 16 << 20
_RECORDS = 8  # of a step, that a log has room for at least
_BATCHES = 2  # that a scratchpad has room for at least
_NEAR_ENOUGH = 1.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Of a new ``block`` pool. log_tier: its name; log_directory: on it, None where the log lies beside the rows.
    index_bytes: DRAM beside the scratchpad. step: what they are predicted to make."""

    scratchpad_bytes: int
    log_bytes: int
    log_tier: str
    log_directory: str | None
    index_bytes: int
    step: StepTime


def best_settings(inputs: StepInputs, tiers: Sequence[Tier]) -> PoolSettings | None:
    """None for a pool in place, and where DRAM or the tier of the log has no room for some steps."""
    if inputs.host.store != "log":
        return None
    of_log = inputs.log_medium or inputs.medium
    dram_bytes = sum(tier.capacity_bytes for tier in tiers if tier.kind == "dram")
    work = inputs.costs().work
    assert work is not None
    tried = [
        _settings(inputs, of_log, dram_bytes, log_bytes, work.record_bytes)
        for log_bytes in _log_sizes(work.record_bytes, of_log.capacity_bytes)
    ]
    fitting = [settings for settings in tried if settings is not None]
    if not fitting:
        return None
    best = min(settings.step.ms for settings in fitting)
    return next(settings for settings in fitting if settings.step.ms <= _NEAR_ENOUGH * best)


def _log_sizes(record_bytes: float, most_bytes: int) -> Iterator[int]:
    """Ascending."""
    log_bytes = max(_LEAST_LOG_BYTES, round(_RECORDS * record_bytes))
    while log_bytes <= most_bytes:
        yield log_bytes
        log_bytes *= 2


def _settings(
    inputs: StepInputs, of_log: Tier, dram_bytes: int, log_bytes: int, record_bytes: float
) -> PoolSettings | None:
    """None where DRAM has no room for the index and the rows of a few steps."""
    steps = log_bytes / record_bytes
    index_bytes = round(_ENTRY_BYTES * sum(curve.distinct(steps) for curve in inputs.curves))
    table_bytes = sum(table.rows * table.row_bytes for table in inputs.demand.tables)
    scratchpad_bytes = min(dram_bytes - index_bytes, 2 * table_bytes)
    if scratchpad_bytes < _BATCHES * record_bytes:
        return None
    options = replace(inputs.options, scratchpad_bytes=scratchpad_bytes, log_bytes=log_bytes)
    return PoolSettings(
        scratchpad_bytes=scratchpad_bytes,
        log_bytes=log_bytes,
        log_tier=of_log.name,
        log_directory=None if inputs.log_medium is None else of_log.directory,
        index_bytes=index_bytes,
        step=replace(inputs, options=options).predict(),
    )


def settings_toml(settings: PoolSettings, note: str) -> str:
    """The text of a TOML file that `holdfast train` takes after the run's own."""
    lines = [f"# {note}", "", "[pool]", 'medium = "block"']
    lines += [f"scratchpad_bytes = {settings.scratchpad_bytes}", f"log_bytes = {settings.log_bytes}"]
    if settings.log_directory is not None:
        lines += ["", "[pool.log]", f"directory = {json.dumps(settings.log_directory)}"]
    return "\n".join(lines) + "\n"
