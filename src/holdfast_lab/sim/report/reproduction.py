"""The pages of `holdfast sim paper`: what TrainingCXL found, what the simulator finds, and how well it knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast_lab.sim.library import Library
from holdfast_lab.sim.paper import Cell, EnergyRatios, Errors, Reproduction
from holdfast_lab.sim.report import figures
from holdfast_lab.sim.report.content import (
    Line,
    Prediction,
    Section,
    Table,
    breakdown_of,
    energy_of,
    timeline_of,
)
from holdfast_lab.sim.report.page import write_html
from holdfast_lab.sim.sensitivity import STUDIES, Curve, against_baselines, curve

_TIMELINES = ("cxl-d", "cxl-b", "cxl")
_TIMELINE_MODEL = "rm1"
_RELATIVE_TO = "PMEM"


def write_paper(directory: Path, found: Reproduction, library: Library, *, overwrite: bool = False) -> Path:
    """Figures as PNG and CSV, and `index.html` with all of them, whose path it returns. library: what was fitted.

    Raises ConfigError where one of the files is there already.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sections = [
        _times(directory, found, library, overwrite),
        _timelines(directory, found, library, overwrite),
        _energy(directory, found, overwrite),
        _parameters(found),
        _structure(found),
        sensitivity_section(directory, found.fit.library, found.facts.models, overwrite=overwrite),
    ]
    page = directory / "index.html"
    write_html(page, found.facts.title, sections, overwrite=overwrite)
    return page


def sensitivity_section(directory: Path, fitted: Library, models: Sequence[str], *, overwrite: bool) -> Section:
    """What the speedup depends on: a figure a study, and what other baselines leave of it."""
    curves = [curve(fitted, models, study) for study in STUDIES]
    shown = [_draw(directory, each, overwrite) for each in curves]
    baselines = against_baselines(fitted, models)
    rows = [
        (
            fitted.system(baseline).title,
            *(f"{of_model[each]:.2f}" for each in models),
            f"{_mean(of_model.values()):.2f}",
        )
        for baseline, of_model in baselines.items()
    ]
    spans = sorted(curves, key=lambda each: each.span, reverse=True)
    return Section(
        title="What the speedup depends on",
        text="One thing at a time, everything else as it was fitted. The first table has what other baselines leave of "
        "the speedup, the second how far each thing moves it over the range that is drawn.",
        tables=(
            Table(
                title="a baseline's time over that of CXL",
                header=("baseline", *(each.upper() for each in models), "mean"),
                rows=rows,
            ),
            Table(
                title="the mean speedup",
                header=("varied", "of", "from", "to", "speedup from", "to"),
                rows=[
                    (each.name, each.x_name, f"{each.x[0]:.4g}", f"{each.x[-1]:.4g}", f"{each.speedups[0]:.2f}",
                     f"{each.speedups[-1]:.2f}")
                    for each in spans
                ],
            ),
        ),
        figures=tuple(shown),
    )  # fmt: skip


def _draw(directory: Path, shown: Curve, overwrite: bool) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in shown.name)
    return figures.lines(
        directory / f"sensitivity-{name}.png",
        [Line(label=f"over {shown.baseline}", x=shown.x, y=shown.speedups)],
        title=f"Speedup over {shown.baseline.upper()}: {shown.name} (dotted: as fitted)",
        x_name=shown.x_name,
        y_name="times as fast, mean over models",
        marked_x=shown.now,
        overwrite=overwrite,
    )


def _times(directory: Path, found: Reproduction, library: Library, overwrite: bool) -> Section:
    facts = found.facts
    bars = [
        breakdown_of(
            found.runs[system, model],
            library.system(system),
            model=model.upper(),
            measured_ms=facts.batch_ms[system][model],
        )
        for model in facts.models
        for system in facts.systems
    ]
    points = [
        Prediction(
            label=cell.name, group="fitted" if cell.is_fitted else "predicted", simulated=cell.ours, measured=cell.paper
        )
        for cell in found.cells
    ]
    return Section(
        title="Time of a batch",
        text=f"Fitted to {' and '.join(each.upper() for each in _fitted_models(found))} and to the stages below; the "
        "other models are predictions. The bands hold 90 % of what the fit leaves open.\n\n"
        f"Mean error: {_percent(found.errors.fitted)} of what is fitted, {_percent(found.errors.predicted)} of what is "
        f"predicted ({_percent(found.errors.predicted_near_memory)} without the host's PMEM, whose worst is "
        f"{_percent(found.errors.worst_predicted_host)}); copying RM1 to RM2 and RM4 to RM3, without any model, is "
        f"{_percent(facts.copying_error)} off. Fitted to all four: {_percent(_of_all(found))}, and a mean speedup of "
        f"{found.ratios_of_all['PMEM / CXL, arithmetic mean']:.2f}.",
        tables=(
            _cells_table("milliseconds a batch", found.cells),
            _cells_table("milliseconds of stages, fitted", found.stages),
            Table(
                title="ratios, means over the models",
                header=("ratio", "paper", "simulated", "90 %"),
                rows=[
                    (r.name, f"{r.paper:.2f}", f"{r.ours:.2f}", f"{r.low:.2f} to {r.high:.2f}") for r in found.ratios
                ],
            ),
        ),
        figures=(
            figures.batch_breakdowns(
                directory / "batch-time.png", bars, title="Where a batch's time goes", overwrite=overwrite
            ),
            figures.parity(directory / "parity.png", points, title="Simulated and read", overwrite=overwrite),
        ),
    )


