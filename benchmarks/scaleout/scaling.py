"""The cost model's constants from a measured run, its tables, and its picture.

    cd benchmarks && python -m scaleout.scaling RESULTS.json [--write]

RESULTS.json: of ``python -m scaleout --only speed,wire``; what sockets cost (sockets.py) is measured and added where it
is not there. --write: into docs/SCALING.md, between its markers, and
docs/scaling.png; else tables are printed.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray

import holdfast_lab.sim
from markdown_table import markdown_table
from peers.shapes import SHAPES
from plain_axes import plain
from scaleout.decoding import decoding_table
from scaleout.model import (
    Cluster,
    Costs,
    Ids,
    Medium,
    Ranks,
    Step,
    Workload,
    enough_shards,
    least_total,
    memory,
    owner_shares,
    rendezvous_s,
    skew,
    step,
    traffic,
    unique_rows,
    useful_part,
)
from scaleout.sockets import measure

mpl.use("Agg")
import matplotlib.pyplot as plt

_DOCS = Path(__file__).parents[2] / "docs"
_DEVICES = Path(holdfast_lab.sim.__file__).parent / "library" / "devices"
_DECODING = Path(__file__).parents[1] / "reports/scaleout/loader/results.json"
_COUNTS = (1, 2, 4, 8, 16, 64, 256, 1000)
_FLOP_S = 1 / 180e9  # of a core here: rm3's and kaggle's MLPs in benchmarks/reports/bench, two cores


def workload_of(name: str) -> Workload:
    """Of one of the peers' shapes."""
    shape = SHAPES[name]
    vectors = shape.num_tables + 1
    sizes = [(shape.num_dense, *shape.bottom), (vectors * (vectors - 1) // 2 + shape.bottom[-1], *shape.top)]
    parameters = sum((size + 1) * after for layers in sizes for size, after in pairwise(layers))
    return Workload(
        name=name,
        tables=shape.num_tables,
        rows=shape.num_embeddings,
        dim=shape.embedding_dim,
        lookups=shape.lookups_per_bag,
        batch=shape.batch_size,
        dense_parameters=parameters,
        dense_columns=shape.num_dense,
    )


RM1, KAGGLE = workload_of("rm1"), workload_of("kaggle")
# Tables, bag length and batch of facebookresearch/dlrm_datasets (fbgemm_t856_bs65536: 15.8 ids a bag); dim of MLPerf's
# DLRM; rows such that weights take 1 TB, and the dense part, are assumed.
LARGE = Workload(
    name="large", tables=856, rows=2_280_000, dim=128, lookups=16, batch=65_536, dense_parameters=20_000_000
)


def media() -> dict[str, Medium]:
    """Of the simulator's library. NVMe: what misses the scratchpad, and how long a flush takes, are assumed."""

    def device(name: str) -> dict[str, Any]:
        found: dict[str, Any] = tomllib.loads((_DEVICES / f"{name}.toml").read_text())["device"]
        return found

    pmem, cxl, nvme = device("pmem-host"), device("cxl-expander"), device("p4800x")
    return {
        "PMEM": Medium(
            name="PMEM",
            read_bytes_per_s=pmem["read_bandwidth_bytes_per_s"],
            write_bytes_per_s=pmem["write_bandwidth_bytes_per_s"],
            sync_s=2e-6,
            row_granularity=pmem["granularity_bytes"],
        ),
        "CXL": Medium(
            name="CXL",
            read_bytes_per_s=cxl["read_bandwidth_bytes_per_s"],
            write_bytes_per_s=cxl["write_bandwidth_bytes_per_s"],
            sync_s=2e-6,
        ),
        "NVMe": Medium(
            name="NVMe",
            read_bytes_per_s=nvme["read_bandwidth_bytes_per_s"],
            write_bytes_per_s=nvme["write_bandwidth_bytes_per_s"],
            sync_s=200e-6,
            is_block=True,
            misses=0.3,
            reads_per_s=nvme["outstanding_requests"] / nvme["read_latency_s"],
        ),
    }


def clusters(medium: str = "CXL") -> dict[str, Cluster]:
    """94 % of a line's rate: frames of 1,500 bytes. Latencies and messages are declared."""
    found = media()[medium]
    return {
        "25 Gbit/s": Cluster(bytes_per_s=0.94 * 25e9 / 8, latency_s=30e-6, message_s=15e-6, medium=found),
        "100 Gbit/s": Cluster(bytes_per_s=0.94 * 100e9 / 8, latency_s=20e-6, message_s=10e-6, medium=found),
    }


# What is measured.


def fit(results: dict[str, Any]) -> Costs:
    """From section "speed": stages of one rank on one core; and from "sockets"."""
    alone = _best(results["speed"], "ranks_1")["stage_ms"]
    lookups, floats = RM1.lookups_per_step, RM1.batch * RM1.tables * RM1.dim
    flops = 6 * RM1.dense_parameters * RM1.batch
    return Costs(
        plan_s=1e-3 * alone["plan"] / lookups,
        owner_s=1e-3 * (alone["capture"] + alone["lookup"] + alone["update"]) / lookups,
        flop_s=_FLOP_S,
        float_s=max(0.0, 1e-3 * alone["train"] - _FLOP_S * flops) / floats,
        fixed_s=1e-3 * alone["commit"],
        byte_s=results["sockets"]["byte_s"],
        message_s=results["sockets"]["message_s"],
    )


def on_one_core(workload: Workload, ranks: Ranks, costs: Costs, *, per_core: int = 1) -> float:
    """Seconds of a step where every rank trains and owns, and nothing overlaps: all of it is one core's work."""
    shares = owner_shares(workload, ranks)
    moved = traffic(workload, ranks, shares)
    lookups = workload.lookups_per_step * skew(shares) / ranks.world_size
    of_sample = 6 * costs.flop_s * workload.dense_parameters + costs.float_s * workload.tables * workload.dim
    wire = costs.byte_s * sum(moved.both_ways(what) for what in moved.sent) + costs.message_s * moved.messages
    own = (costs.plan_s + costs.owner_s) * lookups + of_sample * workload.batch / ranks.world_size + costs.fixed_s
    return per_core * (own + wire)


def _best(rounds: list[dict[str, Any]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = min((of_round[name] for of_round in rounds), key=lambda result: result["median_ms"])
    return found


# Tables.


def bytes_table(wire: dict[str, Any]) -> list[str]:
    rows = []
    for name, measured in wire.items():
        workload, ranks = scheme_of(name)
        shares = owner_shares(workload, ranks)
        moved, counted = traffic(workload, ranks, shares), measured["counted"]
        predicted = {what: moved.total(what) for what in counted}
        least, sent = sum(least_total(workload, ranks, shares).values()), sum(counted.values())
        rows.append(
            (
                name,
                f"{least / 1e6:.3f} / {measured['least']['total'] / 1e6:.3f}",
                *(f"{predicted[what] / 1e6:.3f} / {counted[what] / 1e6:.3f}" for what in ("ids", "vectors")),
                f"{sum(predicted.values()) / 1e6:.3f} / {sent / 1e6:.3f}",
                f"{sum(predicted.values()) / sent - 1:+.2%}",
                f"{measured['lo'] / 1e6:.3f}",
            )
        )
    head = ["MB a step, all ranks; model / measured", "least", "ids", "vectors", "all that is sent", "", "on the wire"]
    return markdown_table(head, rows)


def scheme_of(name: str) -> tuple[Workload, Ranks]:
    """Of a name in section "wire"."""
    trainers = re.search(r"(\d+) (?:ranks|trainer)", name)
    memory_ranks = re.search(r"(\d+) memory", name)
    assert trainers is not None, name
    count = int(trainers[1])
    more = 0 if memory_ranks is None else int(memory_ranks[1])
    workload = KAGGLE if name.startswith("kaggle") else RM1
    return workload, Ranks(world_size=count + more, memory_ranks=more, split="split" in name)


def costs_table(costs: Costs) -> list[str]:
    rows = [
        ("capture, lookup, update of a lookup", f"{costs.owner_s * 1e9:.1f} ns", "one rank, rm1"),
        ("routing and planning of a lookup", f"{costs.plan_s * 1e9:.1f} ns", "one rank, rm1"),
        ("a pooled float of a sample, forward and backward", f"{costs.float_s * 1e9:.1f} ns", "one rank, rm1"),
        ("a flop of the MLPs", f"1 / {1 / costs.flop_s / 1e9:.0f} G", "rm3 and kaggle, the report of make bench"),
        ("a commit", f"{costs.fixed_s * 1e3:.2f} ms", "one rank, rm1"),
        ("a byte through a socket, either end", f"{costs.byte_s * 1e9:.2f} ns", "sockets.py, `lo`, processor time"),
        ("a value of the data, in the loader", f"{costs.value_s * 1e9:.0f} ns", "rm1's batches as Parquet, 64 parts"),
        ("a message, both ends", f"{costs.message_s * 1e6:.0f} µs", "sockets.py, `lo`, processor time"),
    ]
    return markdown_table(["of one core", "", "from"], rows)


def check_table(rounds: list[dict[str, Any]], costs: Costs) -> list[str]:
    rows = []
    for count in (1, 2, 4):
        found = 1e3 * on_one_core(RM1, Ranks(world_size=count), costs, per_core=max(1, count // 2))
        measured = _best(rounds, f"ranks_{count}")["median_ms"]
        what = "fitted" if count == 1 else f"{found / measured - 1:+.0%}"
        rows.append(
            (f"{count} on {min(count, 2)} core{'s' if count > 1 else ''}", f"{found:.1f}", f"{measured:.1f}", what)
        )
    head = ["rm1, whole tables, ranks", "model, ms a step", "measured, best round", ""]
    idle = all(of_round["was_idle"] for of_round in rounds)
    note = (
        []
        if idle
        else ["**Other work ran on the machine meanwhile: the differences, and the costs above, say little.**"]
    )
    return [*markdown_table(head, rows), *note]


@cache
def _shares(workload: Workload, ranks: Ranks) -> NDArray[np.float64]:
    return owner_shares(workload, ranks)


def schemes(count: int) -> dict[str, Ranks]:
    shards = enough_shards(count)
    return {
        "whole": Ranks(world_size=count, num_shards=shards),
        "split": Ranks(world_size=count, split=True, num_shards=shards),
    }


def best(workload: Workload, count: int, cluster: Cluster, costs: Costs) -> tuple[str, Step]:
    """The scheme with the shorter step."""
    found = {
        name: step(workload, ranks, _shares(replace(workload), ranks), cluster, costs)
        for name, ranks in schemes(count).items()
    }
    name = min(found, key=lambda name: found[name].total)
    return name, found[name]


def brief(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def named(count: int) -> str:
    return f"{count} ranks" if count > 1 else "1 rank"


def grown(workload: Workload, count: int) -> Workload:
    """Every trainer has the batch that one has."""
    return replace(workload, batch=workload.batch * count)


def scaling_table(costs: Costs, *, weak: bool) -> list[str]:
    rows = []
    for workload in (RM1, KAGGLE, LARGE):
        for name, cluster in clusters().items():
            cells = []
            base = step(workload, schemes(1)["whole"], _shares(workload, schemes(1)["whole"]), cluster, costs).total
            for count in _COUNTS:
                scheme, found = best(grown(workload, count) if weak else workload, count, cluster, costs)
                times = (base * count if weak else base) / found.total
                mark = " †" if found.loader > found.total else ""
                cells.append(
                    f"{brief(found.total * 1e3)} ({brief(times)}×{'' if count == 1 else ' ' + scheme[0]}){mark}"
                )
            rows.append((f"{workload.name}, {name}", *cells))
    return markdown_table(["ms a step", *(named(count) for count in _COUNTS)], rows)


def parts_table(costs: Costs) -> list[str]:
    """Where a step goes."""
    rows = []
    for workload in (RM1, KAGGLE, LARGE):
        for count in (64, 1000):
            scheme, found = best(workload, count, clusters()["100 Gbit/s"], costs)
            parts = (found.owners + found.update, found.train, found.vectors, found.gradients, found.ids_wait)
            more = (found.commit, found.stragglers, found.total, found.loader)
            rows.append((f"{workload.name}, {count} ranks, {scheme}", *(brief(1e3 * part) for part in (*parts, *more))))
    head = ["ms, 100 Gbit/s, strong", "owners", "MLPs", "vectors", "gradients", "ids, counts", "commit", "stragglers"]
    return markdown_table([*head, "step", "loader"], rows)


def bytes_past_table() -> list[str]:
    """Of the busiest rank, at many ranks."""
    rows = []
    for workload in (RM1, KAGGLE, LARGE):
        for count in (64, 1000):
            for scheme, ranks in schemes(count).items():
                shares = _shares(workload, ranks)
                moved = traffic(workload, ranks, shares)
                of_rank = (moved.busiest(what) for what in moved.sent)
                rows.append(
                    (
                        f"{workload.name}, {count} ranks, {scheme}",
                        *(brief(size / 1e6) for size in of_rank),
                        f"{moved.messages:,}",
                        f"{skew(shares):.2f}",
                        f"{1 - float(np.count_nonzero(shares.sum(axis=0))) / count:.0%}",
                    )
                )
    head = ["MB a step, busiest rank", "counts", "ids", "vectors", "gradients", "dense", "messages"]
    return markdown_table([*head, "most / mean load", "owners without work"], rows)


def skew_table() -> list[str]:
    rows, counts = [], (8, 64, 256, 1000)
    orders: tuple[Ids, ...] = ("scattered", "by_frequency")
    for ids in orders:
        for workload in (RM1, KAGGLE, LARGE):
            ordered = replace(workload, ids=ids)
            cells = (f"{skew(owner_shares(ordered, schemes(count)['split'])):.2f}" for count in counts)
            rows.append((f"{workload.name}, {ids.replace('_', ' ')}", *cells))
    return markdown_table(
        ["most / mean load, split tables", *(f"{count} owners" for count in (8, 64, 256, 1000))], rows
    )


def memory_ranks_table(costs: Costs) -> list[str]:
    """Trainers and owners apart, of 64 ranks."""
    rows = []
    cluster = clusters()["100 Gbit/s"]
    for count in (0, 8, 16, 32):
        ranks = Ranks(world_size=64, memory_ranks=count, num_shards=enough_shards(64))
        shares = _shares(LARGE, ranks)
        found, moved = step(LARGE, ranks, shares, cluster, costs), traffic(LARGE, ranks, shares)
        sent = sum(moved.total(what) for what in moved.sent)
        port = sum(moved.busiest(what) for what in moved.sent)
        seconds = (found.owners + found.update, found.train, found.vectors + found.gradients, found.total)
        rows.append(
            (
                "all 64 do both" if count == 0 else f"{64 - count} trainers, {count} memory ranks",
                brief(memory(LARGE, ranks, shares).rows / 1e9),
                brief(sent / 1e9),
                brief(port / 1e6),
                *(brief(1e3 * part) for part in seconds),
            )
        )
    head = ["large, whole tables, 100 Gbit/s", "GB of rows an owner", "GB sent, all", "MB, busiest rank"]
    return markdown_table([*head, "owners, ms", "MLPs", "vectors, gradients", "step"], rows)


def memory_table() -> list[str]:
    rows = []
    for workload in (RM1, KAGGLE, LARGE):
        for count in (1, 64, 1000):
            ranks = schemes(count)["split"]
            found = memory(workload, ranks, _shares(workload, ranks))
            parts = (found.rows, found.log, found.buffers, found.dense, found.connections)
            rows.append((f"{workload.name}, {named(count)}", *(brief(part / 1e9) for part in parts)))
    return markdown_table(["GB a rank, split tables", "rows", "log", "buffers", "dense", "sockets"], rows)


def commit_table(costs: Costs) -> list[str]:
    rows = []
    for medium in media():
        for interval in (1, 4):
            cells = []
            for count in (1, 16, 64, 256, 1000):
                ranks = schemes(count)["whole"]
                wide = replace(LARGE, batch=64 * count)
                cluster = clusters(medium)["100 Gbit/s"]
                found = step(wide, ranks, _shares(wide, ranks), cluster, costs, dense_interval=interval)
                cells.append(" / ".join(brief(1e3 * part) for part in (found.total, found.commit, found.durable_lag)))
            rows.append((f"{medium}, dense_interval {interval}", *cells))
    head = ["ms: step / commit in it / until durable", *(named(count) for count in (1, 16, 64, 256, 1000))]
    return markdown_table(head, rows)


def failures_table(costs: Costs) -> list[str]:
    rows = []
    for count in (4, 64, 256, 1000):
        _, found = best(LARGE, count, clusters()["100 Gbit/s"], costs)
        for interval in (1, 100):
            restart = 20.0 + rendezvous_s(count)
            useful = useful_part(
                size=count, step_s=found.total, dense_interval=interval, restart_s=restart, node_mtbf_s=10_000 * 3600
            )
            rows.append((count, interval, f"{10_000 / count:.4g} h", f"{restart:.0f} s", f"{1 - useful:.3%}"))
    return markdown_table(["ranks", "dense_interval", "from one failure to the next", "restart", "time lost"], rows)


def tables(results: dict[str, Any]) -> dict[str, list[str]]:
    costs = fit(results)
    return {
        "bytes": bytes_table(results["wire"]),
        "costs": costs_table(costs),
        "check": check_table(results["speed"], costs),
        "rows": markdown_table(
            ["", "weights and state", "different rows a step"],
            [(w.name, f"{w.table_bytes / 1e9:,.1f} GB", f"{unique_rows(w):,.0f}") for w in (RM1, KAGGLE, LARGE)],
        ),
        "bytes past": bytes_past_table(),
        "strong": scaling_table(costs, weak=False),
        "weak": scaling_table(costs, weak=True),
        "parts": parts_table(costs),
        "memory ranks": memory_ranks_table(costs),
        "skew": skew_table(),
        "memory": memory_table(),
        "commit": commit_table(costs),
        "failures": failures_table(costs),
        "decoding": decoding_table(json.loads(_DECODING.read_text())),
    }


def draw(path: Path, costs: Costs) -> None:
    counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000]
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), dpi=144, layout="constrained")
    for axes, weak in zip(panels, (False, True), strict=True):
        plain(axes, "Weak scaling: a batch for each rank" if weak else "Strong scaling: one batch for all")
        axes.loglog(counts, counts, color="#bbbbbb", linewidth=1, label="linear")
        for workload, color in ((RM1, "#2f6f9f"), (KAGGLE, "#d98c3f"), (LARGE, "#5b8c5a")):
            for (name, cluster), style in zip(clusters().items(), (":", "-"), strict=True):
                base = best(workload, 1, cluster, costs)[1].total
                times = []
                for count in counts:
                    found = best(grown(workload, count) if weak else workload, count, cluster, costs)[1].total
                    times.append(base * (count if weak else 1) / found)
                axes.loglog(counts, times, style, color=color, label=f"{workload.name}, {name}")
        axes.set_xlabel("ranks, 16 cores each, rows on CXL memory")
    panels[0].set_ylabel("samples a second, over one rank's")
    panels[0].legend(fontsize=7, frameon=False)
    figure.savefig(path)
    plt.close(figure)


def write(path: Path, sections: dict[str, list[str]]) -> None:
    """Between ``<!-- table: NAME -->`` and ``<!-- end -->``. Raises LookupError where a table has no place."""
    text = path.read_text()
    for name, lines in sections.items():
        pattern = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        found = pattern.search(text)
        if found is None:
            raise LookupError(f"{path} has no place for table {name!r}")
        body = "\n".join(lines).strip()
        text = f"{text[: found.end(1)]}{body}\n{text[found.start(2) :]}"
    path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scaleout.scaling", description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--write", action="store_true", help="docs/SCALING.md and docs/scaling.png")
    given = parser.parse_args()
    results = json.loads(given.results.read_text())
    if "sockets" not in results:
        results["sockets"] = measure()
        given.results.write_text(json.dumps(results, indent=1))
    found = tables(results)
    if given.write:
        write(_DOCS / "SCALING.md", found)
        draw(_DOCS / "scaling.png", fit(results))
        return
    for name, lines in found.items():
        print(f"## {name}\n")
        print("\n".join(lines))


if __name__ == "__main__":
    main()
