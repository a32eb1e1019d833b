"""Tables and bars, from what was measured alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import report_page
from machine import in_words
from markdown_table import markdown_table
from trainingcxl.energy import joules
from trainingcxl.models import BATCH, ROWS, SHAPES
from trainingcxl.plots import plot_batches, plot_energy, plot_stages
from trainingcxl.systems import CONFIGURATIONS, PAPERS, RELAXED_INTERVAL

PAPER_MS = {
    "pmem": (20.7, 49.7, 20.1, 13.1),
    "pcie": (8.5, 9.0, 10.8, 9.6),
    "cxl-d": (6.7, 7.0, 8.1, 7.1),
    "cxl-b": (5.5, 5.4, 6.8, 5.8),
    "cxl": (4.8, 4.9, 5.5, 4.9),
}
STAGES = ("plan", "capture", "lookup", "lookup_ahead", "capture_ahead", "train", "update", "commit")
_HEADLINE_BAR = 5.2
_LADDER_BARS = (("cxl-d", "cxl-b", 0.10), ("cxl-b", "cxl", 0.08))
_DURABLE_BAR = 0.03
_MEAN_ERROR_BAR, _WORST_ERROR_BAR = 0.15, 0.30
_TIMES = ("batch_ms", "simulated_ms")
PMEMS = ("pmem-third", "pmem", "pmem-2")
_NEAR = ("pcie", "cxl-d", "cxl-b", "cxl")

Cells = Mapping[str, Mapping[str, Any]]


class _Bar:
    def __init__(self, what: str, value: float | None, bar: float, text: str, *, at_least: bool) -> None:
        self.what, self.value, self.bar, self.text, self.at_least = what, value, bar, text, at_least

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def row(self) -> list[str]:
        shown = "–" if self.value is None else self.text.format(self.value)
        verdict = {None: "not measured", True: "met", False: "**not met**"}[self.met]
        return [self.what, shown, f"{'≥' if self.at_least else '≤'} {self.text.format(self.bar)}", verdict]


def _ms(cells: Cells, model: str, system: str) -> float | None:
    cell = cells.get(f"{model}/{system}")
    return None if cell is None else float(cell["batch_ms"])


def _ratios(cells: Cells, over: str, under: str) -> list[float] | None:
    """Of all models, or nothing."""
    pairs = [(_ms(cells, model, over), _ms(cells, model, under)) for model in SHAPES]
    return [a / b for a, b in pairs if a is not None and b is not None] if all(a and b for a, b in pairs) else None


def _mean(values: list[float] | None) -> float | None:
    return None if values is None else statistics.fmean(values)


def _errors(cells: Cells) -> dict[str, float]:
    return {name: cell["simulated_ms"] / cell["batch_ms"] - 1 for name, cell in cells.items()}


def _order_is_right(cells: Cells) -> bool:
    """Whether the simulator puts the systems of every model in the order that was measured, but for those within 3%."""
    for model in SHAPES:
        found = [cells[name] for name in cells if name.startswith(f"{model}/")]
        for one in found:
            for other in found:
                if one["batch_ms"] > 1.03 * other["batch_ms"] and one["simulated_ms"] < other["simulated_ms"] / 1.03:
                    return False
    return True


def bars(record: Mapping[str, Any]) -> list[_Bar]:
    cells: Cells = record["cells"]
    found = []
    for system in PMEMS:
        what = f"{CONFIGURATIONS[system].title}: over CXL, arithmetic mean"
        found.append(_Bar(what, _mean(_ratios(cells, system, "cxl")), _HEADLINE_BAR, "{:.2f} ×", at_least=True))
    for slower, faster, bar in _LADDER_BARS:
        ratios = _ratios(cells, faster, slower)
        saved = None if ratios is None else 1 - statistics.fmean(ratios)
        what = f"{CONFIGURATIONS[faster].title}: time less than {CONFIGURATIONS[slower].title}'s, mean"
        found.append(_Bar(what, saved, bar, "{:.1%}", at_least=True))
    for system, what in (("cxl", f"rows every batch, parameters every {RELAXED_INTERVAL}"), ("cxl-b", "all of it")):
        ratios = _ratios(cells, system, "none")
        worst = None if ratios is None else max(ratios) - 1
        found.append(
            _Bar(f"durable every batch, {what}: over none, worst", worst, _DURABLE_BAR, "{:.1%}", at_least=False)
        )
    errors = {name: abs(error) for name, error in _errors(cells).items()}
    if errors:
        found.append(
            _Bar("simulator, mean error", statistics.fmean(errors.values()), _MEAN_ERROR_BAR, "{:.1%}", at_least=False)
        )
        found.append(_Bar("simulator, worst error", max(errors.values()), _WORST_ERROR_BAR, "{:.1%}", at_least=False))
    return found


def complaints(record: Mapping[str, Any]) -> list[str]:
    return [" ".join(bar.row()) for bar in bars(record) if bar.met is False]


def write_report(record: Mapping[str, Any], directory: Path) -> None:
    """report.md and its pictures."""
    cells: Cells = record["cells"]
    machine = record["machine"]
    models = [model for model in SHAPES if any(name.startswith(f"{model}/") for name in cells)]
    systems = [system for system in CONFIGURATIONS if any(name.endswith(f"/{system}") for name in cells)]
    plot_stages(cells, models, [s for s in systems if s != "ssd"], directory / "stages.png")
    plot_batches(cells, models[0], [s for s in _NEAR if f"{models[0]}/{s}" in cells], directory / "batches.png")
    plot_energy(cells, models, [s for s in PAPERS if s in systems and s != "ssd"], directory / "energy.png")

    def table(cell_text: Callable[[str, str], str], chosen: list[str] = systems) -> list[str]:
        rows = [[CONFIGURATIONS[system].title, *(cell_text(model, system) for model in models)] for system in chosen]
        return markdown_table(["", *(model.upper() for model in models)], rows)

    def shown(model: str, system: str) -> str:
        cell = cells.get(f"{model}/{system}")
        return "–" if cell is None else f"{cell['batch_ms']:.2f}"

    def beside(model: str, system: str) -> str:
        cell = cells.get(f"{model}/{system}")
        if cell is None:
            return "–"
        return f"{cell['batch_ms']:.2f}, simulated {cell['simulated_ms']:.2f} ({_errors({'': cell})['']:+.0%})"

    def paper(model: str, system: str) -> str:
        place = list(SHAPES).index(model)
        return f"{shown(model, system)}, paper {PAPER_MS['pmem' if system in PMEMS else system][place]}"

    lines = [
        "# TrainingCXL's evaluation, run",
        "",
        (
            "**Timing only.** `cd benchmarks && python -m trainingcxl`. Rows, logs, dense states and the "
            "protocol that makes them durable are holdfast's own and real; media wait for what they are "
            "declared to take (`[pool.dial]`), and the dense part waits for a declared RTX 3090 "
            "(`[device.dial]`) and learns nothing. All declared times of a run are stretched "
            f"{_stretches(cells)} times, so that two cores' own work is small beside them; times here are "
            "divided by that. `trainingcxl/media.py` has every declared figure with its source; none is fitted "
            "to a run."
        ),
        "",
        (
            f"{in_words(machine)}; pools on "
            f"{machine['medium']}; holdfast {machine['holdfast_commit']}. Batches of {BATCH}, {ROWS:,} rows a "
            "table (the fit to the paper has 4 million, which this machine does not hold), Zipf 1.05."
        ),
        "",
        *markdown_table(["", "", "bar", ""], [bar.row() for bar in bars(record)]),
        f"The simulator has every model's systems in the right order: {'yes' if _order_is_right(cells) else '**no**'}.",
        "",
        "PMEM over CXL, measured, simulated; the paper's. Means are arithmetic and geometric:",
        "",
        *_headline(cells, models),
        "ms a batch, beside the simulator's with the same declared figures:",
        "",
        *table(beside),
        "ms a batch, beside the paper's bars (read off its chart), which have other media:",
        "",
        *table(paper, [system for system in systems if system in (*PMEMS, *_NEAR)]),
        "![](stages.png)",
        "",
        "By verb of the training thread, ms a batch, waiting included. `train` is the wait for the accelerator.",
        "",
        *_stage_tables(cells, models, systems),
        "Two batches, as Figure 12:",
        "",
        "![](batches.png)",
        "",
        (
            "Joules a batch: declared power over declared and measured times (`trainingcxl/energy.py`), as "
            "Figure 13; and what the processor here really spent, CPU seconds × 15 W a core (no RAPL is to be "
            "read in this virtual machine), which near memory stands for the logic there."
        ),
        "",
        *table(lambda m, s: "–" if f"{m}/{s}" not in cells else _energy_text(cells[f"{m}/{s}"], s)),
        "![](energy.png)",
        "",
        *_fidelity(cells),
    ]
    report_page.write(directory, "\n".join(lines))


def _headline(cells: Cells, models: list[str]) -> list[str]:
    """The cells of the first bars."""
    rows = []
    for system in PMEMS:
        there = [model for model in models if f"{model}/{system}" in cells and f"{model}/cxl" in cells]
        found = [[cells[f"{m}/{system}"][key] / cells[f"{m}/cxl"][key] for m in there] for key in _TIMES]
        row = [f"{measured:.2f}, {predicted:.2f}" for measured, predicted in zip(*found, strict=True)]
        means = [f"{statistics.fmean(each):.2f}; {statistics.geometric_mean(each):.2f}" for each in found if each]
        rows.append([CONFIGURATIONS[system].title, *_in_places(models, there, row), *(means or ["–", "–"])])
    paper = [a / b for a, b in zip(PAPER_MS["pmem"], PAPER_MS["cxl"], strict=True)]
    of_paper = {model: f"{ratio:.2f}" for model, ratio in zip(SHAPES, paper, strict=True)}
    mean = f"{statistics.fmean(paper):.2f}; {statistics.geometric_mean(paper):.2f}"
    rows.append(["the paper", *(of_paper[model] for model in models), mean, "–"])
    return markdown_table(["", *(model.upper() for model in models), "mean, measured", "mean, simulated"], rows)


def _in_places(models: list[str], there: list[str], texts: list[str]) -> list[str]:
    by_model = dict(zip(there, texts, strict=True))
    return [by_model.get(model, "–") for model in models]


def _stretches(cells: Cells) -> str:
    """Each with the systems that have it."""
    systems: dict[float, dict[str, None]] = {}
    for name, cell in cells.items():
        systems.setdefault(cell["stretch"], {})[CONFIGURATIONS[name.partition("/")[2]].title] = None
    return ", ".join(f"{stretch:g} ({', '.join(titles)})" for stretch, titles in sorted(systems.items(), reverse=True))


def _energy_text(cell: Mapping[str, Any], system: str) -> str:
    return f"{joules(cell, system):.3f}; processor {15 * cell['cpu_s']:.3f}"


def _stage_tables(cells: Cells, models: list[str], systems: list[str]) -> list[str]:
    lines: list[str] = []
    for model in models:
        rows = [
            [CONFIGURATIONS[system].title, *(f"{cell['stage_ms'].get(stage, 0.0):.2f}" for stage in STAGES)]
            for system in systems
            if (cell := cells.get(f"{model}/{system}")) is not None
        ]
        lines += markdown_table([model.upper(), *STAGES], rows)
    return lines


def _fidelity(cells: Cells) -> list[str]:
    """How real the declared times were: what the dials could not hide."""
    rows = [
        [
            name,
            f"{cell['dial']['declared_s'] * 1e3 / cell['stretch']:.2f}",
            f"{cell['dial']['late_s'] * 1e3 / cell['stretch']:.2f}",
            f"{cell['cpu_s'] * 1e3 / cell['stretch']:.2f}",
            f"{min(cell['each_ms']):.2f} to {max(cell['each_ms']):.2f}",
            f"{cell['others_cpus']:.1f}",
        ]
        for name, cell in cells.items()
    ]
    return [
        (
            "Of a batch, ms: what was asked of the medium, by how much real work was slower than that, the "
            "process's CPU time, the fastest and the slowest batch; and CPUs that others used before the run."
        ),
        "",
        *markdown_table(["", "asked", "late", "CPU", "batches", "others"], rows),
    ]
