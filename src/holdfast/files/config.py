"""Reads TOML, and JSON that a command wrote, into nested frozen dataclasses, strictly, and says what is wrong in the
words of the file.

Hand-written on purpose: none of pydantic, msgspec, cattrs and dacite gives strict types, refused unknown keys and
tagged unions for plain dataclasses without annotations of its own, and each would still leave to us the nearest valid
key, the file and the dotted key in every message, paths relative to the file, and overrides.

Field types: str, int, float (an int will do), bool, Path, Literal, T | None, list[T], tuple[T, ...], tuple[A, B],
dict[str, T], dataclasses, unions of these, and unions of dataclasses told apart by a field ``kind: Literal["..."]``, or
by classmethods ``is_meant_by(table)`` of all but one.

A field with the metadata OWN_KEYS, an `OwnKeys`, takes the keys of its table that no other field has. One with the
metadata UNRECORDED is left out of `to_plain` where it has its default: a record from before there was such a field
equals one of today.

Paths in a file are relative to the file's folder, in an override to the working directory; ``~`` is the home directory.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast

from holdfast.errors import ConfigError
from holdfast.files.config_text import (
    SCALAR_NAMES,
    Key,
    apply_override,
    as_found,
    as_json,
    dotted,
    json_tree,
    merged,
    nearest,
    toml_tree,
)

T = TypeVar("T")

UNRECORDED = types.MappingProxyType({"unrecorded": True})
OWN_KEYS = types.MappingProxyType({"own_keys": True})


def read_config(cls: type[T], toml_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> T:
    """The dataclass `cls` from a TOML file.

    overrides: "a.b=value", applied in order on top of the file; a value that is not TOML is a string as it stands.
    A required table that is absent counts as empty, so that its missing keys are named.
    Raises ConfigError for everything that is wrong with file, overrides or values, also for the ValueError of a
    dataclass's ``__post_init__``; the message names file (or override), dotted key, and what was expected.
    """
    return read_layers(cls, [Path(toml_path)], overrides)


def read_layers(cls: type[T], toml_paths: Sequence[Path], overrides: Sequence[str] = ()) -> T:
    """As `read_config`, from several files: where two have a key, the later one's counts; tables are merged.

    Messages name the file that has the key, or the last one; paths are relative to theirs.
    """
    origins = _Origins(toml_paths[-1])
    tree: dict[str, Any] = {}
    for path in toml_paths:
        layer = toml_tree(path)
        origins.add_file(path, layer)
        tree = merged(tree, layer)
    for text in overrides:
        origins.add(apply_override(tree, text), text)
    return cast(T, _Converter(origins).dataclass(cls, tree, ()))


def read_value(hint: Any, value: Any, name: str) -> Any:
    """`value` as a field of the type `hint`, as `read_config` takes it. Raises ConfigError that begins with `name`."""
    return _Converter(_Origins(Path(name))).convert(hint, value, ())


def read_json(cls: type[T], json_path: str | os.PathLike[str], *, version: int) -> T:
    """The dataclass `cls` from a JSON object that has its fields and, beside them, "version".

    Raises ConfigError as `read_config` does; a file of another version is named as such before anything else in it.
    """
    path = Path(json_path)
    tree = json_tree(path)
    found = tree.pop("version", None)
    if found != version:
        words = "is missing" if found is None else f"is {as_json(found)}"
        raise ConfigError(f"{path}: version: it {words}, and this build reads version {version}; make the file again")
    return cast(T, _Converter(_Origins(path)).dataclass(cls, tree, ()))


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass as JSON can say it, in field order: tuples become lists; paths, NaN and infinities strings."""
    plain = _to_plain(config)
    if not isinstance(plain, dict):
        raise TypeError(f"a dataclass is expected, not {type(config).__name__}")
    return plain


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two results of `to_plain`: one line for each field, its dotted name and both values."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        name = dotted((key,))
        if key not in new:
            lines.append(f"{name}: was {as_json(old[key])}, is no more")
        elif key not in old:
            lines.append(f"{name}: was not there, is {as_json(new[key])}")
        elif isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            lines += [f"{name}.{line}" for line in differences(old[key], new[key])]
        elif as_json(old[key]) != as_json(new[key]):
            lines.append(f"{name}: was {as_json(old[key])}, is {as_json(new[key])}")
    return lines


