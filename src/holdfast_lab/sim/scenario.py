"""What is simulated: a system and a model of a library, as a command names them, with the values that it sets.

A system or a model is a name or a path to a TOML file; a model may also be the configuration of a run (examples/),
whose tables, network and batches are taken. A setting is KEY=VALUE with a key of `Library.changed`, or a shorter one:
"model.FIELD" for the model that was chosen, "system.FIELD" and "stages.STAGE.FIELD" for the system.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from holdfast.errors import ConfigError
from holdfast_lab.sim.library import PACKAGED, Library, nearest, read_library, read_model, read_system, read_tree
from holdfast_lab.sim.machine import DEFAULT_BATCHES, Run
from holdfast_lab.sim.model import Model
from holdfast_lab.sim.system import System

KINDS = ("devices", "models", "systems")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """system, model: names in `library`."""

    library: Library
    system: str
    model: str

    @property
    def declared(self) -> System:
        return self.library.system(self.system)

    def full_key(self, key: str) -> str:
        """The key of `Library.changed` that a shorter one stands for."""
        kind, _, rest = key.partition(".")
        if kind == "model":
            return f"models.{self.model}.{rest}"
        if kind == "system":
            return f"systems.{self.system}.{rest}"
        if kind == "stages":
            return f"systems.{self.system}.{key}"
        return key

    def changed(self, key: str, value: Any) -> Scenario:
        """With another value. Raises ConfigError that names the key."""
        return replace(self, library=self.library.changed({self.full_key(key): value}))

    def run(self, batches: int = DEFAULT_BATCHES) -> Run:
        return self.library.run(self.system, self.model, batches=batches)


def read_folders(folders: Sequence[Path] = ()) -> Library:
    """The library with the user's folders on top. Raises ConfigError, also where a folder has none of a library's."""
    for folder in folders:
        if not any((folder / kind).is_dir() for kind in KINDS):
            raise ConfigError(
                f"folder {folder}: it has none of {'/, '.join(KINDS)}/, where declarations are looked for"
            )
    return read_library(folders)


def read_scenario(
    system: str,
    model: str,
    settings: Sequence[str] = (),
    folders: Sequence[Path] = (),
    values: Path | None = None,
    profile: Path | None = None,
    replay: int | None = None,
) -> Scenario:
    """settings: "KEY=VALUE", applied in order, after what the TOML file `values` has by the keys of `Library.changed`.
    profile: of the ids of the run that is the model; replay: so many of its batches. Raises ConfigError."""
    if profile is not None and replay is not None:
        raise ConfigError("--replay: ids are counted by --profile, or replayed, not both")
    library = read_folders(folders)
    if values is not None:
        library = library.changed(read_tree(values))
    systems, models = dict(library.systems), dict(library.models)
    if _is_path(system, systems):
        path = Path(system)
        system = path.stem
        systems[system] = read_system(path, (PACKAGED, *folders))
    if _is_path(model, models):
        path = Path(model)
        model = path.stem
        models[model] = _read_model_or_run(path, profile, replay)
    elif profile is not None or replay is not None:
        _refuse_ids(profile, f"give --model that run's configuration, not {model!r}")
    scenario = Scenario(library=replace(library, models=models, systems=systems), system=system, model=model)
    scenario.library.system(system)  # a wrong name is said as such, and not as that of a setting
    scenario.library.model(model)
    for setting in settings:
        key, value = parse_setting(setting)
        scenario = scenario.changed(key, value)
    return scenario


def parse_setting(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"setting {setting!r}: not of the form KEY=VALUE")
    return key.strip(), parse_value(text.strip())


def parse_value(text: str) -> Any:
    """As TOML reads it; what is no TOML is a string as it stands."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def packaged_file(kind: str, name: str) -> Path:
    """The file of a declaration that comes with the package. Raises ConfigError."""
    files = {path.stem: path for path in (PACKAGED / kind).glob("*.toml")}
    if name not in files:
        raise ConfigError(f"{kind}: there is none that is called {name!r}; {nearest(name, files)}")
    return files[name]


def _is_path(text: str, known: Mapping[str, object]) -> bool:
    return text not in known and (text.endswith(".toml") or "/" in text)


def _read_model_or_run(path: Path, profile: Path | None, replay: int | None) -> Model:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        tree = {}  # read_model says what is wrong
    if "data" not in tree:
        if profile is not None or replay is not None:
            _refuse_ids(profile, f"{path} is no run's configuration")
        return read_model(path)
    from holdfast.files.config import read_config
    from holdfast.run.sections import RunConfig
    from holdfast_lab.placement.access_profile import read_profile
    from holdfast_lab.sim.from_run import model_of_run

    config = read_config(RunConfig, path)
    model = model_of_run(config, None if profile is None else read_profile(profile))
    if replay is None:
        return model
    from holdfast.run.sources import open_source
    from holdfast.train.observe import counting
    from holdfast_lab.sim.replay import replay_of, replayed_model

    with counting("reading batches", replay) as on_batch:
        ids = replay_of(open_source(config.data), config.train, num_batches=replay, on_batch=on_batch)
    return replayed_model(model, ids)


def _refuse_ids(profile: Path | None, why: str) -> NoReturn:
    raise ConfigError(f"{'--replay' if profile is None else '--profile'}: it is of a run's ids; {why}")
