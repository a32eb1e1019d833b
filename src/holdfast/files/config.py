"""Reads TOML, and JSON that a command wrote, into nested frozen dataclasses, strictly, and says what is wrong in the
words of the file.

Hand-written on purpose: none of pydantic, msgspec, cattrs and dacite gives strict types, refused unknown keys and
tagged unions for plain dataclasses without annotations of its own, and each would still leave to us the nearest valid
key, the file and the dotted key in every message, paths relative to the file, and overrides.

Field types: str, int, float (an int will do), bool, Path, Literal, T | None, list[T], tuple[T, ...], tuple[A, B],
dict[str, T], dataclasses, unions of these, and unions of dataclasses told apart by a field ``kind: Literal["..."]``.

Paths in a file are relative to the file's folder, in an override to the working directory; ``~`` is the home directory.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import difflib
import json
import math
import os
import sys
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast

from holdfast.errors import ConfigError

T = TypeVar("T")

_SCALAR_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path (a string)",
}


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

    Messages name the last file.
    """
    origins = _Origins(toml_paths[-1])
    tree: dict[str, Any] = {}
    for path in toml_paths:
        tree = _merged(tree, _read_toml(path))
    for text in overrides:
        origins.add(_apply_override(tree, text), text)
    return cast(T, _Converter(origins).dataclass(cls, tree, ()))


def read_value(hint: Any, value: Any, name: str) -> Any:
    """`value` as a field of the type `hint`, as `read_config` takes it. Raises ConfigError that begins with `name`."""
    return _Converter(_Origins(Path(name))).convert(hint, value, ())


def read_json(cls: type[T], json_path: str | os.PathLike[str], *, version: int) -> T:
    """The dataclass `cls` from a JSON object that has its fields and, beside them, "version".

    Raises ConfigError as `read_config` does; a file of another version is named as such before anything else in it.
    """
    path = Path(json_path)
    tree = _read_json(path)
    found = tree.pop("version", None)
    if found != version:
        words = "is missing" if found is None else f"is {_json(found)}"
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
        name = _dotted((key,))
        if key not in new:
            lines.append(f"{name}: was {_json(old[key])}, is no more")
        elif key not in old:
            lines.append(f"{name}: was not there, is {_json(new[key])}")
        elif isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            lines += [f"{name}.{line}" for line in differences(old[key], new[key])]
        elif _json(old[key]) != _json(new[key]):
            lines.append(f"{name}: was {_json(old[key])}, is {_json(new[key])}")
    return lines


_Key = tuple[str | int, ...]


