"""The settings of a pool that a plan comes to: scratchpad, log and victim cache, for the tiers that there are.

DRAM holds the scratchpad, what says where victims are, and the log's index, which has an entry for each row of the log.
A byte-addressable tier that names a directory is shared by the log and the rows that leave the scratchpad, or has these
alone: the log may as well lie beside the rows. Both leave less to the scratchpad, so sizes of either are tried in
doublings, each with the step that it makes; the smallest of those within 2% of the best one is taken.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from holdfast_lab.placement.step_time import StepInputs, StepTime, predict_step, step_costs
from holdfast_lab.placement.tiers import Tier

_ENTRY_BYTES = 10 / 0.54  # of the log's index (core/rows/row_index.h): between its growth and half of that full
_LEAST_LOG_BYTES = 16 << 20
_AMPLE_SCRATCHPAD_BYTES = 16 << 20  # where all rows are few: what else a scratchpad holds may be more than they are
_RECORDS = 8  # of a step, that a log has room for at least
_BATCHES = 2  # that a scratchpad has room for at least
_NEAR_ENOUGH = 1.02
_VICTIM_SIZES = 5  # that are tried, each twice the one before, up to what the tier has room for


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Of a new ``block`` pool. log_tier, victim_tier: their names; log_directory: on it, None where the log lies beside
    the rows; victim_tier, victim_directory: None where victim_bytes is 0. index_bytes: DRAM beside the scratchpad.
    step: what they are predicted to make."""

    scratchpad_bytes: int
    log_bytes: int
    log_tier: str
    log_directory: Path | None
    victim_bytes: int
    victim_tier: str | None
    victim_directory: Path | None
    index_bytes: int
    step: StepTime


def best_settings(inputs: StepInputs, tiers: Sequence[Tier]) -> PoolSettings | None:
    """None for a pool in place, and where DRAM or the tier of the log has no room for some steps."""
    if inputs.host.store != "log":
        return None
    dram_bytes = sum(tier.capacity_bytes for tier in tiers if tier.kind == "dram")
    work = step_costs(inputs.with_options(victim_bytes=0)).work
    assert work is not None
    tried = [
        _settings(of_log, dram_bytes, log_bytes, victim_bytes, work.record_bytes)
        for of_log in _places_of_log(inputs)
        for log_bytes, victim_bytes in _sizes(of_log, work.record_bytes)
    ]
    fitting = [settings for settings in tried if settings is not None]
    if not fitting:
        return None
    best = min(settings.step.ms for settings in fitting)
    near_enough = [settings for settings in fitting if settings.step.ms <= _NEAR_ENOUGH * best]
    return min(near_enough, key=lambda settings: (settings.log_bytes, settings.victim_bytes))


def _places_of_log(inputs: StepInputs) -> list[StepInputs]:
    """On a medium of its own, where there is one; and beside the rows, where that medium could have victims as well."""
    if inputs.log_medium is None or inputs.log_medium != inputs.victim_medium:
        return [inputs]
    return [inputs, replace(inputs, log_medium=None)]


def _sizes(inputs: StepInputs, record_bytes: float) -> Iterator[tuple[int, int]]:
    """Of the log, and of the victim cache, which may be 0; together no larger than their tiers."""
    of_log, of_victims = inputs.log_medium or inputs.medium, inputs.victim_medium
    table_bytes = inputs.demand.table_bytes
    most_log_bytes = min(of_log.capacity_bytes, max(table_bytes, _LEAST_LOG_BYTES))  # an opening reads all of it
    for log_bytes, part in product(_log_sizes(record_bytes, most_log_bytes), range(_VICTIM_SIZES + 1)):
        if of_victims is None:
            if part == 0:
                yield log_bytes, 0
            continue
        room = of_victims.capacity_bytes - (log_bytes if of_victims == of_log else 0)
        yield log_bytes, (min(room, table_bytes) >> _VICTIM_SIZES - part) if part else 0


def _log_sizes(record_bytes: float, most_bytes: int) -> Iterator[int]:
    """Ascending."""
    log_bytes = max(_LEAST_LOG_BYTES, round(_RECORDS * record_bytes))
    while log_bytes <= most_bytes:
        yield log_bytes
        log_bytes *= 2


def _settings(
    inputs: StepInputs, dram_bytes: int, log_bytes: int, victim_bytes: int, record_bytes: float
) -> PoolSettings | None:
    """None where DRAM has no room for the index and the rows of a few steps, or all rows where these are fewer."""
    steps = log_bytes / record_bytes
    index_bytes = round(_ENTRY_BYTES * sum(curve.distinct(steps) for curve in inputs.curves))
    table_bytes = inputs.demand.table_bytes
    scratchpad_bytes = min(dram_bytes - index_bytes, max(2 * table_bytes, _AMPLE_SCRATCHPAD_BYTES))
    given = inputs.with_options(
        scratchpad_bytes=max(1, scratchpad_bytes), log_bytes=log_bytes, victim_bytes=victim_bytes
    )
    step = predict_step(given)
    assert step.store_work is not None
    all_rows = sum(table.rows for table in inputs.demand.tables)
    room_bytes = min(scratchpad_bytes, step.store_work.room_rows * table_bytes / all_rows)
    if step.store_work.room_rows < all_rows and room_bytes < _BATCHES * record_bytes:
        return None
    victims = inputs.victim_medium if victim_bytes else None
    return PoolSettings(
        scratchpad_bytes=scratchpad_bytes,
        log_bytes=log_bytes,
        log_tier=(inputs.log_medium or inputs.medium).name,
        log_directory=None if inputs.log_medium is None else inputs.log_medium.directory,
        victim_bytes=victim_bytes,
        victim_tier=None if victims is None else victims.name,
        victim_directory=None if victims is None else victims.directory,
        index_bytes=index_bytes,
        step=step,
    )


def settings_toml(settings: PoolSettings, note: str) -> str:
    """The text of a TOML file that `holdfast train` takes after the run's own."""
    lines = [f"# {note}", "", "[pool]", 'medium = "block"']
    lines += [f"scratchpad_bytes = {settings.scratchpad_bytes}", f"log_bytes = {settings.log_bytes}"]
    if settings.log_directory is not None:
        lines += ["", "[pool.log]", f"directory = {json.dumps(str(settings.log_directory))}"]
    if settings.victim_bytes:
        lines += ["", "[pool.victims]", f"bytes = {settings.victim_bytes}"]
        if settings.victim_directory is not None:
            lines.append(f"directory = {json.dumps(str(settings.victim_directory))}")
    return "\n".join(lines) + "\n"
