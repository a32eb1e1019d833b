"""The text of a configuration as a tree of plain values, overrides on top of it, and the words of messages about it."""

from __future__ import annotations

import datetime as dt
import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError

SCALAR_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    Path: "a path (a string)",
}

Key = tuple[str | int, ...]


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(below[key], value) for key, value in above.items() if _are_tables(below.get(key), value)}
    return {**below, **above, **both}


def _are_tables(*values: object) -> bool:
    return all(isinstance(value, dict) for value in values)


def toml_tree(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read_text(path, "TOML"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:  # its message ends with line and column
        raise ConfigError(f"{path}: not TOML: {error}") from error


def json_tree(path: Path) -> dict[str, Any]:
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
        raise ConfigError(f"{path}: it holds {as_found(tree)}, expected an object")
    return tree


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8, as {what} must be: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error


def apply_override(tree: dict[str, Any], text: str) -> Key:
    key_text, equals, value_text = text.partition("=")
    keys = _override_keys(key_text)
    if not equals or keys is None:
        raise ConfigError(f'override {text!r}: not of the form "table.key=value"')
    for position, key in enumerate(keys[:-1]):
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {text!r}: {dotted(keys[: position + 1])} is no table")
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


def dotted(key: Key) -> str:
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            plain = part and all(character.isalnum() or character in "-_" for character in part)
            text += ("." if text else "") + (part if plain else as_json(part))
    return text


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def as_found(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, bool):
        return f"{as_json(value)} (a boolean)"
    if isinstance(value, (str, int, float)):
        return f"{as_json(value)} ({SCALAR_NAMES[type(value)]})"
    if value is None:
        return "null"
    return f"{value} (a date or time)"


def nearest(name: str, valid: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean {dotted((close[0],))}?"
    return f"there are {', '.join(valid)}" if valid else "there are none here"
