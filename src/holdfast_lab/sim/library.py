"""The declarations of devices, models and systems: TOML files that come with the package, and the user's own.

A name is that of a file without `.toml`; a path to a file does as well. A file in a folder of the user's hides the
package's file of the same name.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from holdfast.errors import ConfigError
from holdfast.files.config import read_config, read_layers, read_value
from holdfast_lab.sim.capacity import check_capacity
from holdfast_lab.sim.device import Compute, Device, Fabric, Link, Memory, Processor
from holdfast_lab.sim.machine import DEFAULT_BATCHES, Run, simulate
from holdfast_lab.sim.model import Model, workload_of
from holdfast_lab.sim.sharding import sharded
from holdfast_lab.sim.system import System

PACKAGED = Path(__file__).with_name("library")

_OF_TABLES = ("rows", "lookups", "dim")

T = TypeVar("T")


@dataclass(frozen=True)
class _DeviceFile:
    device: Compute | Memory | Link | Processor | Fabric


@dataclass(frozen=True)
class Library:
    """Everything that is declared, by kind and name. broken: "devices.NAME" and so on, what is wrong with files that
    cannot be read; whoever asks for one of these is told, and nobody else."""

    devices: Mapping[str, Device]
    models: Mapping[str, Model]
    systems: Mapping[str, System]
    broken: Mapping[str, ConfigError] = field(default_factory=dict)

    def model(self, name: str) -> Model:
        self._check("models", name)
        return _find(self.models, name, "model")

    def system(self, name: str) -> System:
        self._check("systems", name)
        return _find(self.systems, name, "system")

    def device(self, name: str) -> Device:
        self._check("devices", name)
        return _find(self.devices, name, "device")

    def _check(self, kind: str, name: str) -> None:
        if (error := self.broken.get(f"{kind}.{name}")) is not None:
            raise error

    def value(self, key: str) -> float:
        """The number at "devices.NAME.FIELD", "models.NAME.FIELD" or "systems.NAME.stages.STAGE.FIELD", as `changed`
        writes it; of a model's tables, and of "systems.*", that of the first. Raises ConfigError."""
        kind, _, rest = key.partition(".")
        name, _, field = rest.partition(".")
        declared: Any
        if kind == "systems":
            _, stage, field = field.rsplit(".", 2)
            having = _systems_having(self.systems, f"stages.{stage}", key) if name == "*" else [name]
            declared = _find(self.system(having[0]).stages, stage, "stage", key)
        else:
            declared = self.device(name) if kind == "devices" else self.model(name)
        if kind == "models" and field in _OF_TABLES:
            declared = declared.tables[0]
        value = getattr(declared, field, None)
        if not isinstance(value, (int, float)):
            raise ConfigError(f"{key}: there is no number there")
        return float(value)

    def changed(self, values: Mapping[str, Any]) -> Library:
        """With other values: "devices.NAME.FIELD", "models.NAME.FIELD", "models.*.FIELD" for all models,
        "systems.NAME.stages.STAGE.FIELD", "systems.*.stages.STAGE.FIELD" for all systems that have the stage,
        "systems.NAME.cache.FIELD" likewise. Of a model's tables, "rows" is a field too. Raises ConfigError."""
        devices, models, systems = dict(self.devices), dict(self.models), dict(self.systems)
        for key, value in values.items():
            kind, _, rest = key.partition(".")
            name, _, field = rest.partition(".")
            self._check(kind, name)
            if kind == "devices":
                devices[name] = _replaced(_find(devices, name, "device", key), field, value, key)
            elif kind == "models":
                for each in models if name == "*" else [name]:
                    models[each] = _model_with(_find(models, each, "model", key), field, value, key)
            elif kind == "systems":
                having = _systems_having(systems, field, key) if name == "*" else [name]
                for each in having:
                    systems[each] = _system_with(_find(systems, each, "system", key), field, value, key)
            else:
                raise ConfigError(f"{key}: it begins with none of devices, models, systems")
        return Library(devices, models, systems, self.broken)

    def run(self, system: str | System, model: str | Model, *, batches: int = DEFAULT_BATCHES) -> Run:
        """The simulated system. Raises ConfigError, and DoesNotFit where rows do not fit where it keeps them."""
        found = self.system(system) if isinstance(system, str) else system
        of_model = self.model(model) if isinstance(model, str) else model
        devices = {role: self.device(name) for role, name in found.devices.items()}
        workload = sharded(workload_of(of_model), of_model, found, devices)
        check_capacity(found, devices, workload)
        missed_rows = None
        if found.cache is not None:
            from holdfast_lab.sim.caches import missed_rows_per_batch

            missed_rows = missed_rows_per_batch(found.cache, of_model)
        try:
            return simulate(found, devices, workload, batches=batches, missed_rows=missed_rows)
        except ValueError as error:
            raise ConfigError(f"system {found.title!r}: {error}") from error


