"""A new pool for a script of one's own, whose tables begin with rows from elsewhere: pretrained vectors, a state_dict.

What is made is there when it is complete. A script that was killed meanwhile makes it anew.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from holdfast.admin.importing import check_place, import_rows, rows_into, sources_of, state_of
from holdfast.admin.importing_shards import LOG_BYTES_BESIDE, beside, cut_from
from holdfast.admin.schema import New, RenamedTensors
from holdfast.admin.snapshot.output import new_directory
from holdfast.admin.tensor_files import Progress, TensorFile, check_plain, open_tensors
from holdfast.errors import ConfigError
from holdfast.group.options import GroupConfig
from holdfast.pools.directory import Medium, exists, is_of_group
from holdfast.pools.optim import RowOptimizerSpec, RowWiseAdagrad
from holdfast.pools.pool import Pool
from holdfast.pools.proving_hook import pool_directory
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.embedding import EmbeddingBagCollection


class _GivenTensors:
    """What import_tables was given, under the names that a file has."""

    def __init__(self, given: Mapping[str, Tensor | Mapping[str, Tensor]]) -> None:
        self._tensors: dict[str, Tensor] = {}
        for table, parts in given.items():
            for part, tensor in parts.items() if isinstance(parts, Mapping) else [("weight", parts)]:
                self._add(table, part, tensor)

    def _add(self, table: str, part: str, tensor: object) -> None:
        if not isinstance(tensor, Tensor):
            raise ConfigError(f"table '{table}': its {part} is a {type(tensor).__name__}, not a tensor")
        room = "embedding_bags" if part in ("weight", "keys") else "optimizer"
        name = f"{room}.{table}.{part}"
        self._tensors[name] = check_plain(name, tensor.detach()).cpu()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        return self._tensors[name][first : first + count]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTables:
    """What an import of tables took, and what it did not use; names are the source's.

    state: of optimizers. Tables without any begin with zeros.
    """

    tables: tuple[str, ...]
    state: tuple[str, ...]
    unused: tuple[str, ...]


def import_tables(
    directory: str | os.PathLike[str],
    tables: Sequence[EmbeddingBagConfig],
    source: str | os.PathLike[str] | Mapping[str, Tensor | Mapping[str, Tensor]],
    *,
    optimizer: RowOptimizerSpec | None = None,
    new: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    seed: int = 0,
    medium: Medium = "auto",
    row_checksums: bool = False,
    group: GroupConfig | None = None,
    exist_ok: bool = False,
    on_bytes: Progress | None = None,
) -> ImportedTables | None:
    """Makes a pool in `directory` whose tables begin with the rows of `source`, at step 0. A script opens it as any
    other, with the same tables and optimizer.

    source: by table its weights, ``[num_embeddings, embedding_dim]`` of any floating dtype, or a mapping: ``weight``;
        of a table with keys ``keys``, int64 ``[num_rows]``, row i's (without them row i has key i); optimizer state
        under the names that ``holdfast export`` gives it. Or a file that ``holdfast export``, safetensors or torch.save
        wrote, with names as ``holdfast import`` wants them: ``...embedding_bags.<table>.weight``. Every table must be
        there, but for those that are new.
    optimizer: of the rows; default: that of EmbeddingBagCollection.
    new: tables that begin with their initial values, whatever the source has of them.
    rename: of tables that have another name in the source, from that name to this one.
    seed, medium, row_checksums: of the pool, see Pool.
    group: how the pool is cut into shards, for several ranks; the script opens it under torchrun with the same.
    exist_ok: return None where there is a pool already, so that a script can say the same in each of its lives.
    on_bytes: is called with how many bytes of rows were taken since the last call.

    Rows that equal their initial value stay untouched. Keys count as updated when the pool begins, all at once: with
    `max_keys` let there be room for them and for the new ones of the first steps, for where there is none all that no
    step has brought by then are left behind together.

    Raises PoolExists, PoolOfGroup under torchrun, and ConfigError that names the table that is missing, has another
    shape, has keys twice, or more than its `max_keys`.
    """
    path = pool_directory(directory)
    if exist_ok and (exists(path) or is_of_group(path)):
        return None
    check_place(path, for_ranks="group=GroupOptions(shards=64)")
    file: TensorFile = _GivenTensors(source) if isinstance(source, Mapping) else open_tensors(Path(source))
    if rename:
        file = RenamedTensors(file, rename)
    begins_anew = New.of(new, [table.name for table in tables], ()).tables
    with ExitStack() as stack:
        partial = stack.enter_context(new_directory(path, "importing"))
        begun = partial if group is None else stack.enter_context(beside(path))
        options: dict[str, Any] = {"seed": seed, "medium": medium, "row_checksums": row_checksums}
        if group is not None:
            options |= {"medium": "block", "log_bytes": LOG_BYTES_BESIDE}
        with Pool(begun, **options) as pool:
            rows = EmbeddingBagCollection(pool, tables, optimizer=RowWiseAdagrad() if optimizer is None else optimizer)
            names = [table.name for table in rows.embedding_bag_configs() if table.name not in begins_anew]
            shapes = file.shapes()
            sources = sources_of(pool.core.tables, shapes, begins_anew)
            if group is None:
                import_rows(file, begun, sources, rows_into(pool.core), on_bytes)
        if group is not None:
            with cut_from(begun, partial, group, medium=medium, row_checksums=row_checksums) as put:
                import_rows(file, begun, sources, put, on_bytes)
    used = {name for source in sources.values() for name in source.values()}
    return ImportedTables(
        tables=tuple(names),
        state=state_of(sources.values()),
        unused=tuple(name for name in shapes if name not in used),
    )
