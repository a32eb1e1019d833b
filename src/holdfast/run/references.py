"""Functions of the user's own that a run's file names, "package.module:function", and their call with a table's keys.

- A module is looked for where Python looks, in the folder of the file, and in the working directory. Where two of these
  have one of that name, that is an error: which one is meant must not depend on where the command was started.
- Both folders are put at the end of sys.path, so that a module may import its neighbours, and nothing there stands in
  the way of what is installed.
- A function's parameters say which keys its table has. Where they are annotated, values are read as a dataclass's
  fields are: strictly, `Path` relative to the file. Elsewhere they are what TOML has.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.files.config import OwnKeys
from holdfast.files.config_text import nearest

_FORM = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")


def load(reference: str, key: str, keys: OwnKeys) -> Callable[..., Any]:
    """What `reference`, the value of `key` in the table of `keys`, names. Raises ConfigError."""
    if not _FORM.fullmatch(reference):
        raise keys.error(key, f'{reference!r} names no function: write "package.module:function"')
    module_name, _, path = reference.partition(":")
    found: Any = _import(module_name, key, keys)
    for name in path.split("."):
        if not hasattr(found, name):
            there = [each for each in vars(found) if not each.startswith("_")] if hasattr(found, "__dict__") else []
            raise keys.error(key, f"{module_name} has no {name!r}; {nearest(name, there)}")
        found = getattr(found, name)
    if not callable(found):
        raise keys.error(key, f"{reference} is a {type(found).__name__}, which cannot be called; name a function")
    return typing.cast(Callable[..., Any], found)


def call(reference: str, key: str, given: Sequence[tuple[str, Any]], keys: OwnKeys) -> Any:
    """The result of the function `reference` for `given`, its positional arguments by name, and for `keys` by keyword.

    Raises ConfigError where it does not take them, and whatever it raises itself.
    """
    function = load(reference, key, keys)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some that are written in C have none
        return function(*(value for _, value in given), **keys)
    taken, takes_any = _keywords(signature, len(given))
    for name in keys:
        if name not in taken and not takes_any:
            raise keys.error(
                name, f"unknown key; {nearest(name, taken)} ({reference} is {_shown(function, signature)})"
            )
    hints = _hints(function)
    values = {name: _value(keys, name, hints) for name in keys}
    try:
        bound = signature.bind(*(value for _, value in given), **values)
    except TypeError as error:
        with_what = ", ".join([name for name, _ in given] + [f"{name}=..." for name in keys])
        raise keys.error(
            key, f"{error}: {reference} is {_shown(function, signature)}, and is called with ({with_what})"
        ) from None
    return function(*bound.args, **bound.kwargs)


def _keywords(signature: inspect.Signature, num_given: int) -> tuple[list[str], bool]:
    """Parameters that a key can name, and whether any other name will do."""
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = [p for p in parameters if p not in positional[:num_given]]
    named = [p.name for p in others if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _value(keys: OwnKeys, name: str, hints: dict[str, Any]) -> Any:
    if name not in hints:
        return keys[name]
    try:
        return keys.read(name, hints[name])
    except TypeError:  # an annotation that means nothing in TOML
        return keys[name]


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    target = function.__init__ if inspect.isclass(function) else function
    try:
        return typing.get_type_hints(target)
    except (NameError, TypeError, AttributeError):
        return {}


def _shown(function: Callable[..., Any], signature: inspect.Signature) -> str:
    return f"{getattr(function, '__name__', type(function).__name__)}{signature}"


def _import(module_name: str, key: str, keys: OwnKeys) -> Any:
    top = module_name.partition(".")[0]
    folders = [folder for folder in dict.fromkeys((keys.folder.resolve(), Path.cwd())) if folder.is_dir()]
    importlib.invalidate_caches()
    places = _places(top, folders)
    if not places:
        there = {path.stem for folder in folders for path in folder.iterdir() if path.suffix == ".py"}
        packages = {path.parent.name for folder in folders for path in folder.glob("*/__init__.py")}
        looked = " or ".join(str(folder) for folder in folders)
        raise keys.error(
            key, f"there is no module {top!r} in {looked}, or installed; {nearest(top, [*there, *packages])}"
        )
    if len(places) > 1:
        raise keys.error(
            key, f"there is more than one module {top!r}: {' and '.join(places)}; rename one, or move it away"
        )
    sys.path += [str(folder) for folder in folders if str(folder) not in sys.path]
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise keys.error(key, f"there is no module {missing!r}; {top!r} is {places[0]}") from error
        raise keys.error(
            key, f"importing {module_name} needs the module {missing!r}, which is not there: install it"
        ) from error


def _places(top: str, folders: Sequence[Path]) -> list[str]:
    """Where modules of that name are: what Python finds, and what each folder has."""
    try:
        specs = [find_spec(top)]
    except ValueError:  # a module without a spec, as `__main__`
        specs = []
    specs += [PathFinder.find_spec(top, [str(folder)]) for folder in folders]
    if loaded := getattr(sys.modules.get(top), "__file__", None):
        return list(dict.fromkeys([str(Path(loaded).resolve()), *_files([s for s in specs if s and s.has_location])]))
    there = [spec for spec in specs if spec is not None]
    # Any folder is a package without code, unless there is a real module of the name.
    real = [spec for spec in there if spec.loader is not None and spec.origin is not None]
    return list(dict.fromkeys(_files(real or there)))


def _files(specs: Sequence[ModuleSpec]) -> list[str]:
    found = []
    for spec in specs:
        if spec.has_location and spec.origin:
            found.append(str(Path(spec.origin).resolve()))
        elif spec.submodule_search_locations:
            found += [str(Path(place).resolve()) for place in spec.submodule_search_locations]
        else:
            found.append(str(spec.origin))
    return found
