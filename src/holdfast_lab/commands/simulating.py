"""``holdfast sim``: the simulator of training systems."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import JsonOption, OverwriteOption, add_command
from holdfast.cli.tables import plain_console, plain_table
from holdfast.errors import ConfigError

if TYPE_CHECKING:
    from holdfast_lab.sim.machine import Run
    from holdfast_lab.sim.scenario import Scenario
    from holdfast_lab.sim.sweep import Point, Variation

_EXTRA = ("simpy", "matplotlib")

app = typer.Typer(
    no_args_is_help=True,
    help="What a system would do that you do not have: time and energy of a training batch, simulated.\n\n"
    "Systems, models and devices are TOML files: see `holdfast sim list`, and change a copy (`holdfast sim copy`).",
)

SystemArgument = Annotated[str, typer.Argument(metavar="SYSTEM", help="A system: a name, or a path to a TOML file.")]
ModelOption = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", help="A model: a name, or a path to a TOML file, also that of a run."),
]
SettingOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Another value, as in --set devices.pcie.bandwidth_bytes_per_s=30e9. Short for the chosen ones: "
        "model.FIELD, system.FIELD, stages.STAGE.FIELD. May be repeated.",
    ),
]
FolderOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--folder",
        metavar="DIR",
        help="Its devices/, models/ and systems/ come before those of the package. May be repeated.",
    ),
]
ValuesOption = Annotated[
    Path | None,
    typer.Option("--values", metavar="FILE.toml", help="Values that `holdfast sim calibrate -o FILE.toml` has fitted."),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="PROFILE.json",
        help="What `holdfast profile` has counted of the run that is the model: its ids instead of Zipf's law.",
    ),
]
ReplayOption = Annotated[
    int | None,
    typer.Option(
        "--replay",
        metavar="BATCHES",
        min=1,
        help="Replay so many batches of the run that is the model: its ids, as they come, instead of Zipf's law.",
    ),
]
BatchesOption = Annotated[
    int,
    typer.Option("--batches", min=4, help="Batches to run, and more where the schedule is not steady by then."),
]


def run(
    system: SystemArgument,
    model: ModelOption,
    settings: SettingOption = None,
    values: ValuesOption = None,
    folder: FolderOption = None,
    batches: BatchesOption = 6,
    profile: ProfileOption = None,
    replay: ReplayOption = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write all stages as a trace for ui.perfetto.dev.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Write index.html there, and its figures.")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate a system: what a batch takes in steady state, and where its time and energy go.

    `exposed` is a stage's share of the batch: the time in which nothing runs that comes before it in this order:
    top MLP, bottom MLP forward and backward, update, lookup, cache, transfers, row log, MLP log.
    """
    with simulator_extra():
        scenario = _scenario(system, model, settings, folder, values, profile, replay)
        from holdfast.data.output import check_output
        from holdfast_lab.sim.chrome_trace import write_trace

        if trace is not None:
            check_output(trace, overwrite=overwrite)
        found = scenario.run(batches)
    if trace is not None:
        write_trace(trace, found, scenario.declared, overwrite=overwrite)
    if out is not None:
        with simulator_extra():
            from holdfast_lab.sim.report.run_page import write_run

            told = _plain_run(found, scenario)
            page = write_run(out, found, scenario.declared, told, _summary(found, scenario, told), overwrite=overwrite)
        print(page)  # noqa: T201
    elif as_json:
        print(json.dumps(_plain_run(found, scenario), indent=2))  # noqa: T201
    else:
        _show_run(found, scenario)


