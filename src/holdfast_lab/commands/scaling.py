"""``holdfast sim scale``, ``nodes`` and ``failures``: more of everything, and what breaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import JsonOption, OverwriteOption
from holdfast.cli.tables import plain_console, plain_table
from holdfast.errors import ConfigError
from holdfast_lab.commands.simulating import FolderOption, ModelOption, SettingOption, simulator_extra

if TYPE_CHECKING:
    from holdfast_lab.sim.scale import ScaleRun

_DAY_S = 86_400.0
_MOST_DEVICES = 100_000  # of a kind: each is an object of the simulation
_MOST_S = 1e9
_MOST_FAILURES = 1_000_000  # of a run of the simulation
OutOption = Annotated[Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where to write PNG and CSV.")]


def scale(
    model: ModelOption,
    trainers: Annotated[
        str, typer.Option(metavar="A,B,C or LO:HI:N", help="How many trainers; thousands take seconds each.")
    ] = "1:1024:6",
    expanders: Annotated[
        int, typer.Option(min=1, max=_MOST_DEVICES, help="Memory expanders, however many trainers there are.")
    ] = 64,
    per_trainer: Annotated[
        float | None,
        typer.Option("--expanders-per-trainer", min=0, max=_MOST_DEVICES, help="As many for each trainer, instead."),
    ] = None,
    gpu: Annotated[str, typer.Option(metavar="DEVICE", help="Of a trainer.")] = "a100",
    memory: Annotated[str, typer.Option(metavar="DEVICE", help="Of an expander.")] = "cxl-expander",
    spines: Annotated[int, typer.Option(min=1, help="Spine switches, with a link to every leaf each.")] = 8,
    leaf_link: Annotated[
        float, typer.Option("--leaf-link-bytes-per-s", min=1, help="Of each link between leaf and spine.")
    ] = 100e9,
    devices_per_leaf: Annotated[int, typer.Option(min=1, help="Trainers and expanders on a leaf switch.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    settings: SettingOption = None,
    folder: FolderOption = None,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Many trainers share memory expanders behind leaf and spine switches: what saturates first, and when.

    Lookups and updates are done in the expanders; ids, pooled vectors and gradients cross the switches.
    """
    with simulator_extra():
        from holdfast.train.observe import counting
        from holdfast_lab.sim.device import Compute, Memory
        from holdfast_lab.sim.fabric import Fabric, check_expanders, load_of
        from holdfast_lab.sim.model import workload_of
        from holdfast_lab.sim.scale import expanders_of, sweep_trainers
        from holdfast_lab.sim.scenario import read_scenario

        scenario = read_scenario("cxl", model, settings or [], folder or [])
        processor, module = scenario.library.device(gpu), scenario.library.device(memory)
        if not isinstance(processor, Compute) or not isinstance(module, Memory):
            raise ConfigError(f"--gpu {gpu} has to be a processor, and --memory {memory} a memory")
        counts = [int(value) for value in _values("--trainers", trainers, most=_MOST_DEVICES, are_whole=True)]
        workload = workload_of(scenario.library.model(scenario.model))
        load = load_of(workload, processor, module)
        if per_trainer is None:
            check_expanders(expanders, module, workload, memory)
        fabric = Fabric(
            trainers=1,
            expanders=expanders,
            spines=spines,
            leaf_link_bytes_per_s=leaf_link,
            devices_per_leaf=devices_per_leaf,
        )
        runs = []
        with counting("simulating", len(counts)) as on_run:
            for count in counts:
                if per_trainer is not None:
                    check_expanders(expanders_of(count, per_trainer), module, workload, memory)
                runs += sweep_trainers(fabric, load, [count], expanders_per_trainer=per_trainer, seed=seed)
                on_run(1)
        if out is not None:
            _draw_scale(out, runs, scenario.model, overwrite=overwrite)
    if as_json:
        print(json.dumps([_plain_scale(each) for each in runs], indent=2))  # noqa: T201
    else:
        _show_scale(runs)


