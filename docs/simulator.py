"""Fits the simulator's packaged values to TrainingCXL's figures, and writes them and every table of docs/SIMULATOR.md:
`make simulator`, in two minutes.

A fitted value stands in the library on a line that says so (`# fitted`). A table stands on the page between
`<!-- table NAME -->` and `<!-- end -->`. Those that are simulated in seconds are compared by a test with what the
library says; the others rest on fits, and the page says of which library (a digest).
"""

from __future__ import annotations

import hashlib
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from holdfast_lab.sim.calibration import fit
from holdfast_lab.sim.facts import HOST, Facts, read_facts, targets_of
from holdfast_lab.sim.library import PACKAGED, Library, read_library
from holdfast_lab.sim.model import Sharding, workload_of
from holdfast_lab.sim.paper import Cell, EnergyRatios, Reproduction, mean_error, reproduce
from holdfast_lab.sim.report import mtrains, scratchpipe
from holdfast_lab.sim.report.content import Table, timeline_of
from holdfast_lab.sim.report.reproduction import baselines_table, structures_table, weights_table, write_paper
from holdfast_lab.sim.sensitivity import STUDIES, speedup

DOCS = Path(__file__).parent
PAGE = DOCS / "SIMULATOR.md"
PAGES = (PAGE, DOCS / "SCRATCHPIPE.md", DOCS / "MTRAINS.md")
_CACHED = ("scratchpipe", "scratchpipe-lru", "scratchpipe-static")
_CACHED_MODELS = ("rm1", "rm2", "deeprecsys-rm1", "kaggle", "mlperf")
_ENDING = ("log_network", "interaction_top")
_GPUS: tuple[tuple[str, str, str, Sharding], ...] = (
    ("A100, NVLink, whole tables", "a100-80gb", "nvlink-a100", "table"),
    ("A100, NVLink, rows", "a100-80gb", "nvlink-a100", "row"),
    ("A100, PCIe of one host, whole tables", "a100-80gb", "pcie-fabric", "table"),
    ("H100, NVLink, whole tables", "h100", "nvlink-h100", "table"),
    ("H200, NVLink, whole tables", "h200", "nvlink-h100", "table"),
)
_COUNTS = (1, 2, 4, 8)
_MANY_SAMPLES = 65_536
_FIGURES = {"batch-time.svg": "simulator-times.svg", "timelines.svg": "simulator-timelines.svg"}
_TABLE = r"<!-- table {name} -->\n.*?<!-- end -->"


def main() -> None:
    facts = read_facts()
    found = fit(read_library(), facts.free, targets_of(facts, facts.models))
    for key, value in found.library_values.items():
        write_value(PACKAGED, key, value)
    library = read_library()
    reproduced = reproduce(library, facts)
    with tempfile.TemporaryDirectory() as folder:
        write_paper(Path(folder), reproduced, reproduced.fit.library)
        for drawn, name in _FIGURES.items():
            shutil.copyfile(Path(folder) / drawn, DOCS / name)
        swept = swept_tables(library, Path(folder))
    tables = {**quick_tables(library, facts), **slow_tables(reproduced), **swept}
    for path in PAGES:
        page = path.read_text(encoding="utf-8")
        for name in re.findall(r"<!-- table (.*) -->", page):
            page = with_table(page, name, tables[name])
        page = re.sub(r"<!-- fitted library: \w* -->", f"<!-- fitted library: {digest_of(library, facts)} -->", page)
        path.write_text(page, encoding="utf-8")


def write_value(folder: Path, key: str, value: float) -> None:
    """Where the library's file has it, on the one line of that name that is fitted."""
    kind, name, field = key.split(".", 2)
    path = folder / kind / (f"{HOST}.toml" if name == "*" else f"{name}.toml")  # the base of all systems
    text = path.read_text(encoding="utf-8")
    line = rf"(?m)^({field.rpartition('.')[2]} = )\S+(\s+# fitted)"
    changed, count = re.subn(line, lambda found: f"{found[1]}{plain(value)}{found[2]}", text)
    if count != 1:
        raise SystemExit(f"{path}: {count} lines of {field} are fitted, not one")
    path.write_text(changed, encoding="utf-8")


