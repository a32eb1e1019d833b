"""From what was measured to what the report says: every number comes from the results of the run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import plots
import report_page
from markdown_table import markdown_table
from measurements import ABLATION, OPTIMIZERS, PEERS, RECOVERY_INTERVALS, SHAPES, STEPS_AFTER_OPENING, key_of

# What issue 2 asks for, at dense_interval = 1.
_STEPS_BARS = {
    "rowwise_adagrad": {"kaggle": 1.45, "rm1": 7.5, "rm3": 1.65},
    "sgd": {"kaggle": 1.05, "rm1": 2.4, "rm3": 1.12},
}
_EMBEDDING_BARS = {
    "rowwise_adagrad": {"kaggle": 12.0, "rm1": 9.0, "rm3": 10.0},
    "sgd": {"kaggle": 2.5, "rm1": 2.5, "rm3": 2.5},
}
_BF16_BARS = {"kaggle": 2.8, "rm3": 3.5}
_COMMIT_BARS = {"kaggle": 0.03, "rm1": 0.20, "rm3": 0.05}
_OPENED_BARS = {"kaggle": 1.5, "rm1": 2.0, "rm3": 1.5}
_WARM_BARS = {"kaggle": 1.10, "rm1": 1.30, "rm3": 1.10}
_FLOOR_BARS = {"kaggle": 0.75, "rm1": 0.75, "rm3": 0.70}
_RECOVERY_BAR_S = 1.0
_IDLE_CPUS = 0.15
_Value = Callable[[dict[str, Any]], float]  # of a measurement's result
_NAMES = {
    "rowwise_adagrad": "row-wise Adagrad",
    "sgd": "SGD",
    "fbgemm": "FBGEMM",
    "torchrec": "TorchRec",
    "embeddingbag": "nn.EmbeddingBag",
    "committed": "holdfast, every batch committed",
    "bare": "bare (nothing durable)",
}
ABLATION_NAMES = {
    "redo_sync": "redo log, waited for",
    "undo_sync": "undo log, waited for",
    "committed": "undo log as working set, in the background",
    "checksummed": "the same, with row checksums",
    "relaxed_10": "without them, dense state every 10 steps",
    "relaxed_100": "the same, dense state every 100 steps",
    "bare": "no log, no commit",
}


class Results:
    """The results of a run by key, with medians over its rounds; None where nothing was measured."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self._results: dict[str, list[dict[str, Any]]] = record["results"]

    @property
    def shapes(self) -> list[str]:
        return [shape for shape in SHAPES if shape in self.record["settings"]["shapes"]]

    def rounds(self, key: str) -> list[dict[str, Any]]:
        return [result for result in self._results.get(key, []) if "error" not in result]

    def errors(self) -> dict[str, str]:
        return {key: r["error"] for key, rounds in self._results.items() for r in rounds if "error" in r}

    def median(self, key: str, value: Callable[[dict[str, Any]], float]) -> float | None:
        rounds = self.rounds(key)
        return statistics.median(value(result) for result in rounds) if rounds else None

    def spread(self, key: str, value: Callable[[dict[str, Any]], float]) -> tuple[float, float] | None:
        values = [value(result) for result in self.rounds(key)]
        return (min(values), max(values)) if values else None

    def all(self) -> Iterable[tuple[str, dict[str, Any]]]:
        for key in self._results:
            for result in self.rounds(key):
                yield key, result


def step_ms(result: dict[str, Any]) -> float:
    return float(statistics.median(result["step_ms"]))


def mean_step_ms(result: dict[str, Any]) -> float:
    """What is done every 100 steps has its share in the mean, and none in the median."""
    return statistics.fmean(result["step_ms"])


def first_steps_ms(result: dict[str, Any]) -> float:
    """Their mean: what a resume costs is all of them."""
    return statistics.fmean(result["first_ms"])


def embedding_ms(result: dict[str, Any]) -> float:
    """The embedding work of a step: ours from ids to rows at home, a peer's forward, backward and update."""
    if "embedding_ms" in result:
        return float(statistics.median(result["embedding_ms"]))
    forward, update = result["embedding_forward_ms"], result["embedding_update_ms"]
    return float(statistics.median(f + u for f, u in zip(forward, update, strict=True)))


def best_peer(results: Results, shape: str, optimizer: str, *, bf16: bool = False) -> tuple[str, float] | None:
    """The peer that takes the fewest milliseconds a step, and how many."""
    found = [(system, results.median(key_of(system, shape, optimizer, bf16=bf16), step_ms)) for system in PEERS]
    measured = [(system, ms) for system, ms in found if ms is not None]
    return min(measured, key=lambda pair: pair[1]) if measured else None


