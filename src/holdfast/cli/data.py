"""``holdfast data synth`` and ``holdfast data convert``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.options import OneConfigArgument, OverwriteOption, SetOption, add_command, read_run

if TYPE_CHECKING:
    from holdfast.data import SyntheticConfig

app = typer.Typer(no_args_is_help=True, help="Make and convert training data.")


class Encoding(StrEnum):
    """How categories are written."""

    hex = "hex"
    text = "text"


class OnBadRow(StrEnum):
    """What becomes of a malformed line."""

    error = "error"
    skip = "skip"


def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="OUT.tsv (Criteo's text form) or OUT.parquet.")],
    samples: Annotated[int, typer.Option(min=1, help="How many.")] = 100_000,
    scale: Annotated[
        float, typer.Option(help="Criteo's shape: its 26 tables' cardinalities times this.", min=0.0)
    ] = 0.01,
    tables: Annotated[
        int | None, typer.Option(min=1, help="Instead of Criteo's shape: this many alike tables.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --tables: rows of each.")] = 100_000,
    lookups: Annotated[int, typer.Option(min=1, help="With --tables: ids in each bag.")] = 1,
    dense: Annotated[int, typer.Option(min=0, help="With --tables: dense columns.")] = 13,
    signal: Annotated[float, typer.Option(help="How predictable clicks are: deviation of the planted logit.")] = 1.65,
    zipf: Annotated[float, typer.Option(help="Skew of the ids; 0 is uniform.")] = 1.05,
    drift: Annotated[
        float, typer.Option(min=0.0, help="Items born a sample and table; then ids are keys of items that come and go.")
    ] = 0.0,
    texts: Annotated[bool, typer.Option("--texts", help="A text for each id, such as C1-0000000000000a3f.")] = False,
    first: Annotated[int, typer.Option(min=0, help="Number of the first sample: with --drift, the time.")] = 0,
    model_seed: Annotated[int, typer.Option(min=0, help="Which model is planted, and which rows are hot.")] = 0,
    sample_seed: Annotated[int, typer.Option(min=0, help="Which samples are drawn; another one for validation.")] = 0,
    overwrite: OverwriteOption = False,
) -> None:
    """Generate clicks with a planted model: Zipf-skewed ids, so that an AUC means something."""
    from dataclasses import replace

    from holdfast.data import criteo_shape, uniform_shape, write_synthetic
    from holdfast.train.observe import counting_up_to

    config: SyntheticConfig
    if tables is None:
        config = criteo_shape(num_samples=samples, scale=scale, model_seed=model_seed, sample_seed=sample_seed)
    else:
        config = uniform_shape(
            num_samples=samples,
            num_tables=tables,
            rows_per_table=rows,
            lookups_per_bag=lookups,
            num_dense=dense,
            model_seed=model_seed,
            sample_seed=sample_seed,
        )
    config = replace(config, signal=signal, zipf_exponent=zipf, drift=drift, first_sample=first)
    with counting_up_to("generating") as progress:
        written = write_synthetic(config, out, texts=texts, overwrite=overwrite, progress=progress)
    print(f"{out}: {written:,} samples")  # noqa: T201


def convert(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN.tsv...", help="Criteo text files, in order.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="The file to write.")],
    on_bad_row: Annotated[
        OnBadRow, typer.Option(help="A malformed line: stop and name it, or count and skip it.")
    ] = OnBadRow.error,
    encoding: Annotated[Encoding, typer.Option(help="Categories: Criteo's hexadecimal, or any text.")] = Encoding.hex,
    keys: Annotated[bool, typer.Option("--keys", help="Of texts: their keys, for tables with keys.")] = False,
    row_group: Annotated[int, typer.Option(min=1, help="Samples that shuffling moves as a whole.")] = 16_384,
    overwrite: OverwriteOption = False,
) -> None:
    """Convert raw Criteo text to Parquet: smaller, quicker to open, and bad lines are found before training.

    The values stay what they are; hash sizes and transforms are chosen when the file is read.
    """
    from holdfast.data import CriteoTsvConfig, convert_criteo
    from holdfast.train.observe import counting_up_to

    config = CriteoTsvConfig(paths=inputs, on_bad_row=on_bad_row.value, categorical_encoding=encoding.value, keys=keys)
    with counting_up_to("converting") as progress:
        summary = convert_criteo(config, out, row_group_samples=row_group, overwrite=overwrite, progress=progress)
    print(f"{out}: {summary.num_samples:,} samples")  # noqa: T201
    if summary.bad_rows.count:
        print(summary.bad_rows.summary())  # noqa: T201


def texts(
    config_path: OneConfigArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="The file to write.")],
    overwrite: OverwriteOption = False,
    overrides: SetOption = None,
) -> None:
    """Write each text of a run's columns with keys once, beside its key: feature, key, text.

    So an export's keys get their names. Texts that share a key, and so a row, are counted and named.
    """
    from holdfast.data.output import check_output
    from holdfast.data.texts import write_texts
    from holdfast.errors import ConfigError
    from holdfast.train.observe import counting_up_to

    check_output(out, overwrite=overwrite, inputs=[config_path])
    data = read_run([config_path], overrides).data.parquet
    if data is None:
        raise ConfigError("data.parquet: texts are read from Parquet files alone, and the run has none")
    with counting_up_to("reading texts") as progress:
        summary = write_texts(data, out, overwrite=overwrite, progress=progress)
    print(f"{out}: {', '.join(f'{name}: {count:,} texts' for name, count in summary.counts.items())}")  # noqa: T201
    for (name, key), same in summary.shared.items():
        shown = ", ".join(repr(text.decode(errors="backslashreplace")) for text in same)
        print(f"{name}: {len(same)} texts share the key {key}, and its row: {shown}")  # noqa: T201
    if not summary.shared:
        print("no two texts share a key")  # noqa: T201


add_command(app, "synth", synth)
add_command(app, "convert", convert)
add_command(app, "texts", texts)