def plain(value: float) -> str:
    """With four digits, and an exponent of thousands."""
    thousands = math.floor(math.log10(value) / 3)
    if thousands == 0 or (thousands == -1 and value >= 0.1):
        return f"{value:.4g}"
    return f"{value / 1000.0**thousands:.4g}e{3 * thousands}"


def digest_of(library: Library, facts: Facts) -> str:
    """Of all that fits and sweeps are made of: the paper's facts, and systems, devices and models as the library has
    them."""
    systems = [library.system(name) for name in ("dram", *facts.systems, *_CACHED, scratchpipe.HARDWARE)]
    devices = [library.device(name) for name in dict.fromkeys(d for each in systems for d in each.devices.values())]
    models = [library.model(name) for name in (*facts.models, "deeprecsys-rm1", "mlperf")]
    return hashlib.sha256(repr((facts, systems, devices, models)).encode()).hexdigest()[:16]


def with_table(page: str, name: str, table: Table) -> str:
    rows = [table.header, tuple("---" for _ in table.header), *table.rows]
    shown = "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in rows)
    pattern = re.compile(_TABLE.format(name=re.escape(name)), re.DOTALL)
    if not pattern.search(page):
        raise SystemExit(f"{PAGE}: there is no place for the table {name}")
    return pattern.sub(lambda _: f"<!-- table {name} -->\n{shown}\n<!-- end -->", page)


# Tables that are simulated in seconds ---------------------------------------------------------------------------------


def quick_tables(library: Library, facts: Facts) -> dict[str, Table]:
    return {name: table(library, facts) for name, table in QUICK_TABLES.items()}


def _fitted(library: Library, facts: Facts) -> Table:
    rows = []
    for system in facts.systems:
        ours = {model: library.run(system, model).batch_s * 1e3 for model in facts.models}
        cells = [f"{facts.batch_ms[system][model]} → {ours[model]:.1f}" for model in facts.models]
        rows.append((library.system(system).title, *cells))
    return Table(header=("ms a batch: paper → fitted", *_upper(facts.models)), rows=rows)


def _studies(library: Library, facts: Facts) -> Table:
    rows = []
    for study in STUDIES:
        here = [library.value(key) for key in study.keys]
        changes = [
            {key: point * (value if study.is_factor else 1.0) for key, value in zip(study.keys, here, strict=True)}
            for point in study.x
        ]
        speedups = [speedup(library.changed(each), facts.models, study.baseline, study.system) for each in changes]
        shown = ", ".join(f"{point:.4g}: {value:.2f}" for point, value in zip(study.x, speedups, strict=True))
        rows.append((study.name, study.x_name, f"{study.baseline} / {study.system}", shown))
    return Table(header=("varied", "of", "ratio", "mean over the models at each"), rows=rows)


def _baselines(library: Library, facts: Facts) -> Table:
    return baselines_table(library, facts.models)


def _scratchpad(library: Library, _: Facts) -> Table:
    rows = [
        (model, *(scratchpipe.milliseconds(library, system, model) for system in ("dram", *_CACHED)))
        for model in _CACHED_MODELS
    ]
    return Table(header=("ms a batch, 10 % of the rows in HBM", "DRAM", "look forward", "LRU", "static"), rows=rows)


def _gpus(library: Library, _: Facts) -> Table:
    model = replace(library.model("deeprecsys-rm1"), batch_size=_MANY_SAMPLES, precision="tf32")
    rows = []
    for title, gpu, peers, sharding in _GPUS:
        devices = {"gpu": gpu, "peers": peers}
        systems = [replace(library.system("gpus"), devices=devices, gpus=n, sharding=sharding) for n in _COUNTS]
        runs = [library.run(system, model) for system in systems]
        cells = (f"{run.batch_s * 1e3:.1f} ms, {run.joules_per_batch:.1f} J" for run in runs)
        rows.append((title, *cells))
    return Table(header=("deeprecsys-rm1, 65,536 samples, TF32", *(f"{n} GPUs" for n in _COUNTS)), rows=rows)


