"""``holdfast sim list``, ``show`` and ``copy``: what the simulator's library declares."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import JsonOption, OverwriteOption
from holdfast.cli.tables import plain_console, plain_table
from holdfast_lab.commands.simulating import FolderOption, SystemArgument, simulator_extra

if TYPE_CHECKING:
    from holdfast_lab.sim.library import Library
    from holdfast_lab.sim.model import Model


class Kind(StrEnum):
    """What a library declares."""

    devices = "devices"
    models = "models"
    systems = "systems"


def list_(folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """The systems, models and devices that there are."""
    with simulator_extra():
        from holdfast_lab.sim.scenario import read_folders

        library = read_folders(folder or [])
    if as_json:
        print(json.dumps(_plain_library(library), indent=2))  # noqa: T201
    else:
        _show_library(library)


def show(system: SystemArgument, folder: FolderOption = None, as_json: JsonOption = False) -> None:
    """A system with everything that it builds on: each value, the file that it is from, and what it overrides."""
    with simulator_extra():
        from holdfast_lab.sim.library import PACKAGED, declared_file, system_files
        from holdfast_lab.sim.resolved import grouped, lines_of, shown
        from holdfast_lab.sim.scenario import read_folders

        folders = folder or []
        library = read_folders(folders)
        is_path = system.endswith(".toml") or "/" in system
        path = Path(system) if is_path else declared_file("systems", system, folders)
        if not is_path:
            library.system(system)  # says what is wrong with it
        chain = system_files(path, (PACKAGED, *folders))
        parts = {"": lines_of(chain)}
        devices = {line.key.partition(".")[2]: line.value for line in parts[""] if line.key.startswith("devices.")}
        for role, name in devices.items():
            library.device(name)
            lines = lines_of([declared_file("devices", name, folders)])
            parts[f"{role}: {name}"] = lines
    if as_json:
        plain = {
            part: {
                line.key: {"value": line.value, "file": str(line.file), "overridden": dict(line.overridden)}
                for line in lines
            }
            for part, lines in parts.items()
        }
        print(json.dumps(plain, indent=2))  # noqa: T201
        return
    print(f"# {' <- '.join(each.stem for each in reversed(chain))}: {chain[-1]}")  # noqa: T201
    for part, lines in parts.items():
        for table, together in grouped(lines).items():
            print(f"\n[{table}]" if not part and table else f"\n# {part}" if part else "")  # noqa: T201
            for line in together:
                print(shown(line))  # noqa: T201


def copy(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="devices, models or systems.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `holdfast sim list` shows it.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE.toml", help="The file to write. Default: KIND/NAME.toml, made here."),
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Put a declaration that comes with the package where you can change it."""
    with simulator_extra():
        from holdfast.data.output import whole_file
        from holdfast_lab.sim.scenario import packaged_file

        source = packaged_file(kind.value, name)
    target = out if out is not None else Path(kind.value) / f"{name}.toml"
    if out is None:
        target.parent.mkdir(exist_ok=True)
    with whole_file(target, overwrite=overwrite) as partial:
        partial.write_bytes(source.read_bytes())
    print(f"{target}: {_use_of(kind, target, is_default=out is None)}")  # noqa: T201


def _use_of(kind: Kind, target: Path, *, is_default: bool) -> str:
    if is_default:
        return "change it, and add `--folder .` to a command"
    if kind is Kind.devices:
        return "change it, keep it in a folder's devices/, and give `--folder` that folder"
    return f"change it, and give its path in place of the {kind.value.removesuffix('s')}'s name"


def _plain_library(library: Library) -> dict[str, Any]:
    return {
        "systems": {name: {"title": each.title, "source": each.source} for name, each in library.systems.items()},
        "models": {
            name: {"batch_size": each.batch_size, "shape": _shape_words(each), "source": each.source}
            for name, each in library.models.items()
        },
        "devices": {name: {"kind": each.kind, "source": each.source} for name, each in library.devices.items()},
        "not_usable": {name: str(error) for name, error in library.broken.items()},
    }


def _show_library(library: Library) -> None:
    console = plain_console()
    systems = plain_table("system", "title", "devices", "source")
    for name, system in library.systems.items():
        systems.add_row(name, system.title, ", ".join(dict.fromkeys(system.devices.values())), system.source)
    models = plain_table("model", "shape", "source", right=("batch",))
    for name, model in library.models.items():
        models.add_row(name, _shape_words(model), model.source, f"{model.batch_size:,.0f}")
    devices = plain_table("device", "kind", "source")
    for name, device in library.devices.items():
        devices.add_row(name, device.kind, device.source)
    for table in (systems, models, devices):
        console.print(table)
        console.print()
    for error in library.broken.values():
        console.print(f"not usable: {error}")


def _shape_words(model: Model) -> str:
    """What a model is, in a line."""
    groups = [f"{each.count} tables of {each.rows:,.0f} x {each.dim}, {each.lookups:g} ids" for each in model.tables]
    if len(groups) > 2:
        rows = sum(each.count * each.rows for each in model.tables)
        groups = [f"{model.num_tables} tables of {rows:,.0f} rows in all"]
    bottom, top = "-".join(map(str, model.bottom)), "-".join(map(str, model.top))
    return f"{'; '.join(groups)}; MLPs {bottom}, {top}"
