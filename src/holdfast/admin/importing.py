"""Moving in: an export, a ``state_dict`` of plain tensors or a dump of dynamicemb, into a new pool, a slice at a time.

- every table of the configuration from a name that ends in ``embedding_bags.<table>.weight``, or else in
  ``embeddings.<table>.weight``, whatever is before it;
- optimizer state, where there is any, from ``optimizer.<table>.<state>`` or TorchRec's
  ``...embedding_bags.<table>.weight.<table>.<state>``;
- the dense part from names that end in the model's own; what the file lacks keeps its initial value.

What is said to be new begins with its initial values, whatever the file has of it (schema.py).

Rows that equal their initial value stay untouched, so that a pool that was exported and imported again is as sparse as
before. A pool that is imported begins at step 0 (also for the bias correction of Adam).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.admin.ahead import ahead
from holdfast.admin.import_checks import check_floating, check_shape, check_types, check_values, only
from holdfast.admin.schema import New, tables_in
from holdfast.admin.snapshot.output import new_directory
from holdfast.admin.snapshot.rows import Rows
from holdfast.admin.tensor_files import (
    Progress,
    TensorFile,
    row_chunks,
)
from holdfast.errors import ConfigError, PoolExists, PoolOfGroup
from holdfast.files.durable import is_taken, make_directory
from holdfast.files.recycled import recycled
from holdfast.pools.directory import begins_a_group, is_shared
from holdfast.pools.read_only import KEY_RECORD, layout_of
from holdfast.pools.tables import TORCH_DTYPES
from holdfast.run.assembly import assemble
from holdfast.run.sections import RunConfig
from holdfast.train.trainer import Trainer

_SLICE_BYTES = 32 << 20  # home is written by long requests
_MANAGED = ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping")
_SQUARES = {"momentum1", "exp_avg_sq"}
# Other names under which the same state goes, by our own.
_STATE_ALIASES = {
    "momentum1": ("momentum1", "sum"),
    "exp_avg": ("exp_avg", "momentum1"),
    "exp_avg_sq": ("exp_avg_sq", "momentum2"),
}


Sources = dict[int, dict[str, str]]  # by table: where the file has its weights, and each part of its state
Put = Callable[[int, Rows], None]  # what takes rows of a table, by its number


def table_bytes(file: TensorFile) -> int:
    """About how many bytes of rows an import reads, for a progress bar."""
    return sum(4 * math.prod(shape) for name, shape in file.shapes().items() if "embedding" in name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSummary:
    """What an import took, and what it did not find or use. new: tables and dense parameters that began anew."""

    tables: int
    state: tuple[str, ...]
    dense: tuple[str, ...]
    dense_missing: tuple[str, ...]
    unused: tuple[str, ...]
    new: tuple[str, ...]


def import_pool(
    file: TensorFile,
    config: RunConfig,
    directory: Path,
    *,
    new: Collection[str] = (),
    on_bytes: Progress | None = None,
) -> ImportSummary:
    """Makes a pool for the run `config` in `directory` with the values of `file`; it is there when it is complete.

    new: tables, and modules or parameters of the dense part, that begin with their initial values, whatever the file
    has.

    Raises PoolExists, PoolOfGroup under torchrun, and ConfigError that names the table or parameter that is missing or
    has another shape.
    """
    check_place(directory, for_ranks="--shards 64")
    with new_directory(directory, "importing") as partial, assemble(config, partial) as trainer:
        sources, summary = import_dense(file, trainer, new)
        import_rows(file, partial, sources, rows_into(trainer.pool.core), on_bytes)
        trainer.recover()
    return summary


def check_place(directory: Path, *, for_ranks: str) -> None:
    """Makes what is above a new pool's directory. for_ranks: what cuts the pool for several. Raises PoolExists,
    PoolOfGroup under torchrun."""
    if is_taken(directory):
        raise PoolExists(f"{directory} is there already; an import makes a new pool, name another directory")
    if is_shared(directory) or begins_a_group(directory):
        raise PoolOfGroup(f"{directory}: an import is one process's, run it without torchrun; {for_ranks} for ranks")
    make_directory(directory.parent)


def import_dense(file: TensorFile, trainer: Trainer, names: Collection[str]) -> tuple[Sources, ImportSummary]:
    """The dense part into the trainer's; where the rows are of the tables that `names`, what is new, leaves out."""
    shapes = file.shapes()
    tables = trainer.pool.core.tables
    new = New.of(names, [table.name for table in tables], trainer.model.state_dict())
    sources = sources_of(tables, shapes, new.tables)
    dense = _import_dense(file, trainer, shapes, new.parameters)
    used = {name for source in sources.values() for name in source.values()} | set(dense.values())
    return sources, ImportSummary(
        tables=len(sources),
        state=state_of(sources.values()),
        dense=tuple(dense),
        dense_missing=tuple(name for name in trainer.model.state_dict() if name not in dense.keys() | new.parameters),
        unused=tuple(name for name in shapes if name not in used),
        new=(*sorted(new.tables), *sorted(new.parameters)),
    )


