"""``holdfast inspect``, ``verify`` and ``digest``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated

import typer

from holdfast.cli.keeping import as_pool
from holdfast.cli.options import JsonOption, PoolArgument


def inspect(pool: PoolArgument, as_json: JsonOption = False) -> None:
    """What a pool holds and in which state it is, or a snapshot. Works while a run is using the pool."""
    from holdfast.admin.inspection import describe, inspect_pool
    from holdfast.admin.snapshot.inspection import describe_snapshot, inspect_snapshot, is_snapshot

    if is_snapshot(pool):
        found, lines = inspect_snapshot(pool), describe_snapshot
    else:
        found, lines = inspect_pool(pool), describe
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))  # noqa: T201


def verify(
    pool: PoolArgument,
    repair: Annotated[bool, typer.Option("--repair", help="Put right what can be put right without a guess.")] = False,
) -> None:
    """Check every checksum and invariant of a pool; changes nothing. Exit 1 and the reasons if anything is wrong.

    Of a snapshot, every file of it and of those that it is based on is read, as a restore would.

    --repair does this and no more, says what it did, and keeps the bytes that it replaces in POOL.repair-TIME.jsonl
    beside the pool: an epoch record that does not hold is written anew as that of a life that was not closed; the
    older one of two commit records, dense slots or row log checkpoints is emptied, where the rest of the pool shows
    that it is the older one; a log store's commit record is written anew from its row log; touched bits behind a
    table's last row are cleared. All else is left alone, with the reason.
    """
    from holdfast.admin.repair import may_be_repaired, problems_of, repair_pool
    from holdfast.admin.snapshot.inspection import is_snapshot
    from holdfast.errors import ConfigError, Corrupted
    from holdfast.pools.read_only import locked, open_reader

    if is_snapshot(pool):
        if repair:
            raise ConfigError(f"{pool} is a snapshot: --repair is for pools; take another one, or put its files back")
        _verify_snapshot(pool)
        return
    refusals: list[str] = []
    if repair:
        report = repair_pool(pool)
        refusals = report.refusals if report.left else []
        for change in report.done:
            print(f"repaired: {change}")  # noqa: T201
        if report.backup is not None:
            print(f"the bytes that this replaced are in {report.backup}")  # noqa: T201
    with locked(pool):
        problems = problems_of(pool)
    if problems:
        lines = [*problems, *(f"left alone: {refusal}" for refusal in refusals)]
        if repair or not may_be_repaired(pool):
            lines.append("restore a snapshot (holdfast restore), or a copy of the pool from before the damage")
        else:
            lines.append("holdfast verify --repair puts right what can be put right without a guess")
        raise Corrupted(f"{pool} is damaged:\n  " + "\n  ".join(lines))
    reader = open_reader(pool)
    state = "closed cleanly" if reader.clean else "not closed cleanly; the next start recovers it"
    print(f"{pool}: whole, at step {reader.commit['step']}, {state}")  # noqa: T201


def _verify_snapshot(path: Path) -> None:
    from holdfast.admin.snapshot import open_chain
    from holdfast.train.observe import counting

    chain = open_chain(path)
    with counting("reading", sum(part.num_bytes for part in chain), is_bytes=True) as on_bytes:
        for part in chain:
            part.verify(on_bytes)
    based = "" if len(chain) == 1 else f", with the {len(chain) - 1} that it is based on"
    print(f"{path}: whole, a snapshot of step {chain[0].step}{based}")  # noqa: T201


def digest(pool: PoolArgument, as_json: JsonOption = False) -> None:
    """SHA-256 of a pool's logical state: step, dense state, and every row that is not at its initial value.

    Two pools have one digest exactly when training would go on alike from them, however their bytes are stored. So the
    states of torch's, Python's and NumPy's random numbers count, drawn from or not: two runs have one digest where all
    three are seeded alike. A pool that was not closed cleanly is recovered first; of a snapshot a pool is made in
    TMPDIR, and removed. --json shows the parts too, and so where two pools differ.
    """
    with as_pool(pool, Path(gettempdir())) as directory:
        _digest(directory, as_json=as_json)


def _digest(pool: Path, *, as_json: bool) -> None:
    from holdfast.admin.digest import dense_parts, digest_pool
    from holdfast.admin.row_order import rows_in_order
    from holdfast.pools.read_only import at_rest
    from holdfast.train.observe import counting

    with at_rest(pool) as (reader, recovery), counting("rows read", None) as on_rows:
        if recovery is not None and not recovery.clean:
            print(f"{pool}: was not closed cleanly, recovered to step {recovery.step}", file=sys.stderr)  # noqa: T201
        with rows_in_order(pool, on_rows=on_rows) as ordered:
            found = digest_pool(reader, None if ordered else on_rows, ordered)
        parts_of_dense = dense_parts(reader) if as_json else {}
    if not as_json:
        print(found.whole)  # noqa: T201
        return
    parts = {
        "digest": found.whole,
        "step": found.step,
        "cursor": found.cursor,
        "row_updates": found.row_updates,
        "dense": found.dense,
        "dense_parts": parts_of_dense,
        "rows": found.rows_counted,
        "tables": found.tables,
    }
    print(json.dumps(parts, indent=2))  # noqa: T201