def read_library(folders: Sequence[Path] = ()) -> Library:
    """The package's declarations, and those in `devices`, `models` and `systems` of the user's folders on top. A file
    that is wrong is kept as such: its ConfigError, which names file and key, is raised where it is asked for."""
    roots = [PACKAGED, *folders]
    broken: dict[str, ConfigError] = {}

    def declared(kind: str, read: Callable[[Path], T]) -> dict[str, T]:
        found = {}
        for name, path in _files(roots, kind).items():
            try:
                found[name] = read(path)
            except ConfigError as error:
                broken[f"{kind}.{name}"] = error
        return found

    return Library(
        devices=declared("devices", read_device),
        models=declared("models", read_model),
        systems=declared("systems", lambda path: read_system(path, roots)),
        broken=broken,
    )


def read_device(path: Path) -> Device:
    return read_config(_DeviceFile, path).device


def read_model(path: Path) -> Model:
    return read_config(Model, path)


def read_system(path: Path, roots: Iterable[Path] = (PACKAGED,)) -> System:
    """With everything that its base says, and its base's base."""
    return read_layers(System, system_files(path, roots))


def system_files(path: Path, roots: Iterable[Path] = (PACKAGED,)) -> list[Path]:
    """What a system is made of: its file, last, after those of the systems that it builds on. Raises ConfigError."""
    known = _files(roots, "systems")
    chain = [path]
    while (base := _base_of(chain[0])) is not None:
        beside = path.with_name(f"{base}.toml")
        below = beside if beside.exists() else known.get(base)
        if below is None:
            raise ConfigError(f"{chain[0]}: base: there is no system {base!r} to build on; {nearest(base, known)}")
        if below in chain:
            circle = " on ".join(each.stem for each in [*reversed(chain), below])
            raise ConfigError(f"{chain[0]}: base: systems build on each other: {circle}")
        chain.insert(0, below)
    return chain


def read_tree(path: Path) -> dict[str, Any]:
    """A TOML file as it stands. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _base_of(path: Path) -> str | None:
    base = read_tree(path).get("base")
    return base if isinstance(base, str) else None


def declared_file(kind: str, name: str, folders: Sequence[Path] = ()) -> Path:
    """Of the package or the user's folders. Raises ConfigError."""
    files = _files([PACKAGED, *folders], kind)
    return _find(files, name, kind.removesuffix("s"))


def _files(roots: Iterable[Path], kind: str) -> dict[str, Path]:
    return {path.stem: path for root in roots for path in sorted((root / kind).glob("*.toml"))}


def _find(table: Mapping[str, T], name: str, what: str, key: str = "") -> T:
    if name not in table:
        raise ConfigError(f"{key}{': ' if key else ''}there is no {what} {name!r}; {nearest(name, table)}")
    return table[name]


def nearest(name: str, names: Iterable[str]) -> str:
    """For messages: the name that was meant, or all that there are."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(names))}"


def _replaced(declared: T, field: str, value: Any, key: str) -> T:
    hints = _hints(type(declared))  # type: ignore[arg-type]
    if field not in hints:
        raise ConfigError(f"{key}: there is no {field!r}; {nearest(field, hints)}")
    plain = value.item() if isinstance(value, np.generic) else value
    return _rebuilt(declared, key, **{field: read_value(hints[field], plain, key)})


def _rebuilt(declared: T, key: str, **values: Any) -> T:
    try:
        return dataclasses.replace(declared, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from error


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _model_with(model: Model, field: str, value: Any, key: str) -> Model:
    if field in _OF_TABLES:
        return _rebuilt(model, key, tables=tuple(_replaced(group, field, value, key) for group in model.tables))
    return _replaced(model, field, value, key)


def _systems_having(systems: Mapping[str, System], field: str, key: str) -> list[str]:
    """The names of those with the stage, or the role of a device, that `field` is about."""
    part, _, rest = field.partition(".")
    if part == "cache":
        return [name for name, system in systems.items() if system.cache is not None]
    if part not in ("stages", "devices"):
        return list(systems)
    asked = rest.partition(".")[0]
    there = {name: system.stages if part == "stages" else system.devices for name, system in systems.items()}
    if not any(asked in names for names in there.values()):
        every = dict.fromkeys(each for names in there.values() for each in names)
        raise ConfigError(f"{key}: no system has {asked!r} among its {part}; {nearest(asked, every)}")
    return [name for name, names in there.items() if asked in names]


def _system_with(system: System, field: str, value: Any, key: str) -> System:
    part, _, rest = field.partition(".")
    if part == "devices":
        _find(system.devices, rest, "role", key)
        return _rebuilt(system, key, devices={**system.devices, rest: read_value(str, value, key)})
    if part == "cache" and rest:
        if system.cache is None:
            raise ConfigError(f"{key}: system {system.title!r} has no cache")
        return _rebuilt(system, key, cache=_replaced(system.cache, rest, value, key))
    if part != "stages":
        return _replaced(system, field, value, key)
    stage, _, name = rest.partition(".")
    changed = _replaced(_find(system.stages, stage, "stage", key), name, value, key)
    return _rebuilt(system, key, stages={**system.stages, stage: changed})
