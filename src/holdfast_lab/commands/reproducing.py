"""``holdfast sim paper``, ``calibrate`` and ``sensitivity``: the papers' evaluations, from the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import JsonOption, OverwriteOption
from holdfast.cli.tables import plain_console, plain_table
from holdfast_lab.commands.simulating import FolderOption, ValuesOption, simulator_extra

if TYPE_CHECKING:
    from holdfast_lab.sim.calibration import Fit
    from holdfast_lab.sim.facts import Facts
    from holdfast_lab.sim.paper import Reproduction

OutOption = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where to write; made if it is not there.")]
PAGE = "index.html"


def paper(
    out: OutOption,
    draws: Annotated[int, typer.Option(min=10, help="Of the parameters that agree with what is fitted.")] = 160,
    seed: Annotated[int, typer.Option(min=0, help="Of the draws.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="That simulate side by side.")] = 2,
    folder: FolderOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Reproduce three papers. TrainingCXL's evaluation: fit its times, leave each model out in turn, and write all side
    by side. ScratchPipe's system and MTrainS's nodes: over what their workloads and targets may vary.

    Figures (SVG and CSV) and index.html, one page that needs no other file. Takes about a minute on two cores.
    """
    with simulator_extra():
        from concurrent.futures import ProcessPoolExecutor

        from holdfast.data.output import check_output
        from holdfast.train.observe import counting
        from holdfast_lab.sim.facts import read_facts
        from holdfast_lab.sim.paper import num_parts, reproduce
        from holdfast_lab.sim.report import mtrains, scratchpipe
        from holdfast_lab.sim.report.reproduction import write_paper
        from holdfast_lab.sim.scenario import read_folders

        library, facts = read_folders(folder or []), read_facts()
        out.mkdir(parents=True, exist_ok=True)
        check_output(out / PAGE, overwrite=overwrite)
        # Beside the fit, which is one process's.
        with ProcessPoolExecutor(1) as aside, counting("simulating", num_parts(facts)) as on_part:
            tables = (scratchpipe.sweeps_table, mtrains.targets_table, mtrains.nodes_table, mtrains.models_table)
            awaited = [aside.submit(table, library) for table in tables]
            found = reproduce(library, facts, draws=draws, seed=seed, processes=processes, on_part=lambda: on_part(1))
            sweeps, targets, nodes, models = (each.result() for each in awaited)
        others = (
            scratchpipe.section(out, sweeps, overwrite=overwrite),
            mtrains.section(out, targets, nodes, models, overwrite=overwrite),
        )
        page = write_paper(out, found, library, others, overwrite=overwrite)
    for rule, ratios in (("", found.ratios), *((f", where {each.rule}", each.saved) for each in found.energy)):
        for ratio in ratios:
            band = f"90%: {ratio.low:.2f} to {ratio.high:.2f}"
            print(f"{ratio.name}{rule}: {ratio.ours:.2f} ({band}), the paper {ratio.paper:.2f}")  # noqa: T201
    print(f"{page}: mean error {_errors_words(found)}")  # noqa: T201


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE.toml", help="Where to write the values, for --values of others."),
    ] = None,
    leave_out: Annotated[
        list[str] | None,
        typer.Option("--leave-out", metavar="MODEL", help="A model of the paper's not to fit. May be repeated."),
    ] = None,
    folder: FolderOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Fit what TrainingCXL leaves open to its times, and show the values with their priors.

    Without --leave-out these are the values that the package has.
    """
    with simulator_extra():
        from holdfast.data.output import check_output
        from holdfast_lab.sim.calibration import fit
        from holdfast_lab.sim.facts import read_facts, targets_of
        from holdfast_lab.sim.scenario import read_folders

        facts = read_facts()
        if out is not None:
            check_output(out, overwrite=overwrite)
        left_out = leave_out or []
        for model in left_out:
            if model not in facts.models:
                raise typer.BadParameter(f"{model!r} is none of {', '.join(facts.models)}", param_hint="--leave-out")
        fitted = [model for model in facts.models if model not in left_out]
        if not fitted:
            raise typer.BadParameter("nothing is left to fit", param_hint="--leave-out")
        found = fit(read_folders(folder or []), facts.free, targets_of(facts, fitted))
        errors = _plain_errors(found, facts, fitted, left_out)
    if out is not None:
        _write_values(out, found, overwrite=overwrite)
    if as_json:
        print(json.dumps(_plain_fit(found, errors), indent=2))  # noqa: T201
        return
    console = plain_console()
    table = plain_table("parameter", "key", right=("prior", "fitted", "sigmas"))
    for each, z in zip(found.free, found.z, strict=True):
        numbers = (f"{each.median:.4g}", f"{each.fitted(z):.4g}", f"{z:+.2f}")
        for number, key in enumerate(each.keys):
            table.add_row(each.name if number == 0 else "", key, *numbers)
    console.print(table)
    of_left_out = f", {errors['left_out']:.1%} of {' and '.join(left_out)}" if left_out else ""
    console.print(
        f"\nMean error {errors['fitted']:.1%} of what is fitted{of_left_out}; worst stage {errors['worst_stage']:.1%}."
    )


def sensitivity(
    out: OutOption,
    values: ValuesOption = None,
    folder: FolderOption = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Draw what TrainingCXL's speedup depends on: one thing at a time, everything else as it was fitted."""
    with simulator_extra():
        from holdfast.data.output import check_output
        from holdfast_lab.sim.facts import read_facts
        from holdfast_lab.sim.library import read_tree
        from holdfast_lab.sim.report.page import write_html
        from holdfast_lab.sim.report.reproduction import sensitivity_section
        from holdfast_lab.sim.scenario import read_folders

        facts = read_facts()
        out.mkdir(parents=True, exist_ok=True)
        check_output(out / PAGE, overwrite=overwrite)
        library = read_folders(folder or [])
        if values is not None:
            library = library.changed(read_tree(values))
        section = sensitivity_section(out, library, facts.models, overwrite=overwrite)
        write_html(out / PAGE, section.title, [section], overwrite=overwrite)
    console = plain_console()
    for shown in section.tables:
        table = plain_table(shown.header[0], right=shown.header[1:])
        for row in shown.rows:
            table.add_row(*map(str, row))
        console.print(f"{shown.title}:")
        console.print(table)
        console.print()
    print(out / PAGE)  # noqa: T201


