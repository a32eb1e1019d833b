"""report.md and its plots."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import report_page
from larger import plots
from larger.figures import (
    Results,
    amplification_points,
    disk_ms,
    figures,
    hit_rate,
    missed_rows_per_step,
    roofline_ms,
)
from markdown_table import markdown_table

_IDLE_CPUS = 0.15
_NAMES = {
    "dram": "DRAM",
    "look_forward": "look-forward",
    "lru": "LRU",
    "static": "static",
    "mmap": "mapped files",
    "rocksdb": "RocksDB",
}
_SHOWN = ("kaggle", "rm1", "rm3", "uniform", "balanced")
_MERGING_BYTES = ("log_bytes_read", "home_bytes_read", "home_bytes_written")
_NOTES = """\
- Every system trains the same network on the same batches from the same rows; a scratchpad holds a tenth of the tables.
  DRAM: the in-place pool on tmpfs, every step committed at level `process`. The others run within one memory limit.
- Steady: the log has turned over three times and the scratchpad has been filled; an outsider has read its memory from
  the disk twice. What did not get there in its time is marked.
- In turns: systems of one workload, but for mapped files and RocksDB, are warmed up one after the other and then take
  turns, one awake and the others stopped, so that the machine's other tenants meet all of them.
- A window is at least two cycles of a system's merges, and whole ones: what its merging costs is in it in full.
- The disk's rate at a mix: fio makes requests of each kind as the window had them, at their mean sizes, fetches by 2
  jobs of depth 128 beside one job for each kind that merging has; requests over the time until all are done. The best
  of three runs, with depths of 2, 4 and 16 for merging.
- `balanced`: as many uniform ids as make LRU fetch for as long as it computes, from what it took for a row of `kaggle`.
- New tables: no row of them was ever written, as in the first pass over a data set; everywhere else all were, so that
  whatever is missed is read.
- CPU per missed row: CPU time of the core's own threads (collect, exchange, merge, commit) per step over rows fetched,
  the kernel's part included. Logging and merging are in it; packing and copying on the training threads are not.
