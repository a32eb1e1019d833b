"""MTrainS (Kassa et al. 2023): how many nodes a target takes with HBM and DRAM alone, and with all tiers of a node, and
what that costs in dollars and watts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast_lab.placement.tiers import Tier, read_tiers
from holdfast_lab.sim.library import PACKAGED, Library
from holdfast_lab.sim.model import Model, workload_of
from holdfast_lab.sim.report import figures
from holdfast_lab.sim.report.content import Section, Table
from holdfast_lab.sim.report.scratchpipe import line
from holdfast_lab.sim.tiering import Saving, compare

NODE = PACKAGED / "node.toml"  # as examples/tiers.toml
_BIG_MODEL = {"models.mlperf.rows": 400_000_000}  # ten times MLPerf's rows: 5.3 TB
# Models of terabytes: published shapes, with so many times their rows that a node's DRAM does not hold them.
_MODELS = {
    "MLPerf, 10 times the rows": ("mlperf", _BIG_MODEL),
    "DeepRecSys RM2, 500 times": ("deeprecsys-rm2", {"models.deeprecsys-rm2.rows": 250_000_000}),
    "DeepRecSys RM3, 1,000 times": ("deeprecsys-rm3", {"models.deeprecsys-rm3.rows": 2_000_000_000}),
}
_EQUAL_MS = (1.0, 5.0)
_TARGETS_MS = (0.4, 0.5, 0.7, 1.0, 2.0, 5.0)
_FAST_NODE = (
    4.92,
    700.0 + 32.0,
)  # $/h and W: an H100 of Amazon's p5 (Capacity Blocks, January 2025), and 256 GB of DRAM
_MORE_TIERS = (
    0.23,
    25.0 + 14.0,
)  # 512 GB of expander and 4 TB of NVMe at the node's prices, over three years
_HEAD = (
    "ms a batch at most",
    "nodes, HBM and DRAM",
    "nodes, all tiers",
    "times fewer",
    "limited by",
    "$ and kJ of 10⁹ and 10⁶ samples, HBM and DRAM",
    "all tiers",
)


def big_model(library: Library) -> Model:
    return library.changed(_BIG_MODEL).model("mlperf")


def node_tiers() -> Sequence[Tier]:
    return read_tiers(NODE).tiers


def nodes_table(library: Library) -> Table:
    """Whatever memory takes for a batch."""
    saving = compare(big_model(library), node_tiers())
    rows = [
        (name, str(each.nodes), each.limiting_stage, f"{each.batch_s * 1e3:.3f}")
        for name, each in (("HBM and DRAM", saving.fast_only), ("all tiers", saving.all_tiers))
    ]
    return Table(header=("memory of a node", "nodes", "limited by", "ms of memory a batch"), rows=rows)


def targets_table(library: Library) -> Table:
    """Of nodes that all take as long as the target: their memory is no slower, and their GPU is taken to be as fast."""
    model = big_model(library)
    rows = []
    for target_ms in _TARGETS_MS:
        saving, cells = _saving(model, target_ms)
        fast, every = saving.fast_only.nodes, saving.all_tiers.nodes
        usd, watts = _FAST_NODE
        costs = [(fast * usd, fast * watts), (every * (usd + _MORE_TIERS[0]), every * (watts + _MORE_TIERS[1]))]
        samples_per_s = model.batch_size / (target_ms * 1e-3)
        each = [
            f"{usd_per_h / 3600 / samples_per_s * 1e9:.1f}, {w / samples_per_s * 1e3:.1f}" for usd_per_h, w in costs
        ]
        rows.append((*cells, *each))
    return Table(header=_HEAD, rows=rows)


def _saving(model: Model, target_ms: float) -> tuple[Saving, tuple[str, ...]]:
    """Of nodes whose memory takes a batch as long as that at most; and in words: the target, nodes without the slow
    tiers and with them, their ratio, and what limits it."""
    saving = compare(model, node_tiers(), most_batch_s=target_ms * 1e-3)
    fast, every = saving.fast_only.nodes, saving.all_tiers.nodes
    limit = f"{saving.all_tiers.limiting_stage}, {saving.all_tiers.batch_s * 1e3:.2f} ms"
    return saving, (f"{target_ms:g}", str(fast), str(every), f"{fast / every:.1f}", limit)


def models_table(library: Library) -> Table:
    """Of other models: nodes without the slow tiers and with them, where a batch may take memory as long in both."""
    rows = []
    for label, (name, changes) in _MODELS.items():
        model = library.changed(changes).model(name)
        terabytes = f"{workload_of(model).table_bytes / 1e12:.1f}"
        rows += [(label, terabytes, *_saving(model, target_ms)[1]) for target_ms in _EQUAL_MS]
    head = ("model", "TB of rows", "ms at most", "nodes, HBM and DRAM", "all tiers", "times fewer", "limited by")
    return Table(header=head, rows=rows)


def targets_figure(path: Path, targets: Table, *, overwrite: bool = False) -> Path:
    rows = [[str(cell) for cell in row] for row in targets.rows]
    shown = [line("HBM and DRAM", rows, 1), line("all tiers", rows, 2)]
    title, x_name = "Nodes for 5.3 TB of tables", "ms that memory may take for a batch"
    return figures.lines(path, shown, title=title, x_name=x_name, y_name="nodes", overwrite=overwrite)


def section(directory: Path, targets: Table, nodes: Table, models: Table, *, overwrite: bool) -> Section:
    """targets, nodes, models: of `targets_table`, `nodes_table`, `models_table`."""
    usd, watts = _FAST_NODE
    return Section(
        title="MTrainS",
        text="Kassa et al. 2023, who found 4 to 8 times fewer nodes where capacity had forced them: MLPerf's model "
        "with ten times the rows, placed over the tiers of a node by the integer program of `holdfast plan`. A target "
        f"is what memory may take for a batch of all nodes. Declared: ${usd} an hour and {watts:.0f} W of a node with "
        f"HBM and DRAM, ${_MORE_TIERS[0]} and {_MORE_TIERS[1]:.0f} W more with all tiers.",
        tables=(
            replace(nodes, title="without a target"),
            replace(targets, title="by target"),
            replace(models, title="other models, at equal times"),
        ),
        figures=(targets_figure(directory / "mtrains.svg", targets, overwrite=overwrite),),
    )