def _write_values(path: Path, found: Fit, *, overwrite: bool) -> None:
    from holdfast.data.output import whole_file

    lines = [
        "# Fitted to figures of TrainingCXL (holdfast sim calibrate); the sigmas are distances from the priors.",
        "",
    ]
    for each, z in zip(found.free, found.z, strict=True):
        lines.append(f"# {each.name}: {z:+.2f} sigmas")
        lines += [f"{json.dumps(key)} = {each.fitted(z)!r}" for key in each.keys]
    with whole_file(path, overwrite=overwrite) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plain_errors(found: Fit, facts: Facts, fitted: list[str], left_out: list[str]) -> dict[str, float]:
    from holdfast_lab.sim.paper import mean_error, worst_stage_error

    errors = {"fitted": mean_error(facts, found.library, fitted)}
    if left_out:
        errors["left_out"] = mean_error(facts, found.library, left_out)
    return {**errors, "worst_stage": worst_stage_error(facts, found.library)}


def _plain_fit(found: Fit, errors: dict[str, float]) -> dict[str, object]:
    return {
        "parameters": {
            each.name: {"keys": list(each.keys), "median": each.median, "value": each.fitted(z), "sigmas": z}
            for each, z in zip(found.free, found.z, strict=True)
        },
        "errors": errors,
    }


def _errors_words(found: Reproduction) -> str:
    errors = found.own_errors
    return (
        f"{errors.left_out:.1%} of a model that is left out ({errors.left_out_near_memory:.1%} near memory), "
        f"{sum(cell.is_within for cell in found.left_out)} of {len(found.left_out)} within their bands; "
        f"{errors.fitted:.1%} of what is fitted, worst stage {errors.worst_stage:.1%}"
    )