def speed_up(results: Results, shape: str, optimizer: str, *, bf16: bool = False) -> tuple[float, str] | None:
    """holdfast's steps/s over the best peer's in fp32, and the peer."""
    peer = best_peer(results, shape, optimizer)
    ours = results.median(key_of("committed", shape, optimizer, bf16=bf16), step_ms)
    return None if peer is None or ours is None else (peer[1] / ours, peer[0])


def embedding_speed_up(results: Results, shape: str, optimizer: str) -> float | None:
    fbgemm = results.median(key_of("fbgemm", shape, optimizer), embedding_ms)
    ours = results.median(key_of("committed", shape, optimizer), embedding_ms)
    return None if fbgemm is None or ours is None else fbgemm / ours


def commit_cost(results: Results, shape: str, optimizer: str = "rowwise_adagrad") -> float | None:
    """What committing adds to a step, as a share of it: of each round, then the median."""
    pairs = zip(
        results.rounds(key_of("committed", shape, optimizer)),
        results.rounds(key_of("bare", shape, optimizer)),
        strict=False,
    )
    costs = [step_ms(committed) / step_ms(bare) - 1 for committed, bare in pairs]
    return statistics.median(costs) if costs else None


def opened_cost(results: Results, shape: str, value: _Value) -> float | None:
    """A step over a pool on the disk that was opened again, over one without a pool: of each round, then the median."""
    pairs = zip(
        results.rounds(key_of("opened", shape, "rowwise_adagrad", medium="disk")),
        results.rounds(key_of("bare", shape, "rowwise_adagrad", medium="disk")),
        strict=False,
    )
    costs = [value(opened) / step_ms(bare) for opened, bare in pairs]
    return statistics.median(costs) if costs else None


def floor_share(results: Results, shape: str, optimizer: str, verb: str) -> float | None:
    return results.median(f"floor/{shape}", lambda result: result[optimizer]["floor"] / result[optimizer][verb])


def checkpoint_cost(result: dict[str, Any]) -> float:
    checkpoint = result["checkpoint"]
    return float(checkpoint["overhead_ms_per_step"] / checkpoint["ms_per_step_without"])


@dataclass(frozen=True, slots=True)
class _Cell:
    """One number beside its bar; ``at_least`` says which way is good."""

    value: float | None
    bar: float | None
    text: str
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        if self.value is None or self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        shown = self.text.format(self.value)
        if self.bar is None:
            return shown
        sign = "≥" if self.at_least else "≤"
        return f"**{shown}** ({sign} {self.text.format(self.bar)}: {'met' if self.met else 'NOT MET'})"


def _bars(results: Results) -> list[tuple[str, list[_Cell]]]:
    """The rows of the issue's table, each with a cell per shape."""

    def row(name: str, cell: Callable[[str], _Cell]) -> tuple[str, list[_Cell]]:
        return name, [cell(shape) for shape in results.shapes]

    def steps(shape: str, optimizer: str) -> _Cell:
        found = speed_up(results, shape, optimizer)
        return _Cell(found[0] if found else None, _STEPS_BARS[optimizer][shape], "{:.2f}×")

    def bf16(shape: str) -> _Cell:
        found = speed_up(results, shape, "rowwise_adagrad", bf16=True)
        return _Cell(found[0] if found else None, _BF16_BARS.get(shape), "{:.2f}×")

    rows = [
        row(f"{_NAMES[optimizer]}: steps/s over the best peer without checkpoint", partial(steps, optimizer=optimizer))
        for optimizer in OPTIMIZERS
    ]
    for optimizer in OPTIMIZERS:

        def embedding(shape: str, optimizer: str = optimizer) -> _Cell:
            return _Cell(embedding_speed_up(results, shape, optimizer), _EMBEDDING_BARS[optimizer][shape], "{:.2f}×")

        rows.append(row(f"embedding work over FBGEMM {_NAMES[optimizer]}", embedding))
    rows.append(row("bf16 MLPs, steps/s over the best peer in fp32", bf16))
    rows.append(
        row("cost of committing, tmpfs", lambda s: _Cell(commit_cost(results, s), _COMMIT_BARS[s], "{:.1%}", False))
    )
    rows.append(row("cost of committing, SGD, tmpfs", lambda s: _Cell(commit_cost(results, s, "sgd"), None, "{:.1%}")))
    disk = f"pool on {results.record['machine']['disk'].split()[0]}, times the loop without one"
    for name, value, bars in (
        (f"the {STEPS_AFTER_OPENING} steps after opening", first_steps_ms, _OPENED_BARS),
        ("once warm", step_ms, _WARM_BARS),
    ):

        def times(shape: str, value: _Value = value, bars: dict[str, float] = bars) -> _Cell:
            return _Cell(opened_cost(results, shape, value), bars[shape], "{:.2f}×", at_least=False)

        rows.append(row(f"{disk}: {name}", times))
    for optimizer in OPTIMIZERS:
        for verb in ("capture", "update"):

            def share(shape: str, optimizer: str = optimizer, verb: str = verb) -> _Cell:
                return _Cell(floor_share(results, shape, optimizer, verb), _FLOOR_BARS[shape], "{:.0%}")

            rows.append(row(f"share of the gather floor that {verb} reaches, {_NAMES[optimizer]}", share))
    return [(name, cells) for name, cells in rows if any(cell.value is not None for cell in cells)]


