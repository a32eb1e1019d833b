"""What a plan makes of DRAM, a byte-addressable tier and a disk: never worse than without that tier, and no larger than
what there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.program import Demand, TableDemand
from holdfast_lab.placement.reuse import ReuseCurve, expected_reuse
from holdfast_lab.placement.settings import best_settings, settings_toml
from holdfast_lab.placement.step_time import StepInputs, StepOptions
from holdfast_lab.placement.tiers import Tier
from test_step_time import DISK, LOG_STORE, NEAR, NETWORK

QUICK_NETWORK = replace(NETWORK, network_s=0.002)


def inputs(*, hot_share: float, weight_bytes: int, near_bytes: int | None) -> StepInputs:
    """A table of which a tenth of the rows takes `hot_share` of a batch's."""
    widths = np.array([100_000, 900_000])
    rows = np.array([hot_share, 1.0 - hot_share]) * 20_000
    ladder = tuple(
        Rung(rows=int(width), access_share=float(some / 20_000), unique_rows_per_batch=float(some))
        for width, some in zip(widths, rows, strict=True)
    )
    total = Rung(rows=1_000_000, access_share=1.0, unique_rows_per_batch=20_000.0)
    table = TableDemand(
        name="C1", weight_bytes=weight_bytes, state_bytes=4, accesses_per_batch=25_000.0, ladder=(ladder[0], total)
    )
    near = None if near_bytes is None else replace(NEAR, capacity_bytes=near_bytes)
    return StepInputs(
        demand=Demand(tables=(table,), dense_bytes=100_000),
        curves=[ReuseCurve(expected_reuse(widths, rows / widths), 1_000_000)],
        network=QUICK_NETWORK,
        host=LOG_STORE,
        medium=DISK,
        options=StepOptions(scratchpad_bytes=10_000_000, log_bytes=50_000_000),
        log_medium=near,
        victim_medium=near,
    )


def dram(table_bytes: int) -> Tier:
    return replace(NEAR, name="dram", kind="dram", capacity_bytes=table_bytes // 5, directory=None)


@pytest.mark.parametrize("hot_share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("weight_bytes", [64, 256, 512])
@pytest.mark.parametrize("near_share", [0.2, 0.5, 3.0])
def test_a_third_tier_is_never_worse_and_pays_where_steps_wait_for_reads(
    hot_share: float, weight_bytes: int, near_share: float
) -> None:
    table_bytes = 1_000_000 * (weight_bytes + 4)
    memory = dram(table_bytes)
    two = best_settings(inputs(hot_share=hot_share, weight_bytes=weight_bytes, near_bytes=None), [memory, DISK])
    given = inputs(hot_share=hot_share, weight_bytes=weight_bytes, near_bytes=round(near_share * table_bytes))
    three = best_settings(given, [memory, DISK])
    assert two is not None and three is not None
    assert (two.victim_bytes, two.victim_tier, two.victim_directory) == (0, None, None)
    assert three.step.ms <= 1.02 * two.step.ms
    if weight_bytes >= 256 and near_share >= 0.5:
        assert two.step.ms / three.step.ms > 1.2
        assert (three.victim_tier, three.victim_directory) == ("cxl", "/near")
    on_tier = three.victim_bytes + (three.log_bytes if three.log_directory else 0)
    assert on_tier <= near_share * table_bytes
    for settings in (two, three):
        assert settings.scratchpad_bytes + settings.index_bytes <= memory.capacity_bytes
        assert settings.log_bytes <= max(table_bytes, 16 << 20)


def test_what_is_written_down_names_the_victim_cache_s_place() -> None:
    table_bytes = 1_000_000 * 260
    given = inputs(hot_share=0.5, weight_bytes=256, near_bytes=table_bytes)
    settings = best_settings(given, [dram(table_bytes), DISK])
    assert settings is not None and settings.victim_bytes
    text = settings_toml(settings, "a note")
    assert f'[pool.victims]\nbytes = {settings.victim_bytes}\ndirectory = "/near"' in text
    assert "[pool.victims]" not in settings_toml(replace(settings, victim_bytes=0), "a note")