def _parts(library: Library, facts: Facts) -> Table:
    runs = {model: library.run("cxl", model) for model in facts.models}
    devices = library.system("cxl").devices
    rows = [
        (f"{role}: {name}", *(f"{runs[model].busy_s[role] * 1e3:.3f}" for model in facts.models))
        for role, name in devices.items()
        if any(run.busy_s[role] for run in runs.values())
    ]
    rows.append(("a batch", *(f"{runs[model].batch_s * 1e3:.3f}" for model in facts.models)))
    return Table(header=("CXL: part, and ms of a batch that it works", *_upper(facts.models)), rows=rows)


def _unseen(library: Library, _: Facts) -> Table:
    """What TrainingCXL states of RM1 beside what was fitted."""
    seen: dict[tuple[str, str], tuple[float, float]] = {}
    for system in ("cxl-d", "cxl-b", "cxl"):
        bars = timeline_of(library.run(system, "rm1"), library.system(system), batches=1).bars
        seen |= {(system, bar.stage): (bar.begin_ms, bar.end_ms) for bar in bars if bar.begin_ms < bar.end_ms}
    overlap = [f"{workload_of(library.model(model)).overlap:.0%}" for model in ("rm1", "kaggle")]
    shorter = library.run("cxl-d", "rm1").batch_s - library.run("cxl-b", "rm1").batch_s
    rows = [
        (
            "ids of rows that the batch before had",
            "about 80 %",
            f"{overlap[0]}; Criteo Kaggle's 26 tables {overlap[1]}",
        ),
        ("CXL-D: the update ends", "4.9 ms", _at(seen["cxl-d", "update"][1])),
        ("CXL-B: the log begins", "0.6 ms", _at(seen["cxl-b", "log_rows_before"][0])),
        ("CXL-B: the log ends, after the top MLP", "2.5, 2.2 ms", _at(*(seen["cxl-b", s][1] for s in _ENDING))),
        ("CXL-B: a batch is shorter than CXL-D's", "1.6 ms", _at(shorter * 1e3)),
        ("CXL: the relaxed lookup", "1 to 1.4 ms", _at(*seen["cxl", "lookup"])),
        ("CXL: the parameters' log", "1.4 to 2.2 ms", _at(*seen["cxl", "log_network"])),
    ]
    return Table(header=("RM1, from the timelines", "stated", "simulated"), rows=rows)


def _at(*ms: float) -> str:
    return f"{', '.join(f'{each:.2f}' for each in ms)} ms"


def _nodes(library: Library, _: Facts) -> Table:
    return mtrains.nodes_table(library)


# Tables that take sweeps ----------------------------------------------------------------------------------------------


def swept_tables(library: Library, folder: Path) -> dict[str, Table]:
    """And their figures, beside the pages. folder: for what else figures leave behind."""
    sweeps, targets = scratchpipe.sweeps_table(library), mtrains.targets_table(library)
    drawn = (
        scratchpipe.skew_figure(folder / "scratchpipe.svg", sweeps),
        mtrains.targets_figure(folder / "mtrains.svg", targets),
    )
    for path in drawn:
        shutil.copyfile(path, DOCS / path.name)
    return {
        "scratchpipe sweeps": sweeps,
        "mtrains targets": targets,
        "mtrains models": mtrains.models_table(library),
    }


# Tables that rest on fits ---------------------------------------------------------------------------------------------


def slow_tables(found: Reproduction) -> dict[str, Table]:
    return {name: table(found) for name, table in SLOW_TABLES.items()}


def _left_out(found: Reproduction) -> Table:
    cells = {(cell.system, cell.model): cell for cell in found.left_out}
    rows = [
        (found.fit.library.system(system).title, *(_with_band(cells[system, model]) for model in found.facts.models))
        for system in found.facts.systems
    ]
    return Table(header=("ms a batch: paper → predicted (90 %)", *_upper(found.facts.models)), rows=rows)


