"""Another schema on the way into a new pool: names that the files have otherwise, and what begins anew.

The name of a table stands for the table; a module or parameter of the dense part that has the same one goes by
``model.<name>``, as an export has it, and any of them may; ``model`` is all of it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from holdfast.admin.tensor_files import TensorFile
from holdfast.errors import ConfigError
from holdfast.pools.directory import some_of

_TABLE = re.compile(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.].*?)\.weight$")
_ROOMS = r"(?:^|\.)(?:embedding_bags|embeddings|optimizer|_managed_collision_modules)"  # where tables' names follow
_SHOWN = 8


def tables_in(names: Iterable[str]) -> set[str]:
    """The tables of which a file that has these names has the weights."""
    return {found[1] for name in names if (found := _TABLE.search(name))}


@dataclass(frozen=True, slots=True)
class New:
    """What begins with its initial values, whatever the files have. parameters: of the dense part."""

    tables: frozenset[str]
    parameters: frozenset[str]

    @classmethod
    def of(cls, names: Collection[str], tables: Collection[str], parameters: Collection[str]) -> New:
        """names: of tables, or of modules or parameters of the dense part. Raises ConfigError for one of neither."""
        new_tables: set[str] = set()
        new_parameters: set[str] = set()
        for name in names:
            if name in tables:
                new_tables.add(name)
                continue
            both = ((each, full) for each in parameters for full in (each, f"model.{each}"))
            found = {each for each, full in both if f"{full}.".startswith(f"{name}.")}
            if not found:
                there = f"tables {_shown(tables)}" + (f"; parameters {_shown(parameters)}" if parameters else "")
                raise ConfigError(f"import: {name!r} is to be new, but there is no such table or parameter ({there})")
            new_parameters |= found
        return cls(frozenset(new_tables), frozenset(new_parameters))


class RenamedTensors:
    """The tensors of a file under other names.

    rename: from the file's name of a table, or of a module or parameter of the dense part, to the one of now. All at
    once, so that two may change places. Raises ConfigError for a name that the file does not have, and where two
    tensors get one name.
    """

    def __init__(self, file: TensorFile, rename: Mapping[str, str]) -> None:
        self._file = file
        names = file.shapes()
        tables = tables_in(names)
        of_tables = {old: new for old, new in rename.items() if old in tables}
        of_dense = {old: new for old, new in rename.items() if old not in tables}
        # every table, so that one is not taken for another of which it has the beginning: item, item.category
        of_a_table, table = _pattern(rf"{_ROOMS}\.", tables), _pattern(rf"(?:{_ROOMS}|\.weight)\.", tables)
        module = _pattern(r"(?:^|\.)", of_dense)
        self._name_in_file: dict[str, str] = {}
        found: set[str] = set()
        for name in names:
            if of_a_table.search(name):
                renamed = _replaced(name, table, of_tables, found)
            else:
                renamed = _replaced(name, module, of_dense, found)
            if renamed in self._name_in_file:
                raise ConfigError(f"import: {self._name_in_file[renamed]} and {name} would both be {renamed}")
            self._name_in_file[renamed] = name
        if missing := sorted(rename.keys() - found):
            raise ConfigError(
                f"import: {missing[0]!r} is to be renamed, but the file has no such table, module or parameter (it has "
                f"tables {_shown(tables)}; {_shown(name for name in names if not _TABLE.search(name))})"
            )

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._file.shapes()
        return {name: shapes[in_file] for name, in_file in self._name_in_file.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        return self._file.rows(self._name_in_file[name], first, count)


def _pattern(before: str, names: Iterable[str]) -> re.Pattern[str]:
    """Whole names after `before`, between dots; nothing where there are no names."""
    longest_first = sorted(names, key=len, reverse=True)
    either = "|".join(map(re.escape, longest_first)) or "(?!)"
    return re.compile(rf"({before})({either})(?=\.|$)")


def _replaced(name: str, pattern: re.Pattern[str], rename: Mapping[str, str], found: set[str]) -> str:
    def of(match: re.Match[str]) -> str:
        found.add(match[2])
        return match[1] + rename.get(match[2], match[2])

    return pattern.sub(of, name)


def _shown(names: Iterable[str]) -> str:
    return some_of(sorted(names), _SHOWN) or "none"
