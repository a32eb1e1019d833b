"""``holdfast snapshot`` and ``holdfast restore``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import PoolArgument
from holdfast.errors import ConfigError

_NICENESS = 10  # of a copy: processors are for the run, and what that leaves is for the copy

if TYPE_CHECKING:
    from holdfast.admin.snapshot import RestoreSummary


class NewMedium(StrEnum):
    """`holdfast.Pool`'s medium."""

    AUTO = "auto"
    MEMORY = "memory"
    BLOCK = "block"


def snapshot(
    pool: PoolArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The directory to make; it must not be there.")],
    step: Annotated[
        int | None, typer.Option(metavar="N", help="The end of this step: waits until the run comes to it.")
    ] = None,
    since: Annotated[
        Path | None,
        typer.Option(metavar="SNAPSHOT", help="Write only rows that changed since this one; a restore needs both."),
    ] = None,
) -> None:
    """Copy a pool as it is at the end of one step, while a run trains on it; the run does not wait, and has the
    processors first.

    Training overwrites: after a divergence, or on a lost disk, yesterday's model is gone unless it was copied. Take a
    snapshot now and then, on another disk, and `holdfast restore` makes a pool of it that goes on to the bit.

    holdfast snapshot runs/a snapshots/monday  and the day after
    holdfast snapshot runs/a snapshots/tuesday --since snapshots/monday

    The parts of a pool of several ranks are copied as one, where all of them can be reached from here.

    DEST appears when it is complete. A run with a small log may write over what is still to be read: then the copy
    begins anew, and after four times it is an error.
    """
    from holdfast.admin.snapshot import take_snapshot
    from holdfast.train.observe import counting

    os.nice(_NICENESS)
    with counting("copying", None, is_bytes=True) as on_bytes:
        taken = take_snapshot(pool, dest, step=step, since=since, on_bytes=on_bytes)
    what = "rows" if since is None else "rows that changed"
    print(  # noqa: T201
        f"{dest}: step {taken.step}, {taken.rows:,} {what} and {taken.corrections:,} corrections, "
        f"{taken.num_bytes:,} bytes"
    )


def restore(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="A directory that holdfast snapshot made.")],
    pool: Annotated[Path, typer.Argument(metavar="POOL", help="The pool's directory; it must not be there.")],
    medium: Annotated[
        NewMedium, typer.Option(help="How the new pool keeps its rows; auto goes by what POOL's file system is.")
    ] = NewMedium.AUTO,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=ROWS", help="Give a table so many rows, or a table with keys that capacity."),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Cut the pool into so many shards, for a group of ranks; a power of two, as 64.")
    ] = None,
    row_checksums: Annotated[
        bool | None,
        typer.Option(help="Whether rows in place get checksums; a log store's always have. Default: as they had."),
    ] = None,
) -> None:
    """Make a pool of a snapshot: training goes on from it exactly as it did from that step.

    The pool appears when every file was read and holds. A snapshot that was taken with --since needs the one that it
    names, where it was; the whole chain is followed. `holdfast digest` of the new pool is that of the run at that step.
    Of a pool of several ranks it makes as many parts.

    With --rows a table grows, or shrinks by rows that nobody has used: those that it had keep their values and state.
    Its run's file says the same number then. A column whose ids are hashed cannot follow.

    With --shards the new pool is one that any number of ranks opens under torchrun, up to one a shard, whoever made the
    old one: so a run that one process began goes on with several.
    """
    from holdfast.admin.snapshot import open_chain
    from holdfast.group.options import GroupConfig
    from holdfast.run.changes import refuse_rows, saved_config
    from holdfast.state.reproducibility import keep_freed_memory

    keep_freed_memory()
    new_rows = _rows_of(rows or ())
    newest = open_chain(snapshot)[0] if new_rows or shards is not None else None
    saved = None if newest is None else saved_config(newest.dense())
    if newest is not None and saved is not None:
        had = {table.name: table.num_embeddings for table in newest.tables}
        refuse_rows(saved, [name for name, number in new_rows.items() if had.get(name, number) != number])
    group = None
    if shards is not None:
        said = {} if saved is None else saved.get("group", {})
        group = GroupConfig(shards=shards, **{name: said[name] for name in ("split_rows",) if name in said})
    made = _restored(snapshot, pool, medium=medium.value, rows=new_rows, shards=group, row_checksums=row_checksums)
    print(f"{pool}: step {made.step}, {made.rows:,} rows from {made.snapshots} snapshot(s)")  # noqa: T201


@contextmanager
def as_pool(path: Path, beside: Path) -> Iterator[Path]:
    """A pool's directory; of a snapshot's a pool that is made of it in `beside`, and removed afterwards."""
    from holdfast.admin.snapshot.inspection import is_snapshot
    from holdfast.admin.snapshot.output import scratch_directory

    if not is_snapshot(path):
        yield path
        return
    with scratch_directory(beside, "holdfast-restored") as directory:
        _restored(path, directory / "pool")
        yield directory / "pool"


def _restored(snapshot: Path, pool: Path, **options: Any) -> RestoreSummary:
    """What `restore_snapshot` did, which is shown on its way."""
    from holdfast.admin.snapshot import open_chain, restore_snapshot
    from holdfast.train.observe import counting

    total = sum(part.num_bytes for part in open_chain(snapshot))
    with counting("restoring", total, is_bytes=True) as on_bytes:
        return restore_snapshot(snapshot, pool, on_bytes=on_bytes, **options)


def _rows_of(said: Sequence[str]) -> dict[str, int]:
    rows = {}
    for each in said:
        table, is_said, number = each.rpartition("=")
        if not is_said or not table or not number.isdecimal():
            raise ConfigError(f"--rows {each}: say TABLE=ROWS, as in --rows item=2000000")
        rows[table] = int(number)
    return rows