def sources_of(
    tables: Sequence[_core.TableSpec], shapes: Mapping[str, tuple[int, ...]], new: Collection[str]
) -> Sources:
    """By number of the tables that are not new, what `table_sources` finds of them."""
    return {number: table_sources(table, shapes) for number, table in enumerate(tables) if table.name not in new}


def rows_into(pool: _core.Pool) -> Put:
    """Puts rows into a new pool of one writer."""
    return lambda number, rows: pool.import_values(number, rows.rows, rows.data.reshape(-1))


def import_rows(file: TensorFile, directory: Path, sources: Sources, put: Put, on_bytes: Progress | None) -> None:
    """Puts the rows of the file that differ from those of the new pool in `directory`; `sources`: as sources_of found
    them."""
    reader = _core.Reader(str(directory))
    for number, source in sources.items():
        import_table(file, reader, number, source, put, on_bytes)


def table_sources(table: _core.TableSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Where the table's weights ("weight") and each part of its state lie in the file, checked."""
    name = re.escape(table.name)
    for room in ("embedding_bags", "embeddings"):  # TorchRec's names of tables that are pooled, and of others
        weight = only(shapes, rf"(?:^|\.){room}\.{name}\.weight$", f"table '{table.name}'")
        if weight is not None:
            break
    else:
        raise ConfigError(
            f"table '{table.name}': the file has no name that ends in embedding_bags.{table.name}.weight, or in "
            f"embeddings.{table.name}.weight (it has tables {', '.join(sorted(tables_in(shapes))) or 'none'}). Say so "
            f"where the table is new (--new {table.name}), or has another name there ({_rename_advice(table, shapes)})"
        )
    sources = {"weight": weight}
    num_rows = table.num_embeddings
    keys = only(shapes, rf"(?:^|\.){room}\.{name}\.keys$", f"keys of table '{table.name}'")
    if table.keys:
        num_rows = next(iter(shapes[weight]), 1)
        if num_rows > table.num_embeddings:
            raise ConfigError(
                f"table '{table.name}': the file has {num_rows} rows, its capacity is {table.num_embeddings}"
            )
        if keys is not None:
            check_shape(keys, shapes[keys], ((num_rows,),))
            sources["keys"] = keys
        else:
            sources |= _managed_ids(table, shapes)
    elif keys is not None:
        raise ConfigError(
            f"table '{table.name}': its rows in the file are found by keys ({keys}), where the configuration's have "
            "numbers; give the column keys = true"
        )
    advice = f"; where the table begins anew, say so: --new {table.name}"
    check_shape(weight, shapes[weight], ((num_rows, table.embedding_dim),), advice)
    return sources | _state_sources(table, room, num_rows, shapes)


def _rename_advice(table: _core.TableSpec, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """How a table gets its name. Of a module's own (user.weight) no pattern tells that it is a table, but its shape."""
    shape = (table.num_embeddings, table.embedding_dim)
    alike = [name for name in shapes if shapes[name] == shape and not tables_in([name]) and name.endswith(".weight")]
    if not alike:
        return f"--rename OTHER={table.name}"
    return f"--rename {alike[0]}=embedding_bags.{table.name}.weight, if that is it"


def _state_sources(
    table: _core.TableSpec, room: str, num_rows: int, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Where each part of the table's state lies in the file: all of them, or none where it has no state, or another
    optimizer's. momentum1 is a sum of squares where it is alone, and where there is a second moment the first one."""
    name = re.escape(table.name)
    stem = rf"(?:^|\.)(?:optimizer\.{name}|{room}\.{name}\.weight(?:\.{name})?)\."
    has_moments = any(re.search(rf"{stem}(?:momentum2|exp_avg_sq)$", found) for found in shapes)
    parts = layout_of(table).state
    sources: dict[str, str] = {}
    for state, width in parts:
        for alias in _STATE_ALIASES[state]:
            if alias == "momentum1" and has_moments != (state == "exp_avg"):
                continue
            found = only(shapes, f"{stem}{alias}$", f"optimizer state {state} of table '{table.name}'")
            if found is not None:
                wanted = ((num_rows, width), (num_rows,)) if width == 1 else ((num_rows, width),)
                check_shape(found, shapes[found], wanted, "; state that is left out of the file begins anew")
                sources[state] = found
                break
    if missing := [state for state, _ in parts if sources and state not in sources]:
        raise ConfigError(
            f"table '{table.name}': part of its optimizer's state is missing: the file has "
            f"{', '.join(sources.values())}, but no {', '.join(missing)}; put that in, or leave all of it out of the "
            "file, and the state begins anew"
        )
    return sources


def state_of(sources: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    """Of what table_sources found: the names of optimizer state."""
    return tuple(name for source in sources for key, name in source.items() if key not in ("weight", "keys", *_MANAGED))


def _managed_ids(table: _core.TableSpec, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Of TorchRec's managed collisions (MCHManagedCollisionModule), where the file has them: ids, and their rows."""
    found = {}
    for part in _MANAGED:
        pattern = rf"(?:^|\.)_managed_collision_modules\.{re.escape(table.name)}\.{part}$"
        name = only(shapes, pattern, f"managed ids of table '{table.name}'")
        if name is not None:
            found[part] = name
    if 0 < len(found) < len(_MANAGED):
        raise ConfigError(f"table '{table.name}': the file has {', '.join(found)}, but not {' and '.join(_MANAGED)}")
    if found and len({shapes[name] for name in found.values()}) > 1:
        raise ConfigError(f"table '{table.name}': {' and '.join(found.values())} in the file differ in shape")
    return found


def import_table(
    file: TensorFile,
    reader: _core.Reader,
    number: int,
    source: Mapping[str, str],
    put: Put,
    on_bytes: Progress | None,
) -> None:
    """Puts the table's rows of the file; `source`: as table_sources found them."""
    table = reader.tables[number]
    layout = layout_of(table)
    dtype = TORCH_DTYPES[table.dtype]
    check_types(file, [name for part, name in source.items() if part not in ("keys", *_MANAGED)])
    records = _records(file, table, reader.header["seed"], number, source)
    num_rows = table.num_embeddings if records is None else len(records)

    def read() -> Iterator[tuple[int, int, dict[str, Tensor]]]:
        """By slice of the table: its first row, how many it has, and what the file has of them."""
        for first, count in row_chunks(num_rows, layout, _SLICE_BYTES):
            names = ["weight", *(name for name, _ in layout.state if name in source)]
            yield first, count, {name: file.rows(source[name], first, count) for name in names}

    def changed(slices: Iterator[tuple[int, int, dict[str, Tensor]]]) -> Iterator[tuple[int, Rows]]:
        """By slice: how many rows it has, and those that differ from their initial values."""
        for first, count, parts in slices:
            data = recycled(count * layout.row_bytes).reshape(count, layout.row_bytes)
            weights, state = data[:, : layout.weight_bytes], data[:, layout.weight_bytes :]
            parts = {name: part.to(dtype if name == "weight" else torch.float32) for name, part in parts.items()}
            squares = {source[name] for name in parts.keys() & _SQUARES}
            check_values({source[name]: part for name, part in parts.items()}, squares, first, records)
            weights[:] = _as_bytes(parts["weight"], count)
            column = 0
            for name, width in layout.state:
                state[:, column : column + 4 * width] = _as_bytes(parts[name], count) if name in parts else 0
                column += 4 * width
            if records is not None:
                state[:, column:] = records[first : first + count].view(np.uint8).reshape(count, -1)
            differs = np.logical_or.reduce(state, axis=1)
            if len(unsure := np.flatnonzero(~differs)):
                initial = np.empty((len(unsure), layout.weight_bytes), np.uint8)
                reader.initial_rows(number, unsure.astype(np.uint64) + np.uint64(first), initial.reshape(-1))
                differs[unsure] = (_as_words(weights[unsure]) != _as_words(initial)).any(axis=1)
            if records is not None:
                differs &= records["updates"][first : first + count] != 0
            rows = Rows(np.arange(first, first + count, dtype=np.uint64), data)
            yield count, rows if differs.all() else rows.taken(np.flatnonzero(differs))

    with ahead(read()) as slices, ahead(changed(slices)) as found:
        for count, rows in found:
            if len(rows):
                put(number, rows)
            if on_bytes is not None:
                on_bytes(count * layout.row_bytes)


def _records(
    file: TensorFile, table: _core.TableSpec, seed: int, number: int, source: Mapping[str, str]
) -> NDArray[np.void] | None:
    """Of a table with keys, the records of the file's rows: of its keys, or of the rows' numbers where it has none, as
    updated when the new pool begins, and admitted. Of managed collisions, rows that no id has are nobody's."""
    if not table.keys:
        return None
    num_rows = file.shapes()[source["weight"]][0]
    ids = rows = np.arange(num_rows)
    if "keys" in source:
        found = file.rows(source["keys"], 0, num_rows)
        if found.dtype != torch.int64:
            raise ConfigError(f"{source['keys']} in the file has the type {found.dtype}, keys are int64")
        ids = found.numpy()
        if len(np.unique(ids)) != num_rows:
            raise ConfigError(f"{source['keys']} in the file has a key more than once")
    elif _MANAGED[0] in source:
        ids, rows = _managed_rows(file, table, source, num_rows)
    if 0 < table.max_keys < len(ids):
        raise ConfigError(
            f"table '{table.name}': the file has {len(ids)} keys, max_keys is {table.max_keys}: the first step would "
            "leave all of them behind, as they count as equally old; let max_keys have room for them and for new ones"
        )
    records = np.zeros(num_rows, KEY_RECORD)
    records["key"][rows] = ids
    records["updates"][rows] = _core.first_admissions(table, seed, number, np.ascontiguousarray(ids, np.int64))
    return records


def _managed_rows(
    file: TensorFile, table: _core.TableSpec, source: Mapping[str, str], num_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The ids that have a row, and their rows."""
    ids, rows = (
        file.rows(source[part], 0, file.shapes()[source[part]][0]).to(torch.int64).numpy() for part in _MANAGED
    )
    has_id = ids != np.iinfo(np.int64).max  # a slot that is free, or everybody else's
    ids, rows = ids[has_id], rows[has_id]
    if len(rows) and (rows.min() < 0 or rows.max() >= num_rows):
        raise ConfigError(f"table '{table.name}': {source[_MANAGED[1]]} in the file names rows that are not there")
    if len(np.unique(ids)) != len(ids) or len(np.unique(rows)) != len(rows):
        raise ConfigError(f"table '{table.name}': {source[_MANAGED[0]]} in the file has an id or a row more than once")
    return ids, rows


def _as_words(data: NDArray[np.uint8]) -> NDArray[Any]:
    """The same bytes, as few elements as their width allows."""
    width = next(width for width in (8, 4, 2, 1) if data.shape[1] % width == 0)
    return data.view(f"u{width}")


def _import_dense(
    file: TensorFile, trainer: Trainer, shapes: Mapping[str, tuple[int, ...]], new: Collection[str]
) -> dict[str, str]:
    """Gives the model what the file has, but for what is new; returns parameter → name in the file."""
    state = trainer.model.state_dict()
    found = {}
    others: dict[str, str] = {}
    for name, tensor in state.items():
        source = None if name in new else only(shapes, rf"(?:^|\.){re.escape(name)}$", f"model parameter {name}")
        if source is None:
            continue
        shape = tuple(tensor.shape)
        if shapes[source] != shape:
            others[name] = f"{source} has the shape {shapes[source]}, the configuration's is {shape}"
            continue
        values = file.rows(source, 0, max(1, tensor.shape[0] if tensor.dim() else 1))
        if tensor.is_floating_point() and tensor.dtype != values.dtype:
            check_floating(source, values)
        state[name] = values.reshape(tensor.shape).to(tensor.dtype).clone()
        found[name] = source
    if others:
        raise ConfigError(
            f"in the file {'; '.join(others.values())}. Where these begin anew, say so: "
            + " ".join(f"--new {name}" for name in others)
        )
    trainer.model.load_state_dict(state)
    return found


def _as_bytes(tensor: Tensor, count: int) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return data.reshape(count, -1)