- Cost of committing: a few batches again and again, so that nothing is fetched, against the same steps in DRAM.
- Mapped files promise no durability, RocksDB that of rows alone.
"""


def write_report(record: dict[str, Any], directory: Path) -> None:
    results = Results(record)
    steps_plot = plots.steps(
        directory / "steps.svg",
        {workload: {name: results.step_ms(system, workload) for system, name in _NAMES.items()} for workload in _SHOWN},
        {workload: roofline_ms(results, workload) for workload in _SHOWN},
    )
    amplification_plot = plots.amplification(directory / "amplification.svg", amplification_points(results))
    quick = record["settings"]["quick"]
    lines = [
        f"# Tables larger than memory, {record['date'][:10]}",
        "",
        *(["**A smoke test (--quick): small tables, a few steps. The numbers mean nothing.**", ""] if quick else []),
        *_setting(results),
        "## What was to be reached",
        "",
        *markdown_table(["", "measured", "bar", ""], [figure.cells() for figure in figures(results)]),
        *(["![steps](steps.svg)", ""] if steps_plot else []),
        *_systems(results),
        *_rooflines(results),
        *_amplification(results, amplification_plot),
        *_disk(results),
        "## How",
        "",
        _NOTES,
    ]
    if errors := results.errors():
        lines += ["## Failed", "", *(f"- {key}: `{_last_line(error)}`" for key, error in errors.items()), ""]
    report_page.write(directory, "\n".join(lines))


def _last_line(error: str) -> str:
    return error.strip().splitlines()[-1][-300:]


def _setting(results: Results) -> list[str]:
    record = results.record
    machine, busy = record["machine"], [entry["cpus"] for entry in record["busy"]]
    disturbed = sum(cpus > _IDLE_CPUS for cpus in busy)
    alone = (
        f"**The machine was idle** otherwise: before each of {len(busy)} measurements others used at most "
        f"{max(busy, default=0):.2f} CPUs."
        if not disturbed
        else f"**THE MACHINE WAS NOT IDLE**: before {disturbed} of {len(busy)} measurements others used more than "
        f"{_IDLE_CPUS} CPUs (median {statistics.median(busy):.2f}, most {max(busy):.2f} of {machine['cpus']})."
    )
    limited = record["settings"]["limits_memory"]
    return [
        alone,
        "",
        f"- {machine['processor']}, {machine['cpus']} CPUs, {machine['memory']}, {machine['kernel']}"
        + (", virtual" if machine["hypervisor"] else ""),
        f"- disk: {machine['disk']}; memory: {machine['medium']}",
        f"- threads that train: {record['settings']['threads']}",
        *([] if limited else ["- no memory limit: mapped files had all of it"]),
        f"- holdfast {machine['holdfast_commit']}; {record['minutes']:.0f} minutes; every command is in results.json",
        "",
    ]


def _systems(results: Results) -> list[str]:
    rows = []
    for workload in _SHOWN:
        for system, name in _NAMES.items():
            found = results.find(f"{system}/{workload}")
            if found is not None:
                rows.append([workload, name, *_system_cells(found)])
    head = ["", "", "ms per step (median)", "hit rate", "rows fetched per step", "while training waited",
            "CPU s per step", "read, written per step", "memory, most", "loss", "steady"]  # fmt: skip
    return ["## Systems", "", *markdown_table(head, rows)] if rows else []


def _system_cells(found: dict[str, Any]) -> list[str]:
    traffic, steps = found["traffic"], found["steps"]
    hits = hit_rate(found)
    moved = [f"{found['device_bytes'][kind] / steps / 2**20:.2f}" for kind in ("read", "written")]
    memory = found["memory"]
    steady = "yes" if found["steady"] else f"NO, after {found['warmup_s']:.0f} s"
    if found["warmup_steps"] + steps > found["num_batches"]:
        steady += "; batches came again"
    return [
        f"{found['ms_per_step']:.1f} ({statistics.median(found['step_ms']):.1f})",
        "–" if hits is None else f"{hits:.1%}",
        f"{missed_rows_per_step(found):,.0f}" if traffic else "–",
        f"{traffic['demand_fetches'] / steps:,.0f}" if traffic else "–",
        f"{found['cpu_s_per_step']:.4f}",
        f"{', '.join(moved)} MiB",
        "–" if memory is None else f"{memory['peak_bytes'] >> 20} of {memory['limit_bytes'] >> 20} MiB",
        f"{found['last_loss']:.5f}",
        steady,
    ]


def _rooflines(results: Results) -> list[str]:
    rows = []
    for workload in _SHOWN:
        found, roof = results.find(f"look_forward/{workload}"), roofline_ms(results, workload)
        mixed = results.find(f"mixed/{workload}")
        if found is None or roof is None:
            continue
        traffic, steps = found["traffic"], found["steps"]
        merging_mib = sum(traffic[name] for name in _MERGING_BYTES) / steps / 2**20
        requests = [
            f"{traffic['fetch_reads'] / steps:,.0f}",
            f"{(traffic['merge_log_reads'] + traffic['merge_reads']) / steps:,.0f}",
            f"{traffic['merge_writes'] / steps:,.0f}",
            f"{merging_mib:.1f}",
        ]
        dram, disk = results.step_ms("dram", workload), disk_ms(results, workload)
        stalls_ms = (traffic["stall_seconds"] + traffic["log_stall_seconds"]) / steps * 1e3
        rows.append(
            [workload, f"{found['config']['log_bytes'] >> 20} MiB", f"{dram:.1f}", *requests,
             "–" if mixed is None else f"{mixed['per_s']:,.0f}", f"{disk:.1f}", f"{roof:.1f}",
             f"{found['ms_per_step']:.1f}", f"{stalls_ms:.2f}", f"{traffic['window_shrunk']:.0f}"]
        )  # fmt: skip
    head = ["", "log", "DRAM, ms", "fetch reads per step", "merge reads", "merge writes", "MiB of both",
            "disk's requests/s at that mix", "disk, ms", "roofline, ms", "step, ms", "of it stalls",
            "window shrunk"]  # fmt: skip
    return ["## Rooflines", "", *markdown_table(head, rows)] if rows else []


def _amplification(results: Results, plot: Path | None) -> list[str]:
    points = amplification_points(results)
    if not points:
        return []
    rows = [
        [f"{size} MiB", "–" if measured is None else f"{measured:.2f}", f"{predicted:.2f}"]
        for size, measured, predicted in points
    ]
    return [
        "## Write amplification",
        "",
        *markdown_table(["log", "measured", "predicted"], rows),
        *(["![write amplification](amplification.svg)", ""] if plot else []),
    ]


def _disk(results: Results) -> list[str]:
    found = results.find("limits")
    if found is None:
        return []
    rows = [
        ["random reads of 512 bytes", f"{found['reads_512_per_s']:,.0f}/s"],
        ["random reads of 4096 bytes", f"{found['reads_4096_per_s']:,.0f}/s"],
        ["sequential writes, until durable", f"{found['write_bytes_per_s'] / 1e9:.2f} GB/s"],
        ["fdatasync after a write of 4096 bytes, median", f"{found['fdatasync_s'] * 1e6:.0f} µs"],
    ]
    if "read_cpu_s" in found:
        rows.append(["CPU that such a read of 512 bytes takes fio's thread", f"{found['read_cpu_s'] * 1e6:.2f} µs"])
    for key in results.keys("mixed/"):
        mixed = results.find(key)
        assert mixed is not None
        rows.append([f"the mix of {key.split('/')[1]}", f"{mixed['per_s']:,.0f}/s"])
    by = f"By {found['by']}, on a file of {found['file_bytes'] / 1e9:.1f} GB, O_DIRECT.\n"
    return ["## The disk", "", by, *markdown_table(["", ""], rows)]
