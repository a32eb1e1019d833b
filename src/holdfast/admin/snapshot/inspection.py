"""What a snapshot holds, without making a pool of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.admin.inspection import describe_spec, size_words
from holdfast.admin.snapshot.chain import Snapshot, open_chain
from holdfast.admin.snapshot.form import DENSE_FILES, LAYERS, MANIFEST, layer_name
from holdfast.pools.directory import exists, is_of_group


def is_snapshot(directory: Path) -> bool:
    """Whether there is a snapshot in `directory`, and no pool."""
    return (directory / MANIFEST).is_file() and not exists(directory) and not is_of_group(directory)


def inspect_snapshot(directory: Path) -> dict[str, Any]:
    """What the manifests of it and of those that it is based on say; no row is read.

    Raises FormatMismatch, Corrupted, BrokenChain.
    """
    chain = open_chain(directory)
    newest = chain[0]
    return {
        "snapshot": str(directory),
        "id": newest.id,
        "pool": newest.pool,
        "step": newest.step,
        "cursor": newest.cursor,
        "row_updates": newest.row_updates,
        "seed": newest.seed,
        "store": newest.store,
        "writers": 1 if newest.group is None else newest.group.num_writers,
        "format_version": newest.version,
        "has_dense_state": DENSE_FILES[0] in newest.files,
        "bytes": newest.num_bytes,
        "chain": [{"path": str(of.path), "id": of.id, "step": of.step, "bytes": of.num_bytes} for of in chain],
        "tables": [_table(newest, number) for number in range(len(newest.tables))],
    }


def describe_snapshot(found: dict[str, Any]) -> Iterator[str]:
    """The same as lines for a person."""
    yield f"{found['snapshot']}: a snapshot of step {found['step']} ({found['cursor']:,} samples)"
    yield f"  of pool {found['pool']}, seed {found['seed']}; format {found['format_version']}, id {found['id']}"
    dense = "with" if found["has_dense_state"] else "without a"
    writers = "" if found["writers"] == 1 else f", of {found['writers']} writers"
    yield f"  {size_words(found['bytes'])}, {dense} dense state{writers}"
    for each in found["chain"][1:]:
        yield f"  based on {each['path']}: step {each['step']}, {size_words(each['bytes'])}"
    width = max(5, *(len(table["name"]) for table in found["tables"]))
    yield ""
    yield f"  {'table':<{width}}  {'rows':>14}  {'dim':>4}  {'dtype':<5}  {'size here':>9}  optimizer"
    for table in found["tables"]:
        yield (
            f"  {table['name']:<{width}}  {table['rows']:>14,}  {table['dim']:>4}  {table['dtype']:<5}  "
            f"{size_words(table['bytes']):>9}  {table['optimizer']}"
        )


def _table(snapshot: Snapshot, number: int) -> dict[str, Any]:
    num_bytes = sum(snapshot.files[layer_name(number, layer)].bytes for layer in LAYERS)
    return describe_spec(snapshot.tables[number].spec) | {"bytes": num_bytes}
