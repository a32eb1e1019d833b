"""What a pool is made of, as data and as text. Takes no lock that a run would notice; the pool may be in use."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast import _core
from holdfast.admin.by_key import first_admissions, keyed_rows
from holdfast.pools.directory import is_of_group
from holdfast.pools.log_medium import place_of_log
from holdfast.pools.optim import OPTIMIZERS
from holdfast.pools.read_only import PoolReader, check_exists, is_in_use, layout_of, medium_words
from holdfast.pools.tables import DTYPES, POOLINGS

_CHUNK_ROWS = 1 << 20


def inspect_pool(directory: Path) -> dict[str, Any]:
    """Plain values, as ``holdfast inspect --json`` prints them; sizes in bytes, apparent and on disk."""
    check_exists(directory)
    in_use = is_in_use(directory)
    if is_of_group(directory):
        from holdfast.admin.group_inspection import inspect_group

        return inspect_group(directory, in_use=in_use)
    reader = _core.Reader(str(directory))
    found = describe_pool(directory, reader, in_use=in_use, logs_in=[directory], dense_in=directory)
    found["recovery"] = _recovery(reader, in_use, found["step"], found["dense_step"])
    found["tables"] = [
        describe_table(directory, table, number) | of_rows(reader, number, count_touched(reader, number))
        for number, table in enumerate(reader.tables)
    ]
    return found


def of_rows(reader: PoolReader, number: int, num_touched: int) -> dict[str, Any]:
    """How many of a table's rows were touched; of a table with keys: how many have rows, how many of these are not
    trained yet, and how many rows are those of keys that were left behind."""
    table = reader.tables[number]
    if not table.keys:
        return {"touched_rows": num_touched, "keys": None}
    _, records = keyed_rows(reader, number)
    keys = {
        "live": len(records),
        "not_admitted": int((records["updates"] < first_admissions(reader, number, records["key"])).sum()),
        "left_behind": num_touched - len(records),
    }
    return {"touched_rows": num_touched, "keys": keys}


def describe_pool(
    directory: Path, reader: PoolReader, *, in_use: bool, logs_in: list[Path], dense_in: Path
) -> dict[str, Any]:
    """What is said of any pool, whatever keeps its rows; recovery and tables are left empty."""
    header, commit = reader.header, reader.commit
    dense = reader.dense_state()
    dense_step = None if dense is None else dense[0]
    return {
        "pool": str(directory),
        "uuid": str(uuid.UUID(bytes=header["uuid"])),
        "format_version": header["format_version"],
        "created": dt.datetime.fromtimestamp(header["created_unix_ns"] / 1e9, dt.UTC).isoformat(timespec="seconds"),
        "level": header["level"],
        "medium": medium_words(reader),
        "store": header["store"],
        "row_checksums": header["store"] == "log" or header["row_checksums"],
        "seed": header["seed"],
        "shards": header["num_shards"],
        "writers": header["num_writers"],
        "epoch": reader.epoch,
        "in_use": in_use,
        "clean": reader.clean,
        "step": commit["step"],
        "dense_step": dense_step,
        "cursor": commit["cursor"],
        "row_updates": commit["row_updates"],
        "recovery": {},
        "log": {
            "bytes": log_bytes(*logs_in),
            "directories": sorted({str(place_of_log(where)) for where in logs_in}),
            "bytes_used": reader.log_bytes_used,
            "merged_step": reader.merged_step,
        },
        "dense": {
            "bytes": None if dense is None else len(dense[1]) + len(dense[2]),
            "bytes_on_disk": _on_disk(sorted(dense_in.glob("dense-*"))),
        },
        "tables": [],
        "bytes": _apparent(_files(directory)),
        "bytes_on_disk": _on_disk(_files(directory)),
    }


def describe(found: dict[str, Any]) -> Iterator[str]:
    """The same as lines for a person."""
    state = "in use" if found["in_use"] else "closed cleanly" if found["clean"] else "not closed cleanly"
    yield f"{found['pool']}: {state}; on {found['medium']}"
    yield f"  made {found['created']}, format {found['format_version']}, seed {found['seed']}, id {found['uuid']}"
    dense = (
        "none" if found["dense_step"] is None else f"step {found['dense_step']}, {size_words(found['dense']['bytes'])}"
    )
    yield f"  rows at step {found['step']} ({found['cursor']:,} samples), dense state: {dense}; epoch {found['epoch']}"
    yield f"  recovery: {found['recovery']['would']}"
    log = found["log"]
    elsewhere = [where for where in log["directories"] if not Path(where).is_relative_to(found["pool"])]
    place = f" (in {', '.join(elsewhere)})" if elsewhere else ""
    if log["merged_step"] is None:
        yield f"  log {size_words(log['bytes'])}, {size_words(log['bytes_used'])} of it needed by recovery"
    else:
        yield (
            f"  row log {size_words(log['bytes'])}{place}, {size_words(log['bytes_used'])} of it in use, merged up "
            f"to step {log['merged_step']}"
        )
    rows = "every row has a checksum" if found["row_checksums"] else "rows have no checksums"
    yield f"  {rows}"
    yield f"  size {size_words(found['bytes'])}, on disk {size_words(found['bytes_on_disk'])}"
    if "group" in found:
        from holdfast.admin.group_inspection import describe_group

        yield from describe_group(found["group"])
    width = max(5, *(len(table["name"]) for table in found["tables"]))
    yield ""
    yield (
        f"  {'table':<{width}}  {'rows':>14}  {'touched':>12}  {'dim':>4}  {'dtype':<5}  {'size':>9}  {'on disk':>9}  "
        f"{'optimizer':<22}  {'lies in' if 'group' in found else ''}".rstrip()
    )
    for table in found["tables"]:
        yield (
            f"  {table['name']:<{width}}  {table['rows']:>14,}  {table['touched_rows']:>12,}  {table['dim']:>4}  "
            f"{table['dtype']:<5}  {size_words(table['bytes']):>9}  {size_words(table['bytes_on_disk']):>9}  "
            f"{table['optimizer']:<22}  {table.get('lies_in', '')}".rstrip()
        )

    for table in found["tables"]:
        if keys := table.get("keys"):
            yield (
                f"  {table['name']}: {keys['live']:,} keys, of which {keys['not_admitted']:,} only count yet; "
                f"{keys['left_behind']:,} rows of keys that were left behind"
            )


def describe_table(directory: Path, table: _core.TableSpec, number: int) -> dict[str, Any]:
    """But for how many of its rows were touched."""
    files = sorted(directory.glob(f"shard-*/table-{number:04}.*"))
    return describe_spec(table) | {"bytes": _apparent(files), "bytes_on_disk": _on_disk(files)}


def describe_spec(table: _core.TableSpec) -> dict[str, Any]:
    """What a table was made as, in a pool or a snapshot."""
    layout = layout_of(table)
    return {
        "name": table.name,
        "rows": table.num_embeddings,
        "dim": table.embedding_dim,
        "dtype": DTYPES[table.dtype],
        "pooling": POOLINGS[table.pooling],
        "optimizer": OPTIMIZERS[table.optimizer],
        "row_bytes": layout.row_bytes,
    }


def log_bytes(*directories: Path) -> int:
    """Of the logs that lie there."""
    return _apparent([path for where in directories for what in ("log-*", "row-log-*") for path in where.glob(what)])


def count_touched(reader: PoolReader, number: int) -> int:
    """How many rows of the table an update ever wrote."""
    count = first = 0
    while rows := reader.touched_rows(number, first, _CHUNK_ROWS):
        count += len(rows)
        first = rows[-1] + 1
    return count


def _recovery(reader: _core.Reader, in_use: bool, step: int, dense_step: int | None) -> dict[str, Any]:
    exact = step if dense_step is None else min(step, dense_step)
    if in_use:
        would = f"a run is at work; if it died now, training would go on after step {exact}"
    elif reader.clean:
        would = "nothing to do"
    elif reader.unfinished_return is not None:
        step = exact
        would = f"take rows back to step {exact}, as an opening that died had begun to"
    elif exact == step:
        would = f"drop what was in flight after step {step}"
    else:
        would = f"roll rows back from step {step} to {exact} (relaxed: stay at {step} with the dense state of {exact})"
    return {"needed": not reader.clean and not in_use, "exact_step": exact, "relaxed_step": step, "would": would}


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def _apparent(files: list[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _on_disk(files: list[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in files)


def size_words(num_bytes: float) -> str:
    """Bytes as a person reads them, in powers of 1024."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError
