"""What the issue asks for, beside what was measured. Every number comes from the results of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from larger.sections import COMMIT_WORKLOADS, NEW_TABLES_WORKLOADS, WORKLOADS, fetching_over_computing

_ROOFLINE_BAR = 1.15
_KAGGLE_SPEED_BAR = 0.90
_LRU_BARS = {"kaggle": 1.25, "balanced": 1.7}
_OUTSIDER_BARS = {"mmap": 4.0, "rocksdb": 3.0}
_COMMIT_BARS = {"kaggle": 0.08, "rm3": 0.15}
_COMMIT_BANDWIDTH_BAR = 1.15
_CPU_BAR_US = 2.0
_LAG_BAR = 2.0
_AMPLIFICATION_BAR = 0.15
_RECOVERY_BAR_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number beside its bar; ``at_least`` says which way is good. value None: it was not measured; bar None: there
    is none."""

    name: str
    value: float | None
    bar: float | None
    shown: str
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.value is None or self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def cells(self) -> tuple[str, str, str, str]:
        """Name, value, bar, and whether it is met, as text."""
        value = "not measured" if self.value is None else self.shown.format(self.value)
        bar = "–" if self.bar is None else ("≥ " if self.at_least else "≤ ") + self.shown.format(self.bar)
        met = {True: "met", False: "NOT MET", None: "–"}[self.met]
        return self.name, value, bar, met


class Results:
    """The results of a run by key; what failed is as if it had not been measured."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self._results: dict[str, dict[str, Any]] = record["results"]

    def find(self, key: str) -> dict[str, Any] | None:
        found = self._results.get(key)
        return None if found is None or "error" in found else found

    def errors(self) -> dict[str, str]:
        return {key: result["error"] for key, result in self._results.items() if "error" in result}

    def keys(self, prefix: str) -> list[str]:
        return [key for key in self._results if key.startswith(prefix) and self.find(key)]

    def wants(self, section: str) -> bool:
        return section in self.record["settings"]["sections"]

    def workloads(self, known: tuple[str, ...]) -> list[str]:
        return [name for name in known if name in self.record["settings"]["workloads"]]

    def step_ms(self, system: str, workload: str) -> float | None:
        """Mean of the window: merges and dense states have their share in it."""
        found = self.find(f"{system}/{workload}")
        return None if found is None else float(found["ms_per_step"])

    def of(self, key: str, value: Callable[[dict[str, Any]], float | None]) -> float | None:
        found = self.find(key)
        return None if found is None else value(found)


def ratio(value: float | None, over: float | None) -> float | None:
    return None if value is None or not over else value / over


def requests_per_step(result: dict[str, Any]) -> float:
    """I/O requests of fetches and merges."""
    traffic = result["traffic"]
    kinds = ("fetch_reads", "merge_log_reads", "merge_reads", "merge_writes")
    return float(sum(traffic[name] for name in kinds) / result["steps"])


def disk_ms(results: Results, workload: str) -> float | None:
    """What the disk needs for a step's I/O requests at the rate that was reached at their mix."""
    requests = results.of(f"look_forward/{workload}", requests_per_step)
    per_s = results.of(f"mixed/{workload}", lambda result: float(result["per_s"]))
    if requests is None:
        return None
    return 0.0 if requests == 0 else None if per_s is None else requests / per_s * 1e3


def roofline_ms(results: Results, workload: str) -> float | None:
    """max(the step in DRAM with commits, its I/O requests ÷ the requests per second that the disk reaches)."""
    dram, disk = results.step_ms("dram", workload), disk_ms(results, workload)
    return None if dram is None or disk is None else max(dram, disk)


def hit_rate(result: dict[str, Any]) -> float | None:
    traffic = result["traffic"]
    asked = traffic["rows_hit"] + traffic["rows_missed"] if traffic else 0
    return traffic["rows_hit"] / asked if asked else None


def missed_rows_per_step(result: dict[str, Any]) -> float:
    """A row that was fetched ahead is no miss when its batch trains, but was one when its batch was planned."""
    traffic = result["traffic"]
    return float(max(traffic["rows_missed"], traffic["rows_fetched"]) / result["steps"])


def cpu_us_per_missed_row(results: Results, workload: str) -> float | None:
    """CPU time of the core's own threads, which collect, fetch, merge and commit, over the rows that were missed; less
    what those threads take in DRAM. Not the process's: idle threads of OpenMP spin, and hide as much as they take."""
    ours, dram = results.find(f"look_forward/{workload}"), results.find(f"dram/{workload}")
    if ours is None or dram is None or not missed_rows_per_step(ours):
        return None
    cpu_s = [sum(result["thread_cpu_s"].values()) / result["steps"] for result in (ours, dram)]
    return float((cpu_s[0] - cpu_s[1]) / missed_rows_per_step(ours) * 1e6)


def amplification(result: dict[str, Any]) -> float | None:
    """Bytes to the device per byte of updated rows, since opening. Merges come in lumps, so what they write is taken
    per byte of the log that they gave up, and every appended byte is merged some day."""
    traffic = result["traffic_since_opening"]
    if not traffic["updated_row_bytes"] or not traffic["merged_bytes"]:
        return None
    merged = traffic["home_bytes_written"] / traffic["merged_bytes"]
    return float(traffic["appended_bytes"] / traffic["updated_row_bytes"] * (1.0 + merged))


def amplification_points(results: Results) -> list[tuple[int, float | None, float]]:
    """(MiB of log, measured, predicted), rising."""
    points = []
    for key in results.keys("amplification/"):
        if key.endswith("/predicted"):
            size = key.split("/")[1]
            predicted = results.of(key, lambda result: float(result["value"]))
            assert predicted is not None
            points.append((int(size), results.of(f"amplification/{size}", amplification), predicted))
    return sorted(points)


def commit_cost(results: Results, workload: str) -> float | None:
    found = ratio(results.step_ms("commit/look_forward", workload), results.step_ms("commit/dram", workload))
    return None if found is None else found - 1.0


def commit_over_bandwidth(results: Results, workload: str) -> float | None:
    """The step over max(the step in DRAM, bytes logged ÷ what the disk writes in sequence)."""
    dram, ours = results.step_ms("commit/dram", workload), results.find(f"commit/look_forward/{workload}")
    bandwidth = results.of("limits", lambda result: float(result["write_bytes_per_s"]))
    if dram is None or ours is None or not bandwidth:
        return None
    logged_ms = ours["traffic"]["appended_bytes"] / ours["steps"] / bandwidth * 1e3
    return float(ours["ms_per_step"] / max(dram, logged_ms))


def figures(results: Results) -> list[Figure]:
    """Every bullet of the issue, in its order, for the sections that were asked for."""
    parts = {
        "roofline": _roofline_figures,
        "caches": _cache_figures,
        "new_tables": _new_tables_figures,
        "outsiders": _outsider_figures,
        "commit": _commit_figures,
        "amplification": _amplification_figures,
        "recovery": _recovery_figures,
    }
    return [figure for section, part in parts.items() if results.wants(section) for figure in part(results)]


def _roofline_figures(results: Results) -> Iterator[Figure]:
    names = results.workloads(WORKLOADS)
    for name in names:
        found = ratio(results.step_ms("look_forward", name), roofline_ms(results, name))
        yield Figure(name=f"{name}: step over its roofline", value=found, bar=_ROOFLINE_BAR, shown="{:.2f}×")
        speed = ratio(results.step_ms("dram", name), results.step_ms("look_forward", name))
        bar = _KAGGLE_SPEED_BAR if name == "kaggle" else None
        yield Figure(name=f"{name}: share of its speed in DRAM", value=speed, bar=bar, shown="{:.0%}", at_least=True)
    for name in names:
        cpu = cpu_us_per_missed_row(results, name)
        yield Figure(name=f"{name}: CPU per missed row", value=cpu, bar=_CPU_BAR_US, shown="{:.2f} µs")
    for name in names:
        lag = results.of(f"look_forward/{name}", lambda result: result["lag_median"])
        yield Figure(name=f"{name}: commit lag, median", value=lag, bar=_LAG_BAR, shown="{:.0f} steps")


def _cache_figures(results: Results) -> Iterator[Figure]:
    for name, bar in _LRU_BARS.items():
        for cache in ("lru", "static"):
            found = ratio(results.step_ms(cache, name), results.step_ms("look_forward", name))
            yield Figure(
                name=f"{name}: look-forward over {cache}",
                value=found,
                bar=bar if cache == "lru" else None,
                shown="{:.2f}×",
                at_least=True,
            )
    balance = results.of("lru/balanced", fetching_over_computing)
    yield Figure(name="balanced: LRU's fetching over its computing", value=balance, bar=None, shown="{:.2f}")


def _new_tables_figures(results: Results) -> Iterator[Figure]:
    for name in results.workloads(NEW_TABLES_WORKLOADS):
        new, written = (results.step_ms(f"new_tables/{what}", name) for what in ("new", "written"))
        found = ratio(written, new)
        yield Figure(name=f"{name}, new tables: over written ones", value=found, bar=None, shown="{:.2f}×")
        speed = ratio(results.step_ms("new_tables/dram", name), new)
        yield Figure(name=f"{name}, new tables: share of its speed in DRAM", value=speed, bar=None, shown="{:.0%}")
        read = results.of(f"new_tables/new/{name}", _share_read)
        yield Figure(name=f"{name}, new tables: missed rows that were read", value=read, bar=None, shown="{:.0%}")


def _share_read(result: dict[str, Any]) -> float | None:
    return ratio(result["traffic"]["rows_fetched"], result["traffic"]["rows_missed"])


def _outsider_figures(results: Results) -> Iterator[Figure]:
    names = {"mmap": "mapped files", "rocksdb": "RocksDB"}
    for name in results.workloads(WORKLOADS):
        for system, bar in _OUTSIDER_BARS.items():
            found = ratio(results.step_ms(system, name), results.step_ms("look_forward", name))
            yield Figure(
                name=f"{name}: look-forward over {names[system]}", value=found, bar=bar, shown="{:.2f}×", at_least=True
            )


def _commit_figures(results: Results) -> Iterator[Figure]:
    for name in results.workloads(COMMIT_WORKLOADS):
        if name in _COMMIT_BARS:
            cost = commit_cost(results, name)
            yield Figure(name=f"{name}: cost of committing", value=cost, bar=_COMMIT_BARS[name], shown="{:.1%}")
        else:
            yield Figure(
                name=f"{name}: committed step over max(its step, bytes logged ÷ bandwidth)",
                value=commit_over_bandwidth(results, name),
                bar=_COMMIT_BANDWIDTH_BAR,
                shown="{:.2f}×",
            )


def _amplification_figures(results: Results) -> Iterator[Figure]:
    for size, measured, predicted in amplification_points(results):
        found = ratio(measured, predicted)
        yield Figure(
            name=f"log of {size} MiB: write amplification off the predicted {predicted:.2f}",
            value=None if found is None else abs(found - 1.0),
            bar=_AMPLIFICATION_BAR,
            shown="{:.0%}",
        )


def _recovery_figures(results: Results) -> Iterator[Figure]:
    seconds = results.of("recovery/open", lambda result: float(result["seconds"]))
    used = results.of("recovery/die", lambda result: result["used_log_bytes"] / 2**20)
    what = "" if used is None else f" with {used:.0f} MiB in the log"
    yield Figure(name=f"recovery after kill -9{what}", value=seconds, bar=_RECOVERY_BAR_S, shown="{:.2f} s")