def sweep(
    system: SystemArgument,
    model: ModelOption,
    vary: Annotated[
        str,
        typer.Option(
            metavar="KEY=VALUES",
            help="What to vary, a KEY as of --set: KEY=a,b,c, or KEY=lo:hi:n, n values evenly spaced by their ratio.",
        ),
    ],
    against: Annotated[
        list[str] | None, typer.Option(metavar="SYSTEM", help="Another system beside it. May be repeated.")
    ] = None,
    settings: SettingOption = None,
    values: ValuesOption = None,
    folder: FolderOption = None,
    batches: BatchesOption = 6,
    profile: ProfileOption = None,
    replay: ReplayOption = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where to write sweep.csv and sweep.png.")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Vary one value, and see what becomes of a batch, in one system or in several side by side."""
    with simulator_extra():
        from holdfast.data.output import check_output
        from holdfast.train.observe import counting
        from holdfast_lab.sim.sweep import parse_variation, table_of, write_sweep
        from holdfast_lab.sim.sweep import sweep as vary_value

        variation = parse_variation(vary)
        scenarios = _by_name(
            [system, *(against or [])],
            lambda one: _scenario(one, model, settings, folder, values, profile, replay),
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            for name in ("sweep.csv", "sweep.png"):
                check_output(out / name, overwrite=overwrite)
        with counting("simulating", len(variation.values) * len(scenarios)) as on_run:
            points = vary_value(scenarios, variation, batches=batches, on_run=lambda: on_run(1))
        if out is not None:
            title = f"A batch of {Path(model).stem} over {variation.key}"
            write_sweep(out / "sweep.png", points, variation, title=title, overwrite=overwrite)
    if as_json:
        table = table_of(points, variation)
        print(json.dumps([dict(zip(table.header, row, strict=True)) for row in table.rows], indent=2))  # noqa: T201
    else:
        _show_sweep(points, variation)


@contextmanager
def simulator_extra() -> Iterator[None]:
    """What the simulator needs and the rest does not is named where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise ConfigError(f"the simulator needs {missing}: pip install 'holdfast[sim]'") from error


def _scenario(
    system: str,
    model: str,
    settings: list[str] | None,
    folder: list[Path] | None,
    values: Path | None,
    profile: Path | None,
    replay: int | None,
) -> Scenario:
    from holdfast_lab.sim.scenario import read_scenario

    for setting in settings or []:
        if "=" not in setting:
            raise typer.BadParameter(f"{setting!r} is no KEY=VALUE", param_hint="--set")
    return read_scenario(system, model, settings or [], folder or [], values, profile, replay)


def _by_name(systems: list[str], read: Callable[[str], Scenario]) -> dict[str, Scenario]:
    """By the system's name, or by what was given where two have the same name."""
    given = list(dict.fromkeys(systems))
    found = [read(system) for system in given]
    names = [scenario.system for scenario in found]
    return {
        name if names.count(name) == 1 else text: scenario
        for text, name, scenario in zip(given, names, found, strict=True)
    }


def _plain_run(found: Run, scenario: Scenario) -> dict[str, Any]:
    from holdfast.files.config import to_plain
    from holdfast_lab.sim.model import workload_of
    from holdfast_lab.sim.report.exposure import WAITING, exposed_s

    system, model = scenario.declared, scenario.library.model(scenario.model)
    exposed = exposed_s(found, system)
    return {
        "system": scenario.system,
        "title": found.system,
        "model": scenario.model,
        "batch_ms": found.batch_s * 1e3,
        "samples_per_s": model.batch_size / found.batch_s,
        "joules_per_batch": found.joules_per_batch,
        "waiting_ms": exposed[WAITING] * 1e3,
        "stages": {
            name: {
                "does": stage.does,
                "on": list(stage.on),
                "ms": found.stage_s[name] * 1e3,
                "exposed_ms": exposed[name] * 1e3,
            }
            for name, stage in system.active.items()
        },
        "devices": {
            role: {
                "device": device,
                "busy_ms": found.busy_s[role] * 1e3,
                "busy_share": _busy_share(found, scenario, role),
                "joules_per_batch": found.joules_by_role[role],
            }
            for role, device in system.devices.items()
        },
        "workload": to_plain(workload_of(model)),
    }


def _busy_share(found: Run, scenario: Scenario, role: str) -> float:
    device = scenario.library.device(scenario.declared.devices[role])
    return found.busy_s[role] / device.parallelism / found.batch_s


def _show_run(found: Run, scenario: Scenario) -> None:
    from holdfast_lab.sim.report.content import timeline_of
    from holdfast_lab.sim.report.text import stage_letters, timeline_lines

    console = plain_console()
    plain = _plain_run(found, scenario)
    console.print(_summary(found, scenario, plain))
    letters = stage_letters(list(plain["stages"]))
    stages = plain_table("", "stage", "on", right=("ms", "exposed ms", "of the batch"))
    for name, stage in plain["stages"].items():
        share = f"{stage['exposed_ms'] / plain['batch_ms']:.1%}"
        on = ", ".join(stage["on"])
        stages.add_row(letters[name], name, on, f"{stage['ms']:.3f}", f"{stage['exposed_ms']:.3f}", share)
    if plain["waiting_ms"] > 0:
        share = f"{plain['waiting_ms'] / plain['batch_ms']:.1%}"
        stages.add_row("", "nothing runs", "", "", f"{plain['waiting_ms']:.3f}", share)
    devices = plain_table("role", "device", right=("busy ms", "of the time", "J per batch"))
    for role, device in plain["devices"].items():
        busy = (f"{device['busy_ms']:.3f}", f"{device['busy_share']:.1%}", f"{device['joules_per_batch']:.3f}")
        devices.add_row(role, device["device"], *busy)
    timeline = timeline_of(found, scenario.declared, batches=1)
    for part in (stages, devices):
        console.print()
        console.print(part)
    console.print("\nOne batch; small letters are stages of the batches before and after it.")
    for line in timeline_lines(timeline, letters, plain["batch_ms"]):
        console.print(line)


def _summary(found: Run, scenario: Scenario, plain: dict[str, Any]) -> str:
    samples = scenario.library.model(scenario.model).batch_size
    return (
        f"{found.system} with {scenario.model}: {plain['batch_ms']:.3f} ms per batch of {samples:,.0f} samples "
        f"({plain['samples_per_s']:,.0f} samples/s), {plain['joules_per_batch']:.3f} J."
    )


def _show_sweep(points: list[Point], variation: Variation) -> None:
    console = plain_console()
    names = list(dict.fromkeys(point.scenario for point in points))
    columns = [column for name in names for column in (f"{name} ms", f"{name} J")]
    table = plain_table(right=(variation.key, *columns, *(f"{name} x" for name in names[1:])))
    by_value: dict[str, list[Run]] = {}
    for point in points:
        value = point.value if isinstance(point.value, (str, list)) else f"{point.value:g}"
        by_value.setdefault(str(value), []).append(point.run)
    for value, runs in by_value.items():
        cells = [cell for run in runs for cell in (f"{run.batch_s * 1e3:.3f}", f"{run.joules_per_batch:.3f}")]
        ratios = [f"{run.batch_s / runs[0].batch_s:.3f}" for run in runs[1:]]
        table.add_row(value, *cells, *ratios)
    console.print(table)
    if len(names) > 1:
        console.print(f"x: the time of a batch, over that of {names[0]}.")


add_command(app, "run", run)
add_command(app, "sweep", sweep)
