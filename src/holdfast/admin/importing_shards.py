"""Moving in to a pool of several ranks.

- A pool of one process, made beside it and removed afterwards, has the tables and the dense part that a run begins
  with, and no row. What a restore would cut of a snapshot of it takes the rows of the file.
- So rows are written once, and each has the place that a restore of the same import would have given it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from holdfast.admin.importing import ImportSummary, check_place, import_dense, import_rows
from holdfast.admin.snapshot import Snapshot, open_chain, take_snapshot
from holdfast.admin.snapshot.cutting import cut, move_of
from holdfast.admin.snapshot.output import new_directory, scratch_directory
from holdfast.admin.snapshot.restoring import made
from holdfast.admin.snapshot.rows import Rows
from holdfast.admin.tensor_files import Progress, TensorFile
from holdfast.group.options import GroupConfig
from holdfast.pools.directory import wants_log_store
from holdfast.pools.machine import default_scratchpad_bytes
from holdfast.pools.read_only import new_log_bytes
from holdfast.run.assembly import assemble
from holdfast.run.sections import PoolConfig, RunConfig

_LOG_BYTES = 1 << 20  # of the pool beside it: nothing is trained


def import_in_shards(
    file: TensorFile,
    config: RunConfig,
    directory: Path,
    shards: GroupConfig,
    *,
    new: Collection[str] = (),
    on_bytes: Progress | None = None,
) -> ImportSummary:
    """Makes a pool for the run `config` that is cut into `shards`, as importing.import_pool does one that is not.

    Raises what that does, and ConfigError where tables cannot be cut so, or the keys of one have no room.
    """
    check_place(directory)
    of_one = replace(config, pool=replace(config.pool, medium="block", log_bytes=_LOG_BYTES, log=None))
    with (
        new_directory(directory, "importing") as partial,
        scratch_directory(directory.parent, directory.name) as scratch,
    ):
        alone = scratch / "pool"
        with assemble(of_one, alone) as trainer:
            sources, summary = import_dense(file, trainer, new)
            trainer.recover()
        take_snapshot(alone, scratch / "snapshot")
        begun = open_chain(scratch / "snapshot")
        whole = _as_of(config.pool, partial, begun[0])
        newest = cut(whole, shards=shards.shards, split_rows=shards.split_rows)
        moves = [move_of(begun, newest, number) for number in range(len(newest.tables))]
        with made(partial, newest, config.pool.medium) as homes:

            def put(number: int, rows: Rows) -> None:
                move = moves[number]
                for core, part in homes.of(number, rows if move is None else move(rows)):
                    core.import_values(number, part.rows, part.data.reshape(-1))

            import_rows(file, alone, sources, put, on_bytes)
    return summary


def _as_of(pool: PoolConfig, directory: Path, begun: Snapshot) -> Snapshot:
    """The snapshot as that of a pool in `directory` that keeps its rows as `pool` says."""
    log_store = wants_log_store(directory, pool.medium)
    scratchpad_bytes = default_scratchpad_bytes() if pool.scratchpad_bytes is None else pool.scratchpad_bytes
    log_bytes = pool.log_bytes or new_log_bytes(log_store, [table.spec for table in begun.tables], scratchpad_bytes)
    store = "log" if log_store else "in_place"
    return replace(begun, store=store, log_bytes=log_bytes, row_checksums=pool.row_checksums)