class _Origins:
    """Where a key's value was written: in the file, or in one of the overrides."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[Key, Path] = {}
        self._overrides: dict[Key, str] = {}

    def add_file(self, path: Path, tree: Mapping[str, Any], table: Key = ()) -> None:
        """Its keys, each of which may be in a table."""
        for name, value in tree.items():
            self._files[(*table, name)] = path
            if isinstance(value, dict):
                self.add_file(path, value, (*table, name))

    def add(self, key: Key, override: str) -> None:
        self._overrides[key] = override

    def override(self, key: Key) -> str | None:
        """The override that set `key` or a table around it, the last if several."""
        return next((text for at, text in reversed(self._overrides.items()) if key[: len(at)] == at), None)

    def folder(self, key: Key) -> Path:
        return Path.cwd() if self.override(key) is not None else self._file(key).parent.absolute()

    def _file(self, key: Key) -> Path:
        """That has it, or the innermost table around it."""
        around = (key[:length] for length in range(len(key), 0, -1))
        return next((self._files[table] for table in around if table in self._files), self._path)

    def error(self, key: Key, problem: str) -> ConfigError:
        override = self.override(key)
        where = str(self._file(key)) if override is None else f"override {override!r}"
        return ConfigError(f"{where}: {dotted(key)}: {problem}" if key else f"{where}: {problem}")


class OwnKeys(dict[str, Any]):
    """Keys of a table that a function of the user's takes, as they stand in the file; knows where each was written."""

    def __init__(self, values: Any = (), *, origins: _Origins | None = None, key: Key = ()) -> None:
        super().__init__(values)
        self._origins = _Origins(Path("configuration")) if origins is None else origins
        self._key = key
        self._places = dict.fromkeys(self, (self._origins, key))

    @classmethod
    def of(cls, values: Mapping[str, Any], *key: str) -> OwnKeys:
        """`values` of the table `key`, wherever they come from."""
        return values if isinstance(values, OwnKeys) else cls(values, key=key)

    @property
    def folder(self) -> Path:
        """Of the file that the table is in."""
        return self._origins.folder(())

    def error(self, name: str, problem: str) -> ConfigError:
        """About the key `name` of the table."""
        origins, key = self._places.get(name, (self._origins, self._key))
        return origins.error((*key, name), problem)

    def read(self, name: str, hint: Any) -> Any:
        """The value of the key `name` as a field of the type `hint`. Raises ConfigError; TypeError where no field can
        have that type."""
        origins, key = self._places.get(name, (self._origins, self._key))
        return _Converter(origins).convert(hint, self[name], (*key, name))

    def tables(self, name: str) -> list[OwnKeys]:
        """The value of the key `name`, which must be an array of tables."""
        origins, key = self._places.get(name, (self._origins, self._key))
        values = self.read(name, list[dict[str, Any]])
        return [OwnKeys(value, origins=origins, key=(*key, name, i)) for i, value in enumerate(values)]

    def without(self, name: str) -> OwnKeys:
        """All of them but one."""
        return OwnKeys({key: self[key] for key in self if key != name}, origins=self._origins, key=self._key)

    def with_keys(self, others: OwnKeys) -> OwnKeys:
        """These, and `others` in their place where both have a key."""
        both = OwnKeys({**self, **others}, origins=self._origins, key=self._key)
        both._places = {**self._places, **others._places}
        return both


