"""The report of a run: each figure beside its bar."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import report_page
from machine import in_words
from markdown_table import markdown_table


def write_report(directory: Path, results: dict[str, Any]) -> bool:
    """Writes it; whether every bar that was measured is met."""
    machine = results["machine"]
    where = f"{in_words(machine)}; pools on {machine['medium']}."
    lines = ["# Scale-out", "", where, ""]
    bars: list[tuple[str, str, str, bool]] = []
    for name, section in (
        ("speed", _speed),
        ("overlap", _overlap),
        ("commit", _commit),
        ("wire", _wire),
        ("peers", _peers),
        ("restart", _restart),
    ):
        if name in results:
            lines += section(results[name], bars)
    for name, why in results["failures"].items():
        lines += [f"**{name} failed:** {why.strip().splitlines()[-1] if why.strip() else 'no word'}", ""]
    table = markdown_table(
        ["what", "measured", "bar", ""], [(*bar[:3], "met" if bar[3] else "NOT MET") for bar in bars]
    )
    report_page.write(directory, "\n".join([*lines[:4], *table, *lines[4:]]))
    return all(bar[3] for bar in bars)


def _speed(rounds: list[dict[str, Any]], bars: list[tuple[str, str, str, bool]]) -> list[str]:
    ratios = [min(r["plain"]["median_ms"], r["ranks_1"]["median_ms"]) / r["ranks_2"]["median_ms"] for r in rounds]
    ratio = statistics.median(ratios)
    bars.append(
        ("two ranks on two cores over one rank on one, rm1", f"{ratio:.2f} ({_range(ratios)})", "≥ 1.6", ratio >= 1.6)
    )
    rows = [
        (name, *(f"{r[name]['median_ms']:.1f}" for r in rounds), _stages(rounds[-1][name]["stage_ms"]))
        for name in ("plain", "ranks_1", "ranks_2", "ranks_4")
    ]
    head = ["ms a step, rm1", *(f"round {i + 1}" for i in range(len(rounds))), "stages of rank 0, last round"]
    note = (
        "In turns of 1.5 seconds, the others stopped; medians over all steps. plain: one process without a group, on "
        "one core; ranks_4: two on each of two cores. The faster of plain and ranks_1 is what two ranks are compared "
        "with."
    )
    return ["## Speed", "", note, "", *markdown_table(head, rows)]


def _overlap(rounds: list[dict[str, Any]], bars: list[tuple[str, str, str, bool]]) -> list[str]:
    for beside in ("one, sorted by the memory rank", "one"):
        ratios = [r[beside]["median_ms"] / r["two"]["median_ms"] for r in rounds]
        ratio = statistics.median(ratios)
        what = f"one trainer, one memory rank, rm1: two batches in flight over {beside}"
        bars.append((what, f"{ratio:.2f} ({_range(ratios)})", "≥ 1.3", ratio >= 1.3))
    names = [name for name, part in rounds[0].items() if isinstance(part, dict)]
    rows = [
        (
            name,
            *(f"{r[name]['median_ms']:.1f}" for r in rounds),
            ", ".join(f"{ms:.1f}" for ms in rounds[-1][name]["cpu_ms"]),
            _stages(rounds[-1][name]["stage_ms"]),
        )
        for name in names
    ]
    head = ["ms a step, rm1", *(f"round {i + 1}" for i in range(len(rounds)))]
    head += ["processor time of trainer and memory rank", "stages of the trainer, last round"]
    note = "In turns of 1.5 seconds, the others stopped; medians over all steps; a core for each rank."
    return ["## Two batches in flight", "", note, "", *markdown_table(head, rows)]


def _commit(rounds: list[dict[str, Any]], bars: list[tuple[str, str, str, bool]]) -> list[str]:
    costs = [r["cost"] for r in rounds]
    cost = statistics.median(costs)
    bars.append(
        ("committing every step, two ranks, rm1", f"{cost:.1%} ({_range(costs, '.1%')})", "≤ 5 %", cost <= 0.05)
    )
    rows = [(i + 1, f"{r['on_ms']:.2f}", f"{r['off_ms']:.2f}", f"{r['cost']:.1%}") for i, r in enumerate(rounds)]
    return [
        "## Cost of committing",
        "",
        "By turns of 20 steps within one run: with everything, and without dense states, their checksums, and waiting.",
        "",
        *markdown_table(["round", "on, ms", "off, ms", "cost"], rows),
    ]


def _wire(schemes: dict[str, Any], bars: list[tuple[str, str, str, bool]]) -> list[str]:
    rows = []
    worst = 0.0
    for name, wire in schemes.items():
        least, counted = wire["least"], wire["counted"]
        over = wire["lo"] / least["total"] - 1
        worst = max(worst, over)
        moved = counted["ids"] + counted["vectors"] + counted["gradients"]
        rows.append(
            (
                name,
                f"{least['total'] / 1e6:.3f}",
                f"{sum(counted.values()) / 1e6:.3f}",
                f"{wire['lo'] / 1e6:.3f}",
                f"{over:+.1%}",
                f"{wire['lo_packets']:.0f}",
                f"{least['fetching_rows'] / moved:.1f}",
            )
        )
        if name.startswith("whole") and "memory" in name:
            fewer = least["fetching_rows"] / moved
            bars.append((f"bytes of fetching unique rows over ours: {name}", f"{fewer:.1f}", "≥ 6", fewer >= 6))
    bars.append(("bytes on lo over the least of the scheme, the worst", f"{worst:+.1%}", "≤ 5 %", worst <= 0.05))
    head = ["MB a step, all ranks", "least", "counted", "on lo", "over", "packets", "fetching rows / ours"]
    note = (
        "Least: from the batches' ids alone (arithmetic.py). On lo: the kernel's count in a network namespace of its "
        "own, headers and acknowledgements included."
    )
    return ["## Bytes on the wire", "", note, "", *markdown_table(head, rows)]


def _peers(rounds: list[dict[str, Any]], bars: list[tuple[str, str, str, bool]]) -> list[str]:
    lines = ["## Beside TorchRec's DistributedModelParallel", ""]
    rows = []
    for optimizer in ("rowwise_adagrad", "sgd"):
        ours = [r[f"holdfast_{optimizer}"]["median_ms"] for r in rounds]
        theirs = [r[f"torchrec_{optimizer}"]["median_ms"] for r in rounds]
        ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        rows.append((optimizer, _range(ours), _range(theirs), f"{ratio:.2f} ({_range(ratios)})"))
        if optimizer == "rowwise_adagrad":
            bars.append(("over TorchRec DMP, rm1, two ranks, row-wise Adagrad", f"{ratio:.2f}", "≥ 4", ratio >= 4))
    losses = {name: {r[f"{name}_rowwise_adagrad"]["first_loss"] for r in rounds} for name in ("holdfast", "torchrec")}
    head = ["rm1, two ranks, a core each; ms a step, medians", "holdfast, every batch committed", "TorchRec", "ratio"]
    return [*lines, *markdown_table(head, rows), f"Loss of the first batch: {losses}.", ""]


def _restart(rounds: list[dict[str, Any]], bars: list[tuple[str, str, str, bool]]) -> list[str]:
    own = [r["opening"] + r["first_step"] for r in rounds]
    worst = max(own)
    bars.append(
        ("one of four ranks killed: our part of the way to the next step", f"{worst:.2f} s", "< 5 s", worst < 5)
    )
    phases = ("total", "torchrun", "imports", "batches", "opening", "first_step")
    rows = [(*(f"{r[phase]:.2f}" for phase in phases), r["opening_phases"], r["went_on_at"]) for r in rounds]
    note = (
        "Seconds from the death of one of four ranks to the end of the next step. torchrun: until it has noticed, "
        "ended the others and started all again; batches: the benchmark makes its own."
    )
    return [
        "## Restart",
        "",
        note,
        "",
        *markdown_table([*phases, "of opening", "went on at step"], rows),
    ]


def _range(values: list[float], form: str = ".2f") -> str:
    return f"{min(values):{form}} to {max(values):{form}}"


def _stages(stage_ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {ms:.1f}" for name, ms in stage_ms.items())
