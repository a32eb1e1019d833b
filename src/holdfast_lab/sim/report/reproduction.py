"""The page of `holdfast sim paper`: what TrainingCXL found, what the simulator finds, and how well it knows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from holdfast_lab.sim.library import Library
from holdfast_lab.sim.paper import Cell, EnergyRatios, Reproduction
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


def write_paper(
    directory: Path, found: Reproduction, library: Library, others: Sequence[Section] = (), *, overwrite: bool = False
) -> Path:
    """Figures as SVG and CSV, and `index.html` with all of them, whose path it returns. library: what was fitted;
    others: of other papers, at the page's end.

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
        *others,
    ]
    page = directory / "index.html"
    write_html(page, found.facts.title, sections, overwrite=overwrite)
    return page


def sensitivity_section(directory: Path, fitted: Library, models: Sequence[str], *, overwrite: bool) -> Section:
    """What the speedup depends on: a figure a study, and what other baselines leave of it."""
    curves = [curve(fitted, models, study) for study in STUDIES]
    shown = [_draw(directory, each, overwrite) for each in curves]
    spans = sorted(curves, key=lambda each: each.span, reverse=True)
    return Section(
        title="What the speedup depends on",
        text="One thing at a time, everything else as it was fitted. The first table has what other baselines leave of "
        "the speedup, the second how far each thing moves it over the range that is drawn.",
        tables=(
            baselines_table(fitted, models),
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


def baselines_table(library: Library, models: Sequence[str]) -> Table:
    rows = []
    for baseline, ratios in against_baselines(library, models).items():
        shown = ["does not fit" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values()]
        fitting = [ratio for ratio in ratios.values() if ratio is not None]
        mean = f"{_mean(fitting):.2f}" if len(fitting) == len(models) else ""
        rows.append((library.system(baseline).title, *shown, mean))
    return Table(
        title="a baseline's time over that of CXL",
        header=("baseline, over CXL", *(each.upper() for each in models), "mean"),
        rows=rows,
    )


def _draw(directory: Path, shown: Curve, overwrite: bool) -> Path:
    name = "".join(letter if letter.isalnum() else "-" for letter in shown.name)
    return figures.lines(
        directory / f"sensitivity-{name}.svg",
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
        Prediction(label=cell.name, group="left out", simulated=cell.ours, measured=cell.paper)
        for cell in found.left_out
    ]
    errors = found.own_errors
    within = sum(cell.is_within for cell in found.left_out)
    return Section(
        title="Time of a batch",
        text="Every model is left out in turn, and predicted by what is fitted to the other three. Its bands hold 90 % "
        "of what parameters leave open, of what else could be assumed, and of what all of that leaves out.\n\n"
        f"Mean error of the models left out: {_percent(errors.left_out)}; near memory "
        f"{_percent(errors.left_out_near_memory)}, where copying the nearest of the other models is "
        f"{_percent(facts.copying_error(facts.near_memory))} off. {within} of {len(found.left_out)} are within their "
        f"bands. As fitted to all four, {_percent(errors.fitted)} off, they are the library's values.",
        tables=(
            cells_table("milliseconds a batch, each model left out", found.left_out),
            cells_table("milliseconds a batch, fitted to all", found.cells),
            cells_table("milliseconds of stages, fitted", found.stages),
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
                directory / "batch-time.svg", bars, title="Where a batch's time goes", overwrite=overwrite
            ),
            figures.parity(directory / "parity.svg", points, title="Simulated and read", overwrite=overwrite),
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
        figures=(figures.timelines(directory / "timelines.svg", shown, title=title, overwrite=overwrite),),
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
                directory / "energy.svg",
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
        (
            each.name,
            f"{each.median:.4g}",
            f"{each.fitted(z):.4g}",
            f"{z:+.1f}",
            _interval(found, each.name),
            each.source,
        )
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
    return Section(
        title="Other assumptions",
        text="The same with something else assumed: fitted to all, and with each model left out. The second table has "
        "what each counts in the bands of a model that is left out, by its evidence from the other three.",
        tables=(structures_table(found), weights_table(found)),
    )


def structures_table(found: Reproduction) -> Table:
    header = ("assumed", "fitted", "left out", "near memory", "PMEM, worst", "stages, worst", "farthest, sigmas")
    return Table(
        header=header,
        rows=[
            (
                title,
                _percent(errors.fitted),
                _percent(errors.left_out),
                _percent(errors.left_out_near_memory),
                _percent(errors.worst_left_out_host),
                _percent(errors.worst_stage),
                f"{errors.farthest_z:+.1f}",
            )
            for title, errors in found.errors.items()
        ],
    )


def weights_table(found: Reproduction) -> Table:
    models = found.facts.models
    return Table(
        header=("assumed", *(f"without {model.upper()}" for model in models)),
        rows=[(title, *(f"{found.weights[model][title]:.0%}" for model in models)) for title in found.errors],
    )


def cells_table(title: str, cells: Sequence[Cell]) -> Table:
    return Table(
        title=title,
        header=("", "paper", "simulated", "error", "90 %", ""),
        rows=[
            (
                cell.name,
                f"{cell.paper:.2f}",
                f"{cell.ours:.2f}",
                f"{cell.error:+.1%}",
                f"{cell.low:.2f} to {cell.high:.2f}",
                "" if cell.is_within else "outside",
            )
            for cell in cells
        ],
    )


def _interval(found: Reproduction, name: str) -> str:
    low, high = found.intervals[name]
    return f"{low:.3g} to {high:.3g}"


def _percent(part: float) -> str:
    return f"{part:.1%}"


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