def _ms(results: Results, key: str, value: Callable[[dict[str, Any]], float]) -> str:
    median, spread = results.median(key, value), results.spread(key, value)
    if median is None or spread is None:
        return "–"
    few = len(results.rounds(key)) == 1
    return f"{median:.2f}" if few else f"{median:.2f} ({spread[0]:.2f}–{spread[1]:.2f})"


def _times(results: Results) -> list[str]:
    rows = []
    for optimizer in OPTIMIZERS:
        for bf16 in (False, True):
            for system in ("committed", "bare", *PEERS):
                keys = [key_of(system, shape, optimizer, bf16=bf16) for shape in results.shapes]
                if any(results.rounds(key) for key in keys):
                    name = f"{_NAMES[system]}, {_NAMES[optimizer]}" + (", bf16" if bf16 else "")
                    rows.append([name, *(_ms(results, key, step_ms) for key in keys)])
                    rows.append(["· embedding work", *(_ms(results, key, embedding_ms) for key in keys)])
    if not rows:
        return []
    head = ["ms, median over rounds (range)", *results.shapes]
    left_out = results.record["left_out_after_round_1"]
    note = f"One round only, being more than 15% behind the best of their kind: {', '.join(left_out)}.\n"
    return [
        "## Milliseconds",
        "",
        *markdown_table(head, rows),
        *([note] if left_out and results.record["settings"]["rounds"] > 1 else []),
    ]


def _verb_ms(verb: str, result: dict[str, Any]) -> float:
    return float(statistics.median(result["verb_ms"][verb]))


def _verbs(results: Results) -> list[str]:
    rows = []
    for shape in results.shapes:
        for mode in ABLATION:
            key = key_of(mode, shape, "rowwise_adagrad")
            found = results.rounds(key)
            if not found:
                continue
            shown = ", ".join(
                f"{verb} {results.median(key, partial(_verb_ms, verb)):.2f}" for verb in found[0]["verb_ms"]
            )
            rows.append([f"{shape}, {mode}", shown])
    return ["## Where a step's time goes", "", *markdown_table(["row-wise Adagrad, ms", "verbs"], rows)] if rows else []


def _ablation(results: Results) -> list[str]:
    if "ablation" not in results.record["settings"]["sections"]:
        return []
    rows = [
        [name, *(_ms(results, key_of(mode, shape, "rowwise_adagrad"), mean_step_ms) for shape in results.shapes)]
        for mode, name in ABLATION_NAMES.items()
    ]
    head = ["ms per step, mean of a round; median over rounds", *results.shapes]
    return [
        "## Ablation",
        "",
        "Row-wise Adagrad, on tmpfs. Redo: updated rows and dense state are copied, checksummed and sealed after each",
        "step; undo: rows before lookup, dense state after the step; both on all threads, and waited for.",
        "",
        *markdown_table(head, rows),
        "![ablation](ablation.png)",
        "",
    ]


