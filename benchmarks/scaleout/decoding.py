"""What decoding costs a trainer: one alone, and each of several, with one lane and with eight.

    cd benchmarks && python -m scaleout.decoding [--quick]     # rm1's batches as Parquet; ten minutes

A reader takes the batches of its part as fast as they come, with one worker: a run that waits for its loader alone.
Trainers of a group read at the same time, each in a process of its own. Writes reports/scaleout/loader/results.json and
its part of the page above; exit status 1 where one of two trainers takes more than 0.6 of the processor time of one
alone, or of the row groups.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import report_page
from holdfast.data import Loader, ParquetConfig, ParquetSource, SparseColumn
from holdfast.data.block import FixedBags, SampleBlock
from machine import describe, in_words, others_busy
from markdown_table import markdown_table
from peers.batches import make_batches
from peers.shapes import RM1

_FOLDER = Path(__file__).parents[1]
_BAR = 0.6
_LANES = 8
_ROW_GROUP = 5_000  # 14 MB; no multiple of a batch, so that lanes end within row groups
_GROUPS = (1, 2, 4)  # trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a trainer's reading took: processor time of its process, memory at most, blocks and bytes decoded."""

    cpu_s: float
    wall_s: float
    resident_mb: float
    blocks: int
    decoded_mb: float


class _CountingSource(ParquetSource):
    """Parquet files that know what was decoded of them. One worker reads."""

    def __init__(self, config: ParquetConfig) -> None:
        super().__init__(config)
        self.blocks = self.decoded_bytes = 0

    def read_block(self, index: int) -> SampleBlock:
        block = super().read_block(index)
        self.blocks += 1
        self.decoded_bytes += block.labels.nbytes + block.dense.nbytes
        self.decoded_bytes += sum(
            bags.ids.nbytes + (0 if isinstance(bags, FixedBags) else bags.offsets.nbytes) for bags in block.bags
        )
        return block


def _write(path: Path, num_row_groups: int) -> None:
    """rm1's batches, one after the other, in row groups of `_ROW_GROUP` samples."""
    pending: pa.Table | None = None
    writer = None
    written = 0
    for table in _tables():
        pending = table if pending is None else pa.concat_tables([pending, table])
        writer = writer or pq.ParquetWriter(path, table.schema, use_dictionary=False)
        while pending.num_rows >= _ROW_GROUP and written < num_row_groups:
            writer.write_table(pending.slice(0, _ROW_GROUP).combine_chunks())
            pending, written = pending.slice(_ROW_GROUP), written + 1
        if written == num_row_groups:
            break
    assert writer is not None
    writer.close()


def _tables() -> Iterator[pa.Table]:
    seed = 0
    while True:
        seed += 1
        (batch,) = make_batches(RM1, 1, seed=seed)
        bags = batch.ids.numpy().reshape(RM1.num_tables, RM1.batch_size * RM1.lookups_per_bag)
        offsets = np.arange(RM1.batch_size + 1, dtype=np.int32) * RM1.lookups_per_bag
        columns = {"label": batch.labels.numpy().astype(np.int8)}
        columns |= {f"d{number}": column for number, column in enumerate(batch.dense.numpy().T.copy())}
        yield pa.table(
            columns | {f"f{table}": pa.ListArray.from_arrays(offsets, ids) for table, ids in enumerate(bags)}
        )


