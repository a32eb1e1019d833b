"""The sections of the benchmark: which measurements each takes, and how much of each.

A key of the results is ``system/workload``, or ``section/what``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from larger.amplification import predicted, step_sizes
from larger.limits import Mix, Requests
from larger.runner import Run, Runner, workload_of
from larger.workload import FileOfBatches, Workload

WORKLOADS = ("kaggle", "rm1", "rm3", "uniform")
COMMIT_WORKLOADS = ("kaggle", "rm1", "rm3")
# Of rm1 all batches come again before its log has turned over three times: that is no first pass.
NEW_TABLES_WORKLOADS = ("kaggle", "uniform")
OUTSIDERS = ("mmap", "rocksdb")
_CACHES = ("dram", "look_forward", "lru", "static")
_OUTSIDER_WARMUP_S, _OUTSIDER_STEPS = 60.0, 40
_QUICK_WARMUP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Amount:
    steps: int
    batches: int


# Enough distinct batches that they do not come again before the scratchpad is full and the window is over.
_AMOUNTS = {
    "kaggle": _Amount(200, 6000),
    "rm1": _Amount(100, 500),
    "rm3": _Amount(100, 900),
    "uniform": _Amount(60, 600),
    "balanced": _Amount(150, 3200),
}
_QUICK = _Amount(20, 200)
# So few batches that all their rows stay in the scratchpad: what is left of the log store is committing.
_COMMIT_BATCHES = {"kaggle": 32, "rm1": 10, "rm3": 24}
# Where not the default's size: of kaggle half of the tables, so that a merge, which visits most blocks of home, does so
# half as often. Steps of rm1 are 83 MB: its log has room for as many as it takes for rows to be superseded in it. Of
# uniform ids every row in the log is another one, with 16 bytes of index in the memory that is allowed.
_LOG_BYTES, _QUICK_LOG_BYTES = {"kaggle": 2 << 30, "rm1": 4 << 30, "uniform": 256 << 20}, 128 << 20
_DEFAULT_LOG_BYTES = 1 << 30
_AMPLIFICATION_BYTES = tuple(size << 20 for size in (256, 512, 1024, 2048, 4096))
_QUICK_AMPLIFICATION_BYTES = tuple(size << 20 for size in (128, 256))
# rm1 turns a log over in the fewest steps.
_AMPLIFICATION_WORKLOAD = "rm1"
_RECOVERY_LOG_BYTES = 1 << 30


def _run(runner: Runner, system: str, workload: Workload, name: str, **changes: Any) -> Run:
    quick = runner.options.quick
    amount = _QUICK if quick else _AMOUNTS[name]
    warmup_s = _QUICK_WARMUP_S if quick else _OUTSIDER_WARMUP_S if system in OUTSIDERS else 600.0
    values: dict[str, Any] = {
        "system": system,
        "workload": workload,
        "num_batches": amount.batches,
        "steps": min(amount.steps, _OUTSIDER_STEPS) if system in OUTSIDERS else amount.steps,
        "warmup": 10 if quick else 50,
        "log_bytes": _QUICK_LOG_BYTES if quick else _LOG_BYTES.get(name, _DEFAULT_LOG_BYTES),
        "max_warmup_s": warmup_s,
    }
    return Run(**(values | changes))


def _side_by_side(runner: Runner, name: str) -> None:
    """Results ``system/name`` of the systems that are compared within a tenth."""
    workload = workload_of(runner, name)
    caches_too = name == "kaggle" and "caches" in runner.options.sections
    systems = _CACHES if caches_too else ("dram", "look_forward")
    runner.side_by_side({f"{system}/{name}": _run(runner, system, workload, name) for system in systems})


def limits(runner: Runner) -> None:
    """What the disk reaches."""
    _limits(runner)


def _limits(runner: Runner) -> dict[str, Any]:
    file_bytes = workload_of(runner, "kaggle").table_bytes
    return runner.once("limits", lambda: runner.disk(max(file_bytes, 64 << 20)).limits())


def roofline(runner: Runner) -> None:
    """Every workload in DRAM and on the log store, and what the disk reaches at the mix of I/O that was seen."""
    for name in runner.options.workloads:
        _side_by_side(runner, name)
        mix = mix_of(runner.results[f"look_forward/{name}"])
        if mix is not None:
            runner.mixed(f"mixed/{name}", mix, max(workload_of(runner, name).table_bytes, 64 << 20))


def mix_of(result: dict[str, Any]) -> Mix | None:
    """The I/O requests of fetches and merges, each kind at its mean size; None where nothing was fetched."""
    traffic = result.get("traffic")
    if not traffic or not traffic["fetch_reads"]:
        return None

    def requests(kind: str, num_bytes: str, count: str) -> Requests:
        return Requests(kind=kind, num_bytes=traffic[num_bytes] / max(1.0, traffic[count]), count=traffic[count])

    merging = (
        requests("read", "log_bytes_read", "merge_log_reads"),
        requests("read", "home_bytes_read", "merge_reads"),
        requests("write", "home_bytes_written", "merge_writes"),
    )
    return Mix(
        seconds=result["ms_per_step"] * result["steps"] * 1e-3,
        fetches=requests("read", "fetched_bytes", "fetch_reads"),
        merging=tuple(some for some in merging if some.count),
    )


def caches(runner: Runner) -> None:
    """Look-forward beside LRU and static: on kaggle, and where fetching on demand takes as long as computing."""
    _side_by_side(runner, "kaggle")
    share = balanced_share(runner)
    if share is None:
        return
    workload = workload_of(runner, "kaggle", uniform_share=share)
    runner.side_by_side({f"{system}/balanced": _run(runner, system, workload, "balanced") for system in _CACHES})


def balanced_share(runner: Runner) -> float | None:
    """How many of kaggle's ids must be uniform for LRU to fetch for as long as a step's computing takes, at what it was
    seen to take for a row: what merging does to its fetches is in that.

    Of uniform ids nine in ten miss a scratchpad of a tenth; of the others as many as LRU was seen to miss.
    """
    lru = runner.results["lru/kaggle"]
    if "error" in lru:
        return None
    ids = workload_of(runner, "kaggle").ids_per_batch
    missed = lru["traffic"]["rows_fetched"] / lru["steps"]
    wanted = missed / fetching_over_computing(lru)
    return float(min(1.0, max(0.0, (wanted - missed) / (0.9 * ids - missed))))


def fetching_over_computing(result: dict[str, Any]) -> float:
    """Of a cache that is filled on demand: the time that steps wait for rows, over the rest of their time."""
    fetching_s = result["traffic"]["stall_seconds"]
    return float(fetching_s / (result["ms_per_step"] * result["steps"] * 1e-3 - fetching_s))


def new_tables(runner: Runner) -> None:
    """The first pass over new tables, beside the same where every row was written before, and DRAM."""
    for name in runner.options.workloads:
        if name not in NEW_TABLES_WORKLOADS:
            continue
        workload = workload_of(runner, name)
        runs = {
            "dram": _run(runner, "dram", workload, name),
            "written": _run(runner, "look_forward", workload, name),
            "new": _run(runner, "look_forward", workload, name, new_tables=True),
        }
        runner.side_by_side({f"new_tables/{what}/{name}": run for what, run in runs.items()})


def outsiders(runner: Runner) -> None:
    """Mapped files and RocksDB, with as much memory as the log store."""
    for name in runner.options.workloads:
        _side_by_side(runner, name)
        # Not in turns: the kernel writes a mapped file's pages back while its process is stopped.
        for system in OUTSIDERS:
            runner.measure(f"{system}/{name}", _run(runner, system, workload_of(runner, name), name))


def commit(runner: Runner) -> None:
    """Committing alone: few enough batches, again and again, that all their rows stay in the scratchpad."""
    for name in runner.options.workloads:
        if name in COMMIT_WORKLOADS:
            workload = workload_of(runner, name)
            batches = 4 if runner.options.quick else _COMMIT_BATCHES[name]
            runner.side_by_side(
                {
                    f"commit/{system}/{name}": _run(runner, system, workload, name, num_batches=batches, fill=False)
                    for system in ("dram", "look_forward")
                }
            )
    _limits(runner)


def amplification(runner: Runner) -> None:
    """Bytes to the device per byte of updated rows, over sizes of the log, beside what the arithmetic says."""
    quick = runner.options.quick
    runner.drop_ids()
    workload = workload_of(runner, _AMPLIFICATION_WORKLOAD)
    num_batches = _QUICK.batches if quick else _AMOUNTS[_AMPLIFICATION_WORKLOAD].batches
    source = runner.source(workload, num_batches)
    appended_bytes, _ = step_sizes(source)
    for log_bytes in _QUICK_AMPLIFICATION_BYTES if quick else _AMPLIFICATION_BYTES:
        key = f"amplification/{log_bytes >> 20}"
        steps = max(10, round(log_bytes / appended_bytes))
        run = _run(
            runner, "look_forward", workload, _AMPLIFICATION_WORKLOAD, num_batches=num_batches, steps=steps,
            log_bytes=log_bytes,
        )  # fmt: skip
        traffic = runner.measure(key, run).get("traffic_since_opening", {})
        if traffic.get("merges"):
            runner.once(f"{key}/predicted", partial(_prediction, source, traffic))


def _prediction(source: FileOfBatches, traffic: dict[str, float]) -> dict[str, Any]:
    sizes = [traffic[of] / traffic["merges"] for of in ("merged_bytes", "standing_bytes")]
    return {"value": predicted(source, *sizes)}


def recovery(runner: Runner) -> None:
    """A process that is killed with a full log, and the opening of what it leaves."""
    log_bytes = _QUICK_LOG_BYTES if runner.options.quick else _RECOVERY_LOG_BYTES
    runner.crash(_run(runner, "look_forward", workload_of(runner, "kaggle"), "kaggle", log_bytes=log_bytes))
