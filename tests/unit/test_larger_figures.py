"""What benchmarks/larger makes of its results: rooflines, ratios, CPU per row, write amplification, and what is met."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from larger.figures import Results, amplification, cpu_us_per_missed_row, disk_ms, figures, roofline_ms
from larger.sections import WORKLOADS, mix_of

TRAFFIC = {
    "rows_hit": 9000,
    "rows_missed": 0,
    "rows_fetched": 1000,
    "fetched_bytes": 512_000,
    "appended_bytes": 2_000_000,
    "updated_row_bytes": 1_000_000,
    "merged_bytes": 1_000_000,
    "home_bytes_read": 409_600,
    "home_bytes_written": 409_600,
    "demand_fetches": 0,
    "window_shrunk": 0,
    "fetch_reads": 1000,
    "log_bytes_read": 1_024_000,
    "merge_log_reads": 10,
    "merge_reads": 100,
    "merge_writes": 100,
    "stall_seconds": 0.0,
    "log_stall_seconds": 0.0,
}


def system(ms: float, cpu_s: float, traffic: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "steps": 10,
        "ms_per_step": ms,
        "cpu_s_per_step": 0.08,  # of the process: OpenMP's idle threads are in it
        "thread_cpu_s": {"hf-commit": 4 * cpu_s, "hf-exchange": 6 * cpu_s},
        "lag_median": 1,
        "traffic": traffic or {},
        "traffic_since_opening": traffic or {},
    }


def results(**changes: dict[str, Any]) -> Results:
    found: dict[str, dict[str, Any]] = {
        "dram/kaggle": system(40.0, 0.060),
        "look_forward/kaggle": system(42.0, 0.0601, TRAFFIC),
        "lru/kaggle": system(63.0, 0.07, TRAFFIC),
        "mixed/kaggle": {"per_s": 121_000.0},
        "mmap/kaggle": {"error": "killed"},
    }
    settings = {"sections": ["roofline", "caches", "outsiders"], "workloads": WORKLOADS}
    return Results({"settings": settings, "results": found | changes})


def figure(of: Results, name: str) -> tuple[str, str, str]:
    (found,) = [f.cells()[1:] for f in figures(of) if f.name == name]
    return found


def test_the_roofline_is_the_slower_of_computing_and_the_disk() -> None:
    assert disk_ms(results(), "kaggle") == pytest.approx(1.0)  # 121 requests a step
    assert roofline_ms(results(), "kaggle") == 40.0
    slow = results(**{"mixed/kaggle": {"per_s": 1210.0}})
    assert roofline_ms(slow, "kaggle") == pytest.approx(100.0)


def test_a_figure_says_its_value_its_bar_and_whether_it_is_met() -> None:
    assert figure(results(), "kaggle: step over its roofline") == ("1.05×", "≤ 1.15×", "met")
    assert figure(results(), "kaggle: share of its speed in DRAM") == ("95%", "≥ 90%", "met")
    assert figure(results(), "kaggle: look-forward over lru") == ("1.50×", "≥ 1.25×", "met")
    slow = results(**{"look_forward/kaggle": system(60.0, 0.06, TRAFFIC)})
    assert figure(slow, "kaggle: step over its roofline") == ("1.50×", "≤ 1.15×", "NOT MET")


def test_what_failed_or_was_left_out_is_not_measured() -> None:
    assert figure(results(), "kaggle: look-forward over mapped files") == ("not measured", "≥ 4.00×", "–")
    assert figure(results(), "rm1: step over its roofline") == ("not measured", "≤ 1.15×", "–")
    assert list(results().errors()) == ["mmap/kaggle"]


def test_cpu_per_missed_row_is_what_a_step_takes_beyond_dram() -> None:
    assert cpu_us_per_missed_row(results(), "kaggle") == pytest.approx(1.0)  # 100 µs over 100 rows


def test_write_amplification_counts_what_merging_all_that_was_appended_would_write() -> None:
    assert amplification(system(1.0, 1.0, TRAFFIC)) == pytest.approx(2.0 * 1.4096)
    assert amplification(system(1.0, 1.0, TRAFFIC | {"merged_bytes": 0})) is None


def test_the_mix_for_fio_has_every_kind_of_request_at_its_mean_size() -> None:
    mix = mix_of(system(40.0, 0.06, TRAFFIC))
    assert mix is not None
    assert asdict(mix) == {
        "seconds": pytest.approx(0.4),
        "fetches": {"kind": "read", "num_bytes": 512.0, "count": 1000},
        "merging": (
            {"kind": "read", "num_bytes": 102_400.0, "count": 10},
            {"kind": "read", "num_bytes": 4096.0, "count": 100},
            {"kind": "write", "num_bytes": 4096.0, "count": 100},
        ),
    }
    assert mix.fetches.count + sum(requests.count for requests in mix.merging) == 1210
    assert mix_of(system(40.0, 0.06)) is None
    without = mix_of(system(40.0, 0.06, TRAFFIC | {"merge_log_reads": 0, "merge_reads": 0, "merge_writes": 0}))
    assert without is not None and without.merging == ()
