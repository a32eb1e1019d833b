"""Does the simulator tell what OpenEmbedding (Chen et al., ICDE 2023) found: skew, recovery, PMem against DRAM?

    cd benchmarks && python -m openembedding

Simulates every statement and writes its part of reports/papers/report.md. Nothing is fitted to it: devices are of the
paper's Table I and of a data sheet, rows are of the repository's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import report_page
from holdfast_lab.sim.device import Amounts, Memory
from holdfast_lab.sim.library import Library, read_library
from holdfast_lab.sim.model import Model, workload_of
from markdown_table import markdown_table

FOLDER = Path(__file__).parent
REPORT = report_page.REPORTS / "papers/openembedding"
MODEL = "industrial"
STATED_SKEW = ((0.0005, 0.857), (0.001, 0.895), (0.01, 0.957))  # the hottest rows, their part of the accesses
_CORES = 24
_DEFAULT_EXPONENT = 1.05  # of the library's models
_SUMMED_ONE_BY_ONE = 1000

_HEAD = """# OpenEmbedding, simulated unseen

`cd benchmarks && python -m openembedding`: what OpenEmbedding (Chen et al., ICDE 2023) states, beside what the
simulator says. Memories are of its Table I, the disk of its cloud's data sheet; rows of 64 elements with Adagrad's
state and a batch of 4,096 are of its repository's documentation. Features, network, GPU and link are assumed. No value
is fitted, but all statements had been read before: this is less than a prediction. Who reads what at a time is what the
simulator had to be told, and both answers are shown.
"""
_TAIL = """
## What it says

- **Skew.** A law of Zipf whose exponent has the first point is two and three points low at the others: rows of middle
  rank are warmer than its. The library's exponent, 1.05, is too flat for this workload by ten points. Whoever has a
  profile should use it: a ladder of three rungs (`hottest`) holds all three.
- **Recovery** is told where one thread goes from row to row, each read waited for: a row's header in PMem and a place
  in the index cost the two latencies. Read with all cores, a scan would be bound by bandwidth and take seconds. From
  the disk, bytes over its bandwidth are nearly all of it, and the index is the rest.
- **A checkpoint** costs the same at both intervals, as it should; what it is, 14 s, is beyond what a cache of a
  gigabyte takes to flush (0.1 s): it is of TensorFlow's part, which the simulator does not have.
- **PMem against DRAM** is simulated too well. What the cache misses costs little of a batch, because misses are few and
  many are under way; that a pull goes through an index, a lock and a copy for each row is not there.
"""


@dataclass(frozen=True, slots=True)
class Statement:
    """low, high: what is stated, twice the same where it is one number. assumed: by whom the simulated value is."""

    what: str
    low: float
    high: float
    simulated: float
    unit: str
    assumed: str = ""

    @property
    def error(self) -> float:
        """Beyond what is stated, of that."""
        nearest = min(max(self.simulated, self.low), self.high)
        return self.simulated / nearest - 1


def main() -> None:
    report_page.write(REPORT, report_of(statements()))
    print(report_page.read(REPORT))


def statements() -> list[Statement]:
    library = read_library([FOLDER])
    return [*_skew(library.model(MODEL)), *_recovery(library), *_checkpoints(), *_against_dram(library)]


def _skew(model: Model) -> list[Statement]:
    rows = sum(group.count * group.rows for group in model.tables)
    (first, of_first), *others = STATED_SKEW
    exponent = _exponent(rows, first, of_first)
    return [
        *(
            _accesses(part, stated, share_of_hottest(rows, part, exponent), f"exponent {exponent:.2f}, of the first")
            for part, stated in others
        ),
        *(
            _accesses(p, stated, share_of_hottest(rows, p, _DEFAULT_EXPONENT), f"exponent {_DEFAULT_EXPONENT}")
            for p, stated in STATED_SKEW
        ),
    ]


def _accesses(part: float, stated: float, simulated: float, assumed: str) -> Statement:
    return Statement(f"accesses to the hottest {part:.2%} of the rows", stated, stated, simulated, "%", assumed)


def _exponent(rows: float, part: float, share: float) -> float:
    """With which so much falls on the hottest part."""
    low, high = 0.5, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if share_of_hottest(rows, part, middle) < share else (low, middle)
    return low


def share_of_hottest(rows: float, part: float, exponent: float) -> float:
    """Of accesses, by Zipf's law."""
    return _zipf_sum(part * rows, exponent) / _zipf_sum(rows, exponent)