def _with_band(cell: Cell) -> str:
    shown = f"{cell.paper} → {cell.ours:.1f} ({cell.low:.1f} to {cell.high:.1f})"
    return shown if cell.is_within else f"**{shown}**"


def _bars(found: Reproduction) -> Table:
    errors, facts = found.own_errors, found.facts
    within = sum(cell.is_within for cell in found.left_out)
    copied, copied_near = facts.copying_error(facts.systems), facts.copying_error(facts.near_memory)
    rm3 = [abs(cell.error) for cell in found.left_out if cell.model == "rm3" and cell.system != HOST]
    copied_rm3 = _nearest_to_rm3(facts)
    fitted = _percent(mean_error(facts, found.fit.library, facts.models))
    rows: list[tuple[str, str, str]] = [
        (
            "a model left out, mean error",
            _percent(errors.left_out),
            f"≤ 8 %; copying the nearest other {_percent(copied)}",
        ),
        ("of these, near memory", _percent(errors.left_out_near_memory), f"≤ 4 %; copying {_percent(copied_near)}"),
        ("of these, RM3", _percent(sum(rm3) / len(rm3)), f"copying {_percent(copied_rm3)}"),
        ("of these, the host's PMEM, worst", _percent(errors.worst_left_out_host), "≤ 35 %"),
        ("bars within their 90 % band", f"{within} of {len(found.left_out)}", "≥ 17 of 20"),
        ("bare `sim run`, mean error of the 20", fitted, "≤ 5 %"),
        ("worst of nine stages", _percent(errors.worst_stage), "≤ 15 %"),
        ("farthest parameter from its prior", f"{abs(errors.farthest_z):.1f} σ", "≤ 2 σ"),
    ]
    rows += [
        (ratio.name, f"{ratio.ours:.2f} ({ratio.low:.2f} to {ratio.high:.2f})", f"{ratio.paper:.2f}")
        for ratio in found.ratios
    ]
    return Table(header=("", "simulated (90 % of the region)", "paper, or bar"), rows=rows)


def _nearest_to_rm3(facts: Facts) -> float:
    of = facts.batch_ms
    return min(
        sum(abs(of[system][other] / of[system]["rm3"] - 1) for system in facts.near_memory) / len(facts.near_memory)
        for other in facts.models
        if other != "rm3"
    )


def _energy(found: Reproduction) -> Table:
    paper = {"saved against PMEM, mean": "76 %", "saved against PMEM, RM4": "62 % in the text, 53 % in the bar"}
    rows = []
    for number, ratio in enumerate(found.energy[0].saved):
        stated = paper.get(ratio.name, _percent(ratio.paper))
        rows.append((ratio.name, stated, *(_saved(each, number) for each in found.energy)))
    takes_more = found.facts.stated.dram_takes_more_than_pmem
    for model in found.facts.models:
        stated = "more" if takes_more[model] else "less"
        ratios = (f"{each.dram_order[model][0]:.2f}" for each in found.energy)
        rows.append((f"DRAM's energy over PMEM's, {model.upper()}", stated, *ratios))
    return Table(header=("", "paper", *(each.rule for each in found.energy)), rows=rows)


def _saved(of_rule: EnergyRatios, number: int) -> str:
    ratio = of_rule.saved[number]
    return f"{ratio.ours:.0%} ({ratio.low:.0%} to {ratio.high:.0%})"


def _upper(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.upper() for name in names)


def _percent(part: float) -> str:
    return f"{part:.1%}"


QUICK_TABLES: Mapping[str, Callable[[Library, Facts], Table]] = {
    "fitted": _fitted,
    "one thing at a time": _studies,
    "baselines": _baselines,
    "scratchpad": _scratchpad,
    "nodes": _nodes,
    "gpus": _gpus,
    "parts": _parts,
    "unseen": _unseen,
}
SWEPT_TABLES = ("scratchpipe sweeps", "mtrains targets", "mtrains models")
SLOW_TABLES: Mapping[str, Callable[[Reproduction], Table]] = {
    "left out": _left_out,
    "bars": _bars,
    "energy": _energy,
    "structures": structures_table,
    "weights": weights_table,
}

if __name__ == "__main__":
    main()
