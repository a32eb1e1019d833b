"""``holdfast export`` and ``holdfast import``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli.keeping import as_pool
from holdfast.cli.options import OneConfigArgument, OverwriteOption, PoolArgument, PoolOption, SetOption, read_run
from holdfast.errors import ConfigError


def export(
    pool: PoolArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="The file to write: .safetensors, or .parquet or .arrow for one table."),
    ],
    overwrite: OverwriteOption = False,
    table: Annotated[
        str | None, typer.Option(help="For .parquet and .arrow, where the pool has more than one table.")
    ] = None,
) -> None:
    """Write a pool's tables, optimizer state and model to safetensors, or one table's vectors to Parquet or Arrow.

    Names in safetensors are TorchRec's: embedding_bags.<table>.weight, optimizer.<table>.<state>, model.<name>. Columns
    of a table are key (or row) and vector, of what was trained. Streams, so tables may be of any size; the file appears
    when it is complete. Of a snapshot, which a run may go on beside, a pool is made next to OUT first, and removed.
    """
    from holdfast.admin.exporting_table import SUFFIXES
    from holdfast.data.output import check_output

    is_table = table is not None or out.suffix in SUFFIXES
    if not is_table and out.suffix != ".safetensors":
        raise ConfigError(
            f"export: the suffix of {out} says neither safetensors (.safetensors), nor, for one table, Parquet "
            "(.parquet) or Arrow (.arrow)"
        )
    check_output(out, overwrite=overwrite)  # before rows are restored, or put in order
    with as_pool(pool, out.parent) as directory:
        if is_table:
            _export_table(directory, out, table, overwrite=overwrite)
        else:
            _export_pool(directory, out, overwrite=overwrite)


def _export_pool(pool: Path, out: Path, *, overwrite: bool) -> None:
    from holdfast.admin.exporting import export_bytes, export_pool
    from holdfast.admin.row_order import rows_in_order
    from holdfast.pools.read_only import at_rest
    from holdfast.train.observe import counting

    with (
        at_rest(pool) as (reader, recovery),
        counting("exporting", export_bytes(reader), is_bytes=True) as on_bytes,
    ):
        if recovery is not None and not recovery.clean:
            print(f"{pool}: was not closed cleanly, recovered to step {recovery.step}", file=sys.stderr)  # noqa: T201
        with rows_in_order(pool, out.parent) as ordered:
            total = export_pool(reader, out, overwrite=overwrite, on_bytes=on_bytes, ordered=ordered)
        step = reader.commit["step"]
    print(f"{out}: {total:,} bytes, step {step}")  # noqa: T201


def _export_table(pool: Path, out: Path, name: str | None, *, overwrite: bool) -> None:
    from holdfast.admin.exporting_table import export_table, number_of, table_bytes
    from holdfast.pools.read_only import at_rest
    from holdfast.train.observe import counting

    with at_rest(pool) as (reader, _):
        number = number_of(reader, name)
        with counting("exporting", table_bytes(reader, number), is_bytes=True) as on_bytes:
            num_rows = export_table(reader, number, out, overwrite=overwrite, on_bytes=on_bytes)
        name, step = reader.tables[number].name, reader.commit["step"]
    print(f"{out}: {num_rows:,} rows of table {name}, step {step}")  # noqa: T201


def import_(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="IN...",
            help="A .safetensors file, a .pt file of torch.save, or the folder of a dump of dynamicemb.",
        ),
    ],
    config_path: OneConfigArgument,
    pool: PoolOption,
    new: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A table, or a module or parameter of the model, that begins anew."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="The files have table (or module, parameter) NEW as OLD."),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(help="Cut the new pool into so many shards, for a group of ranks; a power of two, as 64."),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Make a new pool from a state_dict with TorchRec's names, or what dynamicemb dumped, so that a running project can
    move in.

    Every table of the configuration is taken from a name that ends in embedding_bags.<table>.weight, or else in
    embeddings.<table>.weight; the dense part from the model's own names where they are there. Of a .pt file only
    tensors and plain containers are read. A folder is what DynamicEmbDump wrote, of any number of ranks; the dense part
    may come from a file beside it.

    With --new and --rename a pool gets another schema: export the one of before, and import it under the new
    configuration. What the files have and the configuration does not is left out, and named.

    With --shards the pool is one that any number of ranks opens under torchrun, up to one a shard.
    """
    from holdfast.admin.dynamicemb_dump import DynamicembDump
    from holdfast.admin.importing import import_pool, table_bytes
    from holdfast.admin.importing_shards import import_in_shards
    from holdfast.admin.schema import RenamedTensors
    from holdfast.admin.tensor_files import JoinedFiles, TensorFile, open_tensors
    from holdfast.pools.directory import some_of
    from holdfast.train.observe import counting

    config = read_run([config_path], overrides)
    rowwise = config.embedding.optimizer == "rowwise_adagrad"
    tensors: TensorFile = JoinedFiles(
        {path: DynamicembDump(path, rowwise=rowwise) if path.is_dir() else open_tensors(path) for path in files}
    )
    if rename:
        tensors = RenamedTensors(tensors, _renames(rename))
    with counting("importing", table_bytes(tensors), is_bytes=True) as on_bytes:
        if shards is None:
            summary = import_pool(tensors, config, pool, new=new or (), on_bytes=on_bytes)
        else:
            group = replace(config.group, shards=shards)
            summary = import_in_shards(tensors, config, pool, group, new=new or (), on_bytes=on_bytes)
    state = f"{len(summary.state)} parts of optimizer state" if summary.state else "no optimizer state"
    print(f"{pool}: {summary.tables} tables, {state}, {len(summary.dense)} dense parameters")  # noqa: T201
    for what, names in (
        ("new", summary.new),
        ("kept at their initial value", summary.dense_missing),
        ("not used", summary.unused),
    ):
        if names:
            print(f"  {what}: {some_of(names, 8)}")  # noqa: T201


def _renames(said: Sequence[str]) -> dict[str, str]:
    renames = {}
    for each in said:
        old, _, new = each.partition("=")
        if not old or not new or old in renames:
            raise ConfigError(f"--rename {each}: say OLD=NEW, each OLD once, as in --rename item=product")
        renames[old] = new
    return renames