def _checkpoints(results: Results) -> list[str]:
    rows = []
    for kind in ("torch_save", "dcp_async"):
        for every in (10, 100):
            for result in results.rounds(f"checkpoint/{kind}/{every}")[:1]:
                found = result["checkpoint"]
                lost = found["every"] * (1 if kind == "torch_save" else 2)
                rows.append(
                    [f"FBGEMM, {kind} every {found['every']}", f"{checkpoint_cost(result):.0%}",
                     f"{found['ms_per_step_without']:.1f} → {found['ms_per_step_with']:.1f}",
                     f"{found['size_bytes'] / 1e9:.2f} GB", lost]
                )  # fmt: skip
    if not rows:
        return []
    cost = commit_cost(results, "kaggle")
    rows.append(["holdfast, every batch", "–" if cost is None else f"{cost:.1%}", "", "", "1 (the one in flight)"])
    head = ["kaggle", "overhead", "ms per step", "size", "steps lost, at most"]
    return ["## The peers' own checkpoints", "", *markdown_table(head, rows), "![checkpoints](checkpoints.png)", ""]


def _memory(results: Results) -> list[str]:
    rows = []
    for shape in results.shapes:
        for found in results.rounds(f"memory/{shape}"):
            mib = {
                name: value / 2**20 for name, value in found.items() if name.endswith("_bytes") and type(value) is int
            }
            parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in found["pool_resident_bytes"].items())
            formula = (
                f"{mib['pages_of_touched_rows_bytes']:.0f} + 3 × {mib['working_set_bytes']:.1f} + "
                f"{mib['dense_state_bytes']:.1f} = {mib['formula_bytes']:.0f}"
            )
            resident = f"{mib['pool_resident_total_bytes']:.0f} ({parts})"
            process = f"{mib['process_before_training_bytes']:.0f} → {mib['process_peak_bytes']:.0f}"
            rows.append([shape, formula, resident, f"{found['ratio']:.2f}", process])
    head = ["MiB", "pages of touched rows + 3 working sets + dense state", "resident pages of the pool", "ratio",
            "process: RSS before the first step → peak"]  # fmt: skip
    note = (
        "There are two dense slots, each a whole state, and the log is never smaller than 16 MiB. The process also "
        "holds PyTorch, its activations, the batches and plans.\n"
    )
    return ["## Memory", "", *markdown_table(head, rows), note] if rows else []


def _recovery(results: Results) -> list[str]:
    rows = []
    for interval in RECOVERY_INTERVALS:
        key = f"recovery_open/{interval}"
        for found in results.rounds(key)[:1]:
            seconds = results.median(key, lambda result: result["seconds"])
            cell = _Cell(seconds, _RECOVERY_BAR_S if interval == 1 else None, "{:.3f} s", at_least=False)
            rows.append(
                [f"dense_interval {interval}: log of {found['log_bytes'] / 2**20:.0f} MiB, full",
                 found["records_undone"], f"{found['rows_restored']:,}", cell, f"{found['cpu_seconds']:.3f} s"]
            )  # fmt: skip
    head = [
        "100 GB table, killed with kill -9",
        "records undone",
        "rows restored",
        "opening, all up to the first step",
        "CPU time of that",
    ]
    return ["## Recovery", "", *markdown_table(head, rows)] if rows else []


def _checks(results: Results) -> list[str]:
    """Do systems that must agree agree? Rows to the bit among ours; losses among all."""
    digests: dict[tuple[str, str], dict[str, set[str]]] = {}
    losses: dict[tuple[str, str, int], dict[str, set[float]]] = {}
    first: dict[str, set[float]] = {}
    for key, result in results.all():
        if "first_loss" not in result or "bf16" in key:
            continue
        config = result["config"]
        shape, optimizer = config["shape"], config["optimizer"]
        system = config.get("mode", config.get("system"))
        first.setdefault(shape, set()).add(round(result["first_loss"], 5))
        if "rows_sha256" in result:
            digests.setdefault((shape, optimizer), {}).setdefault(result["rows_sha256"], set()).add(system)
        if system != "embeddingbag":
            steps = config["steps"] + config["warmup"]
            losses.setdefault((shape, optimizer, steps), {}).setdefault(system, set()).add(result["last_loss"])
    lines = []
    for (shape, optimizer), of_digest in sorted(digests.items()):
        systems = ", ".join(sorted(set().union(*of_digest.values())))
        verdict = "the same bits" if len(of_digest) == 1 else f"DIFFER: {of_digest}"
        lines.append(f"- rows and state at the end, {shape}, {_NAMES[optimizer]} ({systems}): {verdict}")
    for shape, values in sorted(first.items()):
        verdict = "the same" if max(values) - min(values) <= 2e-5 else f"DIFFERS: {sorted(values)}"
        lines.append(f"- loss of the first batch, {shape}, all systems: {verdict} ({min(values):.5f})")
    for (shape, optimizer, steps), of_system in sorted(losses.items()):
        values = set().union(*of_system.values())
        spread = max(values) - min(values)
        lines.append(
            f"- loss after {steps} steps, {shape}, {_NAMES[optimizer]} ({', '.join(sorted(of_system))}): "
            f"within {spread:.1e} of each other"
        )
    return ["## Checks", "", *lines, ""] if lines else []


def _setting(results: Results) -> list[str]:
    record = results.record
    machine, busy = record["machine"], [entry["cpus"] for entry in record["busy"]]
    disturbed = [cpus for cpus in busy if cpus > _IDLE_CPUS]
    versions: dict[str, str] = {}
    environments: dict[str, dict[str, str]] = {}
    for _, result in results.all():
        versions |= result.get("versions", {})
        if "config" in result:
            environments["holdfast" if "mode" in result["config"] else "peers"] = result["environment"]
    alone = (
        f"**The machine was idle** otherwise: before each of {len(busy)} measurements others used at most "
        f"{max(busy, default=0):.2f} CPUs."
        if not disturbed
        else f"**THE MACHINE WAS NOT IDLE**: before {len(disturbed)} of {len(busy)} measurements others used more than "
        f"{_IDLE_CPUS} CPUs (median {statistics.median(busy):.2f}, most {max(busy):.2f} of {machine['cpus']}). These "
        "numbers say little."
    )
    return [
        alone,
        "",
        f"- {machine['processor']}, {machine['cpus']} CPUs ({', '.join(machine['caches'])}), {machine['memory']}"
        + (", virtual" if machine["hypervisor"] else ""),
        f"- {machine['kernel']}; transparent huge pages: {machine['transparent_huge_pages']}",
        f"- pool on {machine['medium']}; disk: {machine['disk']}",
        f"- holdfast {machine['holdfast_commit']}; " + ", ".join(f"{name} {v}" for name, v in sorted(versions.items())),
        *(f"- environment of {who}: `{env}`" for who, env in sorted(environments.items())),
        f"- rounds: {record['settings']['rounds']}; {record['minutes']:.0f} minutes; every command is in results.json",
        "",
    ]


def write_report(results: Results, directory: Path) -> Path | None:
    """report.md and its plots; gives the path of the main plot, if there was enough for one."""
    main_plot = plots.speed_ups(
        directory / "benchmark.png",
        results.shapes,
        {
            "row-wise Adagrad": [_number(speed_up(results, s, "rowwise_adagrad")) for s in results.shapes],
            "SGD": [_number(speed_up(results, s, "sgd")) for s in results.shapes],
            "row-wise Adagrad, bf16 MLPs": [
                _number(speed_up(results, s, "rowwise_adagrad", bf16=True)) for s in results.shapes
            ],
        },
    )
    if "ablation" in results.record["settings"]["sections"]:
        plots.ablation(
            directory / "ablation.png",
            list(ABLATION_NAMES.values()),
            {
                shape: [results.median(key_of(m, shape, "rowwise_adagrad"), mean_step_ms) for m in ABLATION_NAMES]
                for shape in results.shapes
            },
        )
    plots.checkpoints(
        directory / "checkpoints.png",
        {
            f"{kind}\nevery {every}": results.median(f"checkpoint/{kind}/{every}", checkpoint_cost)
            for kind in ("torch_save", "dcp_async")
            for every in (10, 100)
        },
        commit_cost(results, "kaggle"),
    )
    quick = results.record["settings"]["quick"]
    lines = [
        f"# Benchmark of {results.record['date'][:10]}",
        "",
        *(["**A smoke test (--quick): a few steps, one round. The numbers mean nothing.**", ""] if quick else []),
        *_setting(results),
        "## What was to be reached",
        "",
        *markdown_table(["at dense_interval = 1", *results.shapes], [[name, *cells] for name, cells in _bars(results)]),
        *(["![speed-ups](benchmark.png)", ""] if main_plot is not None else []),
        *_times(results),
        *_verbs(results),
        *_ablation(results),
        *_checkpoints(results),
        *_memory(results),
        *_recovery(results),
        *_checks(results),
    ]
    if errors := results.errors():
        lines += ["## Failed", "", *(f"- {key}: `{error[-300:]}`" for key, error in errors.items()), ""]
    report_page.write(directory, "\n".join(lines))
    return main_plot


def _number(found: tuple[float, str] | None) -> float | None:
    return None if found is None else found[0]