class _Converter:
    def __init__(self, origins: _Origins) -> None:
        self._origins = origins

    def convert(self, hint: Any, value: Any, key: Key) -> Any:
        origin = typing.get_origin(hint)
        if hint in SCALAR_NAMES:
            return self._scalar(hint, value, key)
        if dataclasses.is_dataclass(hint):
            return self.dataclass(cast(type, hint), value, key)
        if origin is Literal:
            return self._literal(hint, value, key)
        if origin is Union or origin is types.UnionType:
            return self._union(hint, value, key)
        if hint is list or hint is tuple or origin in (list, tuple, Sequence):
            return self._array(hint, origin, value, key)
        if origin is dict or origin is Mapping:
            return self._mapping(hint, value, key)
        if hint is Any:
            return value
        raise TypeError(f"{dotted(key)}: a field of type {hint} cannot be read from a file")

    def dataclass(self, cls: type, value: Any, key: Key, beside: Sequence[str] = ()) -> Any:
        """beside: keys of other tables that could have been meant."""
        if not isinstance(value, dict):
            raise self._wrong(value, f"a table ({cls.__name__})", key)
        hints = typing.get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        own = next((name for name, field in fields.items() if field.metadata.get("own_keys")), None)
        fields.pop(own or "", None)
        others = [name for name in value if name not in fields]
        if others and own is None:
            raise self._origins.error((*key, others[0]), f"unknown key; {nearest(others[0], [*fields, *beside])}")
        arguments = {}
        if own is not None:
            arguments[own] = self._own_keys({name: value[name] for name in others}, key)
        missing = []
        for name, field in fields.items():
            if name in value:
                arguments[name] = self.convert(hints[name], value[name], (*key, name))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                if _is_table(hints[name]):
                    arguments[name] = self.convert(hints[name], {}, (*key, name))
                else:
                    missing.append(dotted((*key, name)))
        if missing:
            raise self._origins.error((), f"missing: {', '.join(missing)}")
        try:
            return cls(**arguments)
        except ValueError as error:
            raise self._origins.error(key, str(error)) from error

    def _own_keys(self, values: dict[str, Any], key: Key) -> OwnKeys:
        for name, value in values.items():
            try:
                _to_plain(value)
            except TypeError:
                raise self._origins.error((*key, name), "dates and times are not kept: write it as a string") from None
        return OwnKeys(values, origins=self._origins, key=key)

    def _scalar(self, hint: type, value: Any, key: Key) -> Any:
        if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        if hint is Path and type(value) is str:
            if not value:
                raise self._origins.error(key, "the path is empty (a variable that is not set?)")
            # Absolute, so that the value does not depend on where a later run starts; symbolic links stay.
            return Path(os.path.normpath(self._origins.folder(key) / Path(value).expanduser()))
        if type(value) is not hint:
            raise self._wrong(value, SCALAR_NAMES[hint], key)
        return value

    def _literal(self, hint: Any, value: Any, key: Key) -> Any:
        choices = typing.get_args(hint)
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
        suggestion = f"; {nearest(value, [c for c in choices if isinstance(c, str)])}" if isinstance(value, str) else ""
        raise self._wrong(value, " or ".join(as_json(choice) for choice in choices) + suggestion, key)

    def _union(self, hint: Any, value: Any, key: Key) -> Any:
        # TOML has no null: an optional field that is absent keeps its default.
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        tables = [member for member in members if dataclasses.is_dataclass(member)]
        if any(typing.get_origin(member) is os.PathLike for member in members):
            return self.convert(Path, value, key)
        if len(members) == 1:
            return self.convert(members[0], value, key)
        if isinstance(value, dict) and tables:
            meant = [table for table in tables if hasattr(table, "is_meant_by")]
            others = [table for table in tables if table not in meant]
            chosen = next((table for table in meant if table.is_meant_by(value)), None)
            table = chosen or (others[0] if len(others) == 1 else self._tagged(others, value, key))
            fields = [field for other in meant for field in dataclasses.fields(other) if table not in meant]
            beside = [field.name for field in fields if not field.metadata.get("own_keys")]
            return self.dataclass(cast(type, table), value, key, beside)
        for member in members:
            if member not in tables:
                try:
                    return self.convert(member, value, key)
                except ConfigError:
                    continue
        raise self._wrong(value, " or ".join(_name(member) for member in members), key)

    def _tagged(self, tables: Sequence[Any], value: dict[str, Any], key: Key) -> type:
        kinds: dict[Any, type] = {}
        for table in tables:
            hint = typing.get_type_hints(table).get("kind")
            if typing.get_origin(hint) is not Literal:
                raise TypeError(f"{table.__name__} is in a union of dataclasses, and has no field kind: Literal[...]")
            kinds |= dict.fromkeys(typing.get_args(hint), table)
        if "kind" not in value:
            raise self._origins.error((*key, "kind"), f"missing; it is {' or '.join(map(as_json, kinds))}")
        kind = value["kind"]
        if not isinstance(kind, str) or kind not in kinds:
            suggestion = f"; {nearest(kind, list(kinds))}" if isinstance(kind, str) else ""
            raise self._wrong(kind, " or ".join(map(as_json, kinds)) + suggestion, (*key, "kind"))
        return kinds[kind]

    def _array(self, hint: Any, origin: Any, value: Any, key: Key) -> Any:
        members = typing.get_args(hint)
        if not isinstance(value, list):
            raise self._wrong(value, "an array", key)
        if origin is tuple and not (len(members) == 2 and members[1] is Ellipsis):
            if len(value) != len(members):
                raise self._wrong(value, f"an array of {len(members)}", key)
            hints = list(members)
        else:
            hints = [members[0] if members else Any] * len(value)
        items = [self.convert(hint, item, (*key, i)) for i, (hint, item) in enumerate(zip(hints, value, strict=True))]
        return items if origin is list or hint is list else tuple(items)

    def _mapping(self, hint: Any, value: Any, key: Key) -> dict[str, Any]:
        key_hint, member = typing.get_args(hint)
        if key_hint is not str:
            raise TypeError(f"{dotted(key)}: TOML has only str keys, not {key_hint}")
        if not isinstance(value, dict):
            raise self._wrong(value, "a table", key)
        return {name: self.convert(member, item, (*key, name)) for name, item in value.items()}

    def _wrong(self, value: Any, expected: str, key: Key) -> ConfigError:
        return self._origins.error(key, f"found {as_found(value)}, expected {expected}")


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            if field.metadata.get("own_keys"):
                plain |= _to_plain(held)
            elif not field.metadata.get("unrecorded") or held != field.default:
                plain[field.name] = _to_plain(held)
        return plain
    if isinstance(value, Mapping):
        return {str(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    if isinstance(value, Path):
        return value.as_posix()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"a configuration holds no {type(value).__name__}: {value!r}")


def _name(hint: Any) -> str:
    if hint in SCALAR_NAMES:
        return SCALAR_NAMES[hint]
    if typing.get_origin(hint) is Literal:
        return " or ".join(as_json(choice) for choice in typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return f"a table ({cast(type, hint).__name__})"
    return "a table" if typing.get_origin(hint) in (dict, Mapping) else "an array"


def _is_table(hint: Any) -> bool:
    """Whether a required field of this type counts as an empty table where it is absent."""
    return dataclasses.is_dataclass(hint) or any(hasattr(member, "is_meant_by") for member in typing.get_args(hint))