def nodes(
    model: ModelOption,
    tiers_path: Annotated[
        Path, typer.Option("--tiers", metavar="TIERS.toml", help="The memory tiers of a node, as of `holdfast plan`.")
    ],
    most_batch_ms: Annotated[
        float | None, typer.Option(min=1e-6, help="Nodes are added until memory takes no longer for a batch.")
    ] = None,
    settings: SettingOption = None,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """How many nodes a model takes with HBM and DRAM alone, and with all tiers of a node: MTrainS' question."""
    with simulator_extra():
        from holdfast_lab.placement.tiers import read_tiers
        from holdfast_lab.sim.scenario import read_scenario
        from holdfast_lab.sim.tiering import compare

        scenario = read_scenario("mtrains", model, settings or [], folder or [])
        limit_s = float("inf") if most_batch_ms is None else most_batch_ms * 1e-3
        found = compare(scenario.library.model(scenario.model), read_tiers(tiers_path).tiers, most_batch_s=limit_s)
    named = {"HBM and DRAM": found.fast_only, "all tiers": found.all_tiers}
    if as_json:
        plain = {
            name: {"nodes": each.nodes, "batch_ms": each.batch_s * 1e3, "limited_by": each.limiting_stage}
            for name, each in named.items()
        }
        print(json.dumps({**plain, "times_fewer": found.times_fewer}, indent=2))  # noqa: T201
        return
    table = plain_table("memory", "limited by", right=("nodes", "ms of memory a batch"))
    for name, each in named.items():
        table.add_row(name, each.limiting_stage, f"{each.nodes:,}", f"{each.batch_s * 1e3:.3f}")
    console = plain_console()
    console.print(table)
    console.print(f"{found.times_fewer:.1f} times fewer nodes with all tiers.")


def failures(
    batch_ms: Annotated[
        float, typer.Option(min=1e-6, max=_MOST_S, help="A batch, without what makes it durable.")
    ] = 30.0,
    overhead_ms: Annotated[float, typer.Option(min=0, max=_MOST_S, help="What durability costs a batch.")] = 1.0,
    recovery_s: Annotated[
        float, typer.Option(min=0, max=_MOST_S, help="Until training goes on, with every batch durable.")
    ] = 30.0,
    checkpoint_s: Annotated[
        float, typer.Option(min=1e-6, max=_MOST_S, help="What a full checkpoint stops training for.")
    ] = 60.0,
    checkpoint_recovery_s: Annotated[
        float, typer.Option(min=0, max=_MOST_S, help="Until training goes on from one.")
    ] = 400.0,
    interval_s: Annotated[
        float | None,
        typer.Option(min=1, max=_MOST_S, help="Between checkpoints. Default: the best for each rate (Daly)."),
    ] = None,
    per_day: Annotated[
        str, typer.Option(metavar="A,B,C or LO:HI:N", help="Failures a day, of all devices together.")
    ] = "0.1:100.0:7",
    days: Annotated[
        float, typer.Option(min=1, max=_MOST_FAILURES, help="Days that are simulated beside the closed form.")
    ] = 100.0,
    seed: Annotated[int, typer.Option(min=0, help="Of what is drawn.")] = 0,
    out: OutOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Useful work a day, by how often something fails: every batch durable, beside periodic full checkpoints.

    The closed form (Young, Daly), and a simulation of so many days with its 95% interval.
    """
    with simulator_extra():
        from holdfast_lab.sim.failures import at_best, durable_batches, periodic_checkpoints, simulate_failures
        from holdfast_lab.sim.failures import useful_s_per_day as closed_form

        rates = _values("--per-day", per_day, most=_MOST_FAILURES / days)
        durable = durable_batches(batch_s=batch_ms * 1e-3, overhead_s=overhead_ms * 1e-3, recovery_s=recovery_s)
        rows: list[dict[str, float | str]] = []
        for rate in rates:
            mtbf_s = _DAY_S / rate
            periodic = periodic_checkpoints(
                checkpoint_s=checkpoint_s, recovery_s=checkpoint_recovery_s, mtbf_s=mtbf_s, interval_s=interval_s
            )
            if interval_s is None:
                periodic = at_best(periodic, mtbf_s)
            for scheme in (durable, periodic):
                drawn = simulate_failures(scheme, mtbf_s, days=days, seed=seed)
                rows.append(
                    {
                        "failures_per_day": rate,
                        "scheme": scheme.name,
                        "interval_s": scheme.useful_s,
                        "useful_share": closed_form(scheme, mtbf_s) / _DAY_S,
                        "simulated_share": drawn.useful_s_per_day / _DAY_S,
                        "half_width": drawn.half_width_s / _DAY_S,
                    }
                )
        if out is not None:
            _draw_failures(out, rows, overwrite=overwrite)
    if as_json:
        print(json.dumps(rows, indent=2))  # noqa: T201
    else:
        _show_failures(rows)


def _values(option: str, text: str, *, most: float, are_whole: bool = False) -> list[float]:
    """What an option A,B,C or LO:HI:N says. Raises ConfigError that names it."""
    from holdfast_lab.sim.sweep import parse_variation

    values: list[float] = []
    for value in parse_variation(f"{option}={text}").values:
        is_number = isinstance(value, int if are_whole else (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value <= most:
            raise ConfigError(
                f"{option} {text}: {value} is no {'whole ' * are_whole}number above 0 and up to {most:,.6g}"
            )
        values.append(float(value))
    return values


def _show_failures(rows: list[dict[str, float | str]]) -> None:
    table = plain_table("scheme", right=("failures a day", "interval s", "useful", "simulated", "+-"))
    for row in rows:
        shares = [f"{row[name]:.3%}" for name in ("useful_share", "simulated_share", "half_width")]
        table.add_row(str(row["scheme"]), f"{row['failures_per_day']:.3g}", f"{row['interval_s']:,.4g}", *shares)
    plain_console().print(table)


def _draw_failures(directory: Path, rows: list[dict[str, float | str]], *, overwrite: bool) -> None:
    from holdfast_lab.sim.report.content import Line
    from holdfast_lab.sim.report.figures import lines

    directory.mkdir(parents=True, exist_ok=True)
    shown = []
    for scheme in dict.fromkeys(str(row["scheme"]) for row in rows):
        of_scheme = [row for row in rows if row["scheme"] == scheme]
        simulated = [float(row["simulated_share"]) for row in of_scheme]
        widths = [float(row["half_width"]) for row in of_scheme]
        shown.append(
            Line(
                label=scheme,
                x=[float(row["failures_per_day"]) for row in of_scheme],
                y=[float(row["useful_share"]) for row in of_scheme],
                low=[share - width for share, width in zip(simulated, widths, strict=True)],
                high=[share + width for share, width in zip(simulated, widths, strict=True)],
            )
        )
    lines(
        directory / "failures.png",
        shown,
        title="Useful part of a day; bands: simulated",
        x_name="failures a day",
        y_name="useful part",
        overwrite=overwrite,
    )


def _plain_scale(run: ScaleRun) -> dict[str, object]:
    return {
        "trainers": run.fabric.trainers,
        "expanders": run.fabric.expanders,
        "batches_per_s": run.batches_per_s,
        "bound_batches_per_s": run.bound_batches_per_s,
        "saturates": run.saturates,
        "mean_latency_ms": run.mean_latency_s * 1e3,
        "p99_latency_ms": run.p99_latency_s * 1e3,
        "utilisation": run.utilisation,
    }


def _show_scale(runs: list[ScaleRun]) -> None:
    levels = list(runs[0].utilisation)
    table = plain_table(
        "bound by",
        right=(
            "trainers",
            "expanders",
            "batches/s",
            "bound",
            "lookup ms",
            "p99 ms",
            *(f"{each} busy" for each in levels),
        ),
    )
    for run in runs:
        table.add_row(
            run.saturates,
            f"{run.fabric.trainers:,}",
            f"{run.fabric.expanders:,}",
            f"{run.batches_per_s:,.0f}",
            f"{run.bound_batches_per_s:,.0f}",
            f"{run.mean_latency_s * 1e3:.3f}",
            f"{run.p99_latency_s * 1e3:.3f}",
            *(f"{run.utilisation[level]:.0%}" for level in levels),
        )
    plain_console().print(table)


def _draw_scale(directory: Path, runs: list[ScaleRun], model: str, *, overwrite: bool) -> None:
    from holdfast_lab.sim.report.content import Line
    from holdfast_lab.sim.report.figures import lines

    directory.mkdir(parents=True, exist_ok=True)
    x = [float(run.fabric.trainers) for run in runs]
    lines(
        directory / "scale.png",
        [
            Line(label="simulated", x=x, y=[run.batches_per_s for run in runs]),
            Line(label="bound", x=x, y=[run.bound_batches_per_s for run in runs]),
        ],
        title=f"{model}: batches a second of all trainers",
        x_name="trainers",
        y_name="batches a second",
        overwrite=overwrite,
    )
    lines(
        directory / "latency.png",
        [
            Line(label="mean", x=x, y=[run.mean_latency_s * 1e3 for run in runs]),
            Line(label="99 % are below", x=x, y=[run.p99_latency_s * 1e3 for run in runs]),
        ],
        title=f"{model}: what a batch waits for its lookups",
        x_name="trainers",
        y_name="ms",
        overwrite=overwrite,
    )
