"""Moving in to a pool of several ranks.

- A pool of one process, made beside it and removed afterwards, has the tables and the dense part that a run begins
  with, and no row. What a restore would cut of a snapshot of it takes the rows of the file.
- So rows are written once, and each has the place that a restore of the same import would have given it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from holdfast.admin.importing import ImportSummary, Put, check_place, import_dense, import_rows
from holdfast.admin.snapshot import open_chain, take_snapshot
from holdfast.admin.snapshot.cutting import cut, move_of
from holdfast.admin.snapshot.output import new_directory, scratch_directory
from holdfast.admin.snapshot.restoring import made
from holdfast.admin.snapshot.rows import Rows
from holdfast.admin.tensor_files import Progress, TensorFile
from holdfast.group.options import GroupConfig
from holdfast.pools.directory import Medium, wants_log_store
from holdfast.pools.machine import default_scratchpad_bytes
from holdfast.pools.read_only import new_log_bytes
from holdfast.run.assembly import assemble
from holdfast.run.sections import RunConfig

LOG_BYTES_BESIDE = 1 << 20  # nothing is trained there


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
    check_place(directory, for_ranks="--shards 64")
    options = config.pool
    of_one = replace(config, pool=replace(options, medium="block", log_bytes=LOG_BYTES_BESIDE, log=None))
    with new_directory(directory, "importing") as partial, beside(directory) as begun:
        with assemble(of_one, begun) as trainer:
            sources, summary = import_dense(file, trainer, new)
            trainer.recover()
        with cut_from(
            begun,
            partial,
            shards,
            medium=options.medium,
            row_checksums=options.row_checksums,
            log_bytes=options.log_bytes,
            scratchpad_bytes=options.scratchpad_bytes,
        ) as put:
            import_rows(file, begun, sources, put, on_bytes)
    return summary


@contextmanager
def beside(directory: Path) -> Iterator[Path]:
    """Where the pool of one process may be made, and what comes of it, until the block ends."""
    with scratch_directory(directory.parent, directory.name) as scratch:
        yield scratch / "pool"


@contextmanager
def cut_from(
    begun: Path,
    directory: Path,
    shards: GroupConfig,
    *,
    medium: Medium,
    row_checksums: bool,
    log_bytes: int | None = None,
    scratchpad_bytes: int | None = None,
) -> Iterator[Put]:
    """A new pool in `directory`, which is empty: that of one process in `begun`, which has no rows yet, in shards.
    Gives what takes its rows; all of it is durable when the block ends well. The rest as in `holdfast.Pool`."""
    snapshot = begun.with_name("snapshot")
    take_snapshot(begun, snapshot)
    chain = open_chain(snapshot)
    log_store = wants_log_store(directory, medium)
    if log_bytes is None:
        room = default_scratchpad_bytes() if scratchpad_bytes is None else scratchpad_bytes
        log_bytes = new_log_bytes(log_store, [table.spec for table in chain[0].tables], room)
    whole = replace(chain[0], row_checksums=row_checksums)
    newest = cut(whole, shards=shards.shards, split_rows=shards.split_rows)
    moves = [move_of(chain, newest, number) for number in range(len(newest.tables))]
    with made(directory, newest, log_store=log_store, log_bytes=log_bytes) as homes:

        def put(number: int, rows: Rows) -> None:
            move = moves[number]
            for core, part in homes.of(number, rows if move is None else move(rows)):
                core.import_values(number, part.rows, part.data.reshape(-1))

        yield put