def _timelines(directory: Path, found: Reproduction, library: Library, overwrite: bool) -> Section:
    shown = [
        timeline_of(found.runs[system, _TIMELINE_MODEL], library.system(system), batches=2) for system in _TIMELINES
    ]
    title = f"Two batches of {_TIMELINE_MODEL.upper()}"
    return Section(
        title="Timelines",
        text="What every device does in two batches of steady state.",
        figures=(figures.timelines(directory / "timelines.png", shown, title=title, overwrite=overwrite),),
    )


def _energy(directory: Path, found: Reproduction, overwrite: bool) -> Section:
    facts = found.facts
    bars = [
        energy_of(found.runs[system, model], model=model.upper())
        for model in facts.models
        for system in ("dram", *facts.systems)
    ]
    return Section(
        title="Energy",
        text="Nothing is fitted to it: it follows from times and from powers with their priors. The modules that give "
        "bandwidth are those that take power; how many a system has is a rule. The bars are by the first.",
        tables=tuple(table for by_rule in found.energy for table in _energy_tables(found, by_rule)),
        figures=(
            figures.energies(
                directory / "energy.png",
                bars,
                relative_to=_RELATIVE_TO,
                title="Energy of a batch",
                overwrite=overwrite,
            ),
        ),
    )


def _energy_tables(found: Reproduction, by_rule: EnergyRatios) -> tuple[Table, Table]:
    takes_more = found.facts.stated.dram_takes_more_than_pmem
    return (
        Table(
            title=f"energy that CXL saves, where {by_rule.rule}",
            header=("saved", "paper", "simulated", "90 %"),
            rows=[
                (r.name, _percent(r.paper), _percent(r.ours), f"{_percent(r.low)} to {_percent(r.high)}")
                for r in by_rule.saved
            ],
        ),
        Table(
            title=f"DRAM's energy over PMEM's, where {by_rule.rule}",
            header=("model", "paper: DRAM takes", "simulated", "probability of the paper's order"),
            rows=[
                (model.upper(), "more" if takes_more[model] else "less", f"{ratio:.2f}", _percent(probability))
                for model, (ratio, probability) in by_rule.dram_order.items()
            ],
        ),
    )


def _parameters(found: Reproduction) -> Section:
    rows = [
        (each.name, f"{each.median:.4g}", f"{each.value(z):.4g}", f"{z:+.1f}", _interval(found, each.name), each.source)
        for each, z in zip(found.fit.free, found.fit.z, strict=True)
    ]
    return Section(
        title="Parameters",
        text="What the paper leaves open. A prior is lognormal about its median. The region is all that agrees with "
        f"what is fitted; {found.draws} draws of it were simulated, worth {found.effective_draws:.0f} equal ones. The "
        "powers were not fitted.",
        tables=(Table(header=("parameter", "prior", "fitted", "sigmas", "90 %", "source of the prior"), rows=rows),),
    )


def _structure(found: Reproduction) -> Section:
    rows = [_errors_row("as described", found.errors)]
    rows += [_errors_row(title, errors) for title, errors in found.alternatives.items()]
    return Section(
        title="Other assumptions",
        text="The same fit with something else assumed. The last column is the parameter that is farthest from its "
        "prior, in sigmas.",
        tables=(
            Table(
                header=("assumed", "fitted", "predicted", "near memory", "PMEM, worst", "stages, worst", "farthest"),
                rows=rows,
            ),
        ),
    )


def _errors_row(title: str, errors: Errors) -> tuple[str, ...]:
    return (
        title,
        _percent(errors.fitted),
        _percent(errors.predicted),
        _percent(errors.predicted_near_memory),
        _percent(errors.worst_predicted_host),
        _percent(errors.worst_stage),
        f"{errors.farthest_z:+.1f}",
    )


def _cells_table(title: str, cells: Sequence[Cell]) -> Table:
    return Table(
        title=title,
        header=("", "", "paper", "simulated", "error", "90 %"),
        rows=[
            (
                cell.name,
                "fitted" if cell.is_fitted else "predicted",
                f"{cell.paper:.2f}",
                f"{cell.ours:.2f}",
                f"{cell.error:+.1%}",
                f"{cell.low:.2f} to {cell.high:.2f}",
            )
            for cell in cells
        ],
    )


def _fitted_models(found: Reproduction) -> list[str]:
    return list(dict.fromkeys(cell.model for cell in found.cells if cell.is_fitted))


def _of_all(found: Reproduction) -> float:
    return (found.errors_of_all.fitted + found.errors_of_all.predicted) / 2


def _interval(found: Reproduction, name: str) -> str:
    low, high = found.intervals[name]
    return f"{low:.3g} to {high:.3g}"


def _percent(part: float) -> str:
    return f"{part:.1%}"


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