def _zipf_sum(rows: float, exponent: float) -> float:
    """The first ranks one by one, the others as an integral between their middles."""
    head = math.fsum(rank**-exponent for rank in range(1, _SUMMED_ONE_BY_ONE + 1))
    begin, end = _SUMMED_ONE_BY_ONE + 0.5, rows + 0.5
    if exponent == 1.0:
        return head + math.log(end / begin)
    return head + (math.pow(end, 1 - exponent) - math.pow(begin, 1 - exponent)) / (1 - exponent)


def _recovery(library: Library) -> list[Statement]:
    workload = workload_of(library.model(MODEL))
    rows = workload.table_bytes / workload.row_bytes
    pmem, dram, disk = (_memory(library, name) for name in ("pmem-table-1", "dram-table-1", "essd-pl1"))
    header, entry = Amounts(rows_read=rows, row_bytes=64), Amounts(rows_read=rows, row_bytes=16)
    one = [
        _seconds(replace(memory, outstanding_requests=1), asked) for memory, asked in ((pmem, header), (dram, entry))
    ]
    from_pmem_s = sum(one)
    all_bytes_s = _seconds(pmem, Amounts(rows_read=rows, row_bytes=workload.row_bytes))
    from_disk_s = workload.table_bytes / disk.read_bandwidth_bytes_per_s + one[1]
    return [
        Statement("recovery from PMem", 380, 380, from_pmem_s, "s", "one thread, row by row"),
        Statement("recovery from PMem", 380, 380, max(all_bytes_s, from_pmem_s / _CORES), "s", f"{_CORES} threads"),
        Statement("recovery from a checkpoint on SSD", 1513, 1513, from_disk_s, "s", "one thread"),
        Statement("recovery, SSD over PMem", 3.97, 3.97, from_disk_s / from_pmem_s, "times", "one thread"),
    ]


def _checkpoints() -> list[Statement]:
    """What one costs follows from one interval, and what it costs at the other from that."""
    checkpoint_s = 0.012 * 20 * 60
    return [
        Statement(
            "checkpoints every 10 minutes cost", 0.024, 0.024, checkpoint_s / 600, "%", "what they cost every 20: 1.2 %"
        )
    ]


def _against_dram(library: Library) -> list[Statement]:
    found = []
    for batch in (1024, 4096, 16_384):
        here = library.changed({f"models.{MODEL}.batch_size": batch})
        slower = here.run("pmem-and-cache", MODEL).batch_s / here.run("all-dram", MODEL).batch_s - 1
        found.append(Statement("PMem and cache slower than DRAM", 0.05, 0.09, slower, "%", f"batches of {batch:,}"))
    return found


def _memory(library: Library, name: str) -> Memory:
    device = library.device(name)
    assert isinstance(device, Memory)
    return device


def _seconds(memory: Memory, asked: Amounts) -> float:
    return memory.seconds(asked, recently_written=False, modules=1.0)


def report_of(found: Sequence[Statement]) -> str:
    rows = [
        (each.what, _stated(each), _shown(each.simulated, each.unit), each.assumed, f"{each.error:+.0%}")
        for each in found
    ]
    table = markdown_table(["", "stated", "simulated", "assumed", "off by"], rows)
    return "\n".join([_HEAD, *table]).rstrip() + "\n" + _TAIL


def _stated(each: Statement) -> str:
    low, high = _shown(each.low, each.unit), _shown(each.high, each.unit)
    return low if low == high else f"{low} to {high}"


def _shown(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:.1%}"
    return f"{value:,.0f} s" if unit == "s" else f"{value:.2f} {unit}"


if __name__ == "__main__":
    main()