class _Origins:
    """Where a key's value was written: in the file, or in one of the overrides."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._overrides: dict[_Key, str] = {}

    def add(self, key: _Key, override: str) -> None:
        self._overrides[key] = override

    def override(self, key: _Key) -> str | None:
        """The override that set `key` or a table around it, the last if several."""
        return next((text for at, text in reversed(self._overrides.items()) if key[: len(at)] == at), None)

    def folder(self, key: _Key) -> Path:
        return Path.cwd() if self.override(key) is not None else self._path.parent.absolute()

    def error(self, key: _Key, problem: str) -> ConfigError:
        override = self.override(key)
        where = str(self._path) if override is None else f"override {override!r}"
        return ConfigError(f"{where}: {_dotted(key)}: {problem}" if key else f"{where}: {problem}")


class _Converter:
    def __init__(self, origins: _Origins) -> None:
        self._origins = origins

    def convert(self, hint: Any, value: Any, key: _Key) -> Any:
        origin = typing.get_origin(hint)
        if hint in _SCALAR_NAMES:
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
        raise TypeError(f"{_dotted(key)}: a field of type {hint} cannot be read from a file")

    def dataclass(self, cls: type, value: Any, key: _Key) -> Any:
        if not isinstance(value, dict):
            raise self._wrong(value, f"a table ({cls.__name__})", key)
        hints = typing.get_type_hints(cls)
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        for name in value:
            if name not in fields:
                raise self._origins.error((*key, name), f"unknown key; {_nearest(name, list(fields))}")
        arguments = {}
        missing = []
        for name, field in fields.items():
            if name in value:
                arguments[name] = self.convert(hints[name], value[name], (*key, name))
            elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                if dataclasses.is_dataclass(hints[name]):
                    arguments[name] = self.convert(hints[name], {}, (*key, name))
                else:
                    missing.append(_dotted((*key, name)))
        if missing:
            raise self._origins.error((), f"missing: {', '.join(missing)}")
        try:
            return cls(**arguments)
        except ValueError as error:
            raise self._origins.error(key, str(error)) from error

    def _scalar(self, hint: type, value: Any, key: _Key) -> Any:
        if hint is float and type(value) is int and abs(value) <= sys.float_info.max:
            return float(value)
        if hint is Path and type(value) is str:
            # Absolute, so that the value does not depend on where a later run starts; symbolic links stay.
            return Path(os.path.normpath(self._origins.folder(key) / Path(value).expanduser()))
        if type(value) is not hint:
            raise self._wrong(value, _SCALAR_NAMES[hint], key)
        return value

    def _literal(self, hint: Any, value: Any, key: _Key) -> Any:
        choices = typing.get_args(hint)
        for choice in choices:
            if type(choice) is type(value) and choice == value:
                return choice
        suggestion = (
            f"; {_nearest(value, [c for c in choices if isinstance(c, str)])}" if isinstance(value, str) else ""
        )
        raise self._wrong(value, " or ".join(_json(choice) for choice in choices) + suggestion, key)

    def _union(self, hint: Any, value: Any, key: _Key) -> Any:
        # TOML has no null: an optional field that is absent keeps its default.
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        tables = [member for member in members if dataclasses.is_dataclass(member)]
        if len(members) == 1:
            return self.convert(members[0], value, key)
        if isinstance(value, dict) and tables:
            table = tables[0] if len(tables) == 1 else self._tagged(tables, value, key)
            return self.dataclass(cast(type, table), value, key)
        for member in members:
            if member not in tables:
                try:
                    return self.convert(member, value, key)
                except ConfigError:
                    continue
        raise self._wrong(value, " or ".join(_name(member) for member in members), key)

    def _tagged(self, tables: Sequence[Any], value: dict[str, Any], key: _Key) -> type:
        kinds: dict[Any, type] = {}
        for table in tables:
            hint = typing.get_type_hints(table).get("kind")
            if typing.get_origin(hint) is not Literal:
                raise TypeError(f"{table.__name__} is in a union of dataclasses, and has no field kind: Literal[...]")
            kinds |= dict.fromkeys(typing.get_args(hint), table)
        if "kind" not in value:
            raise self._origins.error((*key, "kind"), f"missing; it is {' or '.join(map(_json, kinds))}")
        kind = value["kind"]
        if not isinstance(kind, str) or kind not in kinds:
            suggestion = f"; {_nearest(kind, list(kinds))}" if isinstance(kind, str) else ""
            raise self._wrong(kind, " or ".join(map(_json, kinds)) + suggestion, (*key, "kind"))
        return kinds[kind]

    def _array(self, hint: Any, origin: Any, value: Any, key: _Key) -> Any:
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

    def _mapping(self, hint: Any, value: Any, key: _Key) -> dict[str, Any]:
        key_hint, member = typing.get_args(hint)
        if key_hint is not str:
            raise TypeError(f"{_dotted(key)}: TOML has only str keys, not {key_hint}")
        if not isinstance(value, dict):
            raise self._wrong(value, "a table", key)
        return {name: self.convert(member, item, (*key, name)) for name, item in value.items()}

    def _wrong(self, value: Any, expected: str, key: _Key) -> ConfigError:
        return self._origins.error(key, f"found {_found(value)}, expected {expected}")


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(below[key], value) for key, value in above.items() if _are_tables(below.get(key), value)}
    return {**below, **above, **both}


def _are_tables(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(path, "TOML"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # its message ends with line and column
        raise ConfigError(f"{path}: not TOML: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            raise ValueError(f"a key is there twice among {', '.join(sorted(keys))}")
        return dict(pairs)

    def no_number(word: str) -> Any:
        raise ValueError(f"{word} is no number of JSON")

    try:
        tree = json.loads(_read_text(path, "JSON"), object_pairs_hook=without_doubles, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: it holds {_found(tree)}, expected an object")
    return tree


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8, as {what} must be: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def _apply_override(tree: dict[str, Any], text: str) -> _Key:
    key_text, equals, value_text = text.partition("=")
    keys = _override_keys(key_text)
    if not equals or keys is None:
        raise ConfigError(f'override {text!r}: not of the form "table.key=value"')
    for position, key in enumerate(keys[:-1]):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {text!r}: {_dotted(keys[: position + 1])} is no table")
    tree[keys[-1]] = _override_value(text, value_text.strip())
    return keys


def _override_keys(text: str) -> tuple[str, ...] | None:
    """The dotted key as TOML reads it, quotes and all."""
    try:
        node: Any = tomllib.loads(f"{text} = 0")
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    keys = []
    while isinstance(node, dict):
        if len(node) != 1:
            return None
        ((key, node),) = node.items()
        keys.append(key)
    return tuple(keys) if keys else None


def _override_value(override: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if text[:1] in ('"', "'", "[", "{"):
            raise ConfigError(f"override {override!r}: the value is not TOML: {error}") from error
        return text
    value = parsed["value"]
    is_date = isinstance(value, (dt.date, dt.time))
    return text if is_date or len(parsed) != 1 else value


def _to_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
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


def _dotted(key: _Key) -> str:
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part and all(character.isalnum() or character in "-_" for character in part)
            text += ("." if text else "") + (part if plain else _json(part))
    return text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, bool):
        return f"{_json(value)} (a boolean)"
    if isinstance(value, (str, int, float)):
        return f"{_json(value)} ({_SCALAR_NAMES[type(value)]})"
    return f"{value} (a date or time)"


def _name(hint: Any) -> str:
    if hint in _SCALAR_NAMES:
        return _SCALAR_NAMES[hint]
    if typing.get_origin(hint) is Literal:
        return " or ".join(_json(choice) for choice in typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return f"a table ({cast(type, hint).__name__})"
    return "a table" if typing.get_origin(hint) in (dict, Mapping) else "an array"


def _nearest(name: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean {_dotted((close[0],))}?"
    return f"there are {', '.join(valid)}" if valid else "there are none here"