def _read(path: Path, part: tuple[int, int], lanes: int) -> Reading:
    """One trainer's, in this process."""
    sparse = {
        f"f{table}": SparseColumn(column=f"f{table}", num_embeddings=RM1.num_embeddings, hashing="identity")
        for table in range(RM1.num_tables)
    }
    dense = tuple(f"d{number}" for number in range(RM1.num_dense))
    source = _CountingSource(ParquetConfig(paths=[path], label="label", dense=dense, sparse=sparse))
    with Loader(source, batch_size=RM1.batch_size, seed=1, part=part, lanes=lanes) as loader:
        batches = source.num_samples // RM1.batch_size
        for _ in islice(loader, batches // 4):  # from then on as many blocks are ahead as at the end
            pass
        wall, cpu, blocks, decoded = time.perf_counter(), time.process_time(), source.blocks, source.decoded_bytes
        for _ in islice(loader, batches):
            pass
        return Reading(
            cpu_s=time.process_time() - cpu,
            wall_s=time.perf_counter() - wall,
            resident_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            blocks=source.blocks - blocks,
            decoded_mb=(source.decoded_bytes - decoded) / 1e6,
        )


def _read_together(path: Path, parts: int, lanes: int) -> list[Reading]:
    """Of all trainers of a group, each in a process of its own."""
    command = [sys.executable, "-m", "scaleout.decoding", "--read", str(path), "--lanes", str(lanes)]
    processes = [
        subprocess.Popen([*command, "--part", str(part), str(parts)], stdout=subprocess.PIPE, cwd=_FOLDER)
        for part in range(parts)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"a reader failed: {[process.returncode for process in processes]}")
    return [Reading(**json.loads(output)) for output in outputs]


def _measure(path: Path, rounds: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        for lanes in (1, _LANES):
            for parts in _GROUPS:
                busy = others_busy()["cpus"]
                readings = _read_together(path, parts, lanes)
                told = [{name: getattr(reading, name) for name in Reading.__dataclass_fields__} for reading in readings]
                about = {"round": number, "lanes": lanes, "trainers": parts, "others_cpus": busy}
                found.append({**about, "readings": told})
                print(f"lanes {lanes}, {parts} trainers: {[round(reading.cpu_s, 1) for reading in readings]} s of CPU")
    return found


def _worst(results: dict[str, Any], lanes: int, trainers: int, field: str) -> float:
    """Of a group's trainers, in the round that others disturbed least: what they do to the caches only adds."""
    of_rounds = [each for each in results["found"] if (each["lanes"], each["trainers"]) == (lanes, trainers)]
    return float(min(max(reading[field] for reading in each["readings"]) for each in of_rounds))


def decoding_table(results: dict[str, Any]) -> list[str]:
    """Of results.json. Alone is with one lane."""
    batches = results["batches"]
    alone = {field: _worst(results, 1, 1, field) for field in Reading.__dataclass_fields__}
    rows = []
    for lanes in (1, _LANES):
        for trainers in _GROUPS:
            got = {field: _worst(results, lanes, trainers, field) for field in alone}
            rows.append(
                (
                    f"{trainers}",
                    f"{lanes}",
                    f"{1e3 * got['cpu_s'] / batches:.1f}",
                    f"{got['cpu_s'] / alone['cpu_s']:.2f}",
                    f"{got['blocks']:.0f}",
                    f"{got['blocks'] / alone['blocks']:.2f}",
                    f"{got['decoded_mb'] / batches:.2f}",
                    f"{batches / got['wall_s']:.0f}",
                    f"{got['resident_mb']:,.0f}",
                )
            )
    head = ["trainers", "lanes", "CPU of a trainer, ms a batch", "of one alone", "row groups decoded", "of one alone"]
    head += ["MB decoded a batch", "batches/s, the slowest", "resident MB"]
    return markdown_table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scaleout.decoding", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, fewer samples; writes to runs/bench")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--lanes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read is not None:
        reading = _read(given.read, tuple(given.part), given.lanes)
        json.dump({name: getattr(reading, name) for name in Reading.__dataclass_fields__}, sys.stdout)
        return
    row_groups, rounds = (16, 1) if given.quick else (48, given.rounds)
    batches = row_groups * _ROW_GROUP // RM1.batch_size
    with tempfile.TemporaryDirectory(prefix="holdfast-decoding-") as folder:
        path = Path(folder) / "rm1.parquet"
        _write(path, row_groups)
        file_bytes = path.stat().st_size
        found = _measure(path, rounds)
    machine = describe(Path("/dev/shm"), Path("/tmp"))
    results = {"machine": machine, "batches": batches, "found": found}
    cpu, blocks = (_worst(results, _LANES, 2, what) / _worst(results, 1, 1, what) for what in ("cpu_s", "blocks"))
    busy = max(each["others_cpus"] for each in found)
    what = (
        f"`cd benchmarks && python -m scaleout.decoding`: rm1's batches of {RM1.batch_size} samples as one Parquet "
        f"file of {row_groups} row groups of {_ROW_GROUP:,} ({file_bytes / 1e6:,.0f} MB), read for "
        f"an epoch ({batches} batches) as fast as they come, with one worker a trainer, all trainers at "
        f"once. Of a group's trainers the one that takes most; the least of {rounds} round{'s' if rounds > 1 else ''}."
    )
    where = (
        f"{in_words(machine)}. Others used up to {busy:.1f} CPUs "
        "before a measurement: batches/s say little where that is more than noise, processor time and row groups do."
    )
    outcome = (
        f"Of two trainers with {_LANES} lanes each takes at most {cpu:.2f} of the processor time of one alone, and "
        f"decodes at most {blocks:.2f} of its row groups (bar: {_BAR} of either)."
    )
    lines = ["# What decoding costs a trainer", "", what, "", where, "", *decoding_table(results), outcome]
    directory = _FOLDER.parent / "runs/bench/scaleout/loader" if given.quick else _FOLDER / "reports/scaleout/loader"
    directory.mkdir(parents=True, exist_ok=True)
    report_page.write(directory, "\n".join(lines))
    (directory / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(lines))
    sys.exit(0 if max(cpu, blocks) <= _BAR else 1)


if __name__ == "__main__":
    main()
