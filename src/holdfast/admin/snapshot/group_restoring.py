"""Making a group's pool of a snapshot: the parts of as many writers as it had, which share the shards as they did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from holdfast import _core
from holdfast.admin.snapshot.chain import Snapshot
from holdfast.admin.snapshot.restoring import write_dense
from holdfast.admin.snapshot.rows import Rows
from holdfast.group import manifest as manifests
from holdfast.group.founding import DENSE_DIRECTORY, make_dense, make_writer
from holdfast.group.layout import stride_bits
from holdfast.group.manifest import VERSION, Manifest
from holdfast.group.opening import open_together
from holdfast.pools.one_rank import OneRank
from holdfast.pools.opening_options import OpenOptions
from holdfast.pools.read_only import open_untrained

_SCRATCHPAD_BYTES = 16 << 20  # of each writer: nothing is trained


@dataclass(frozen=True, slots=True)
class _GroupHomes:
    """See snapshot.restoring.Homes."""

    manifest: Manifest
    pools: Sequence[_core.Pool]

    def of(self, number: int, rows: Rows) -> Iterator[tuple[_core.Pool, Rows]]:
        entry = self.manifest.tables[number]
        if entry.table_shards == 1:
            yield self.pools[self.manifest.owner_of[entry.first_shard]], rows
            return
        shards = (rows.rows >> np.uint64(stride_bits(entry.num_embeddings, entry.table_shards))).astype(np.int64)
        owners = np.array([self.manifest.owner_of[shard] for shard in range(entry.table_shards)])[shards]
        for owner in np.unique(owners):
            yield self.pools[owner], rows[owners == owner]


@contextmanager
def made_in_group(
    directory: Path, snapshot: Snapshot, group: Manifest, *, log_store: bool, log_bytes: int
) -> Iterator[_GroupHomes]:
    """A new pool of several writers in `directory`, which is empty; all of it is durable when the block ends well."""
    manifest = replace(
        group,
        version=VERSION,
        uuid=manifests.new_uuid(),
        store="log" if log_store else "in_place",
        log_bytes=log_bytes,
        row_checksums=snapshot.row_checksums and not log_store,
        generation=1,
    )
    writers = [manifest.writer_directory(directory, writer) for writer in range(manifest.num_writers)]
    for writer in range(len(writers)):
        make_writer(directory, manifest, writer, begin=snapshot.mark, adopt=False)
    dense = directory / DENSE_DIRECTORY
    make_dense(directory, manifest, begin=snapshot.mark)
    alone = open_untrained(dense)
    try:
        write_dense(alone, snapshot)
    finally:
        alone.close()
    manifests.write(directory, manifest)
    options = OpenOptions(grow_log=False, scratchpad_bytes=_SCRATCHPAD_BYTES)
    with ExitStack() as stack:
        pools, of_dense, _ = open_together(writers, dense, options, OneRank())
        for pool in (*pools, *([] if of_dense is None else [of_dense])):
            stack.callback(pool.close)
        yield _GroupHomes(manifest, pools)
