"""Do three tiers pay? DRAM, byte-addressable memory and a disk, beside DRAM and the disk, each as `holdfast plan` would
have it.

    cd benchmarks && python -m tiers [--quick] [--only "PART OF A NAME;..."]

For each workload: the disk and a dialled CXL device are probed, the ids counted, and `plan --apply`'s settings taken
for both pools, which have the same DRAM: one with the disk alone, one with the device for rows that leave the
scratchpad, for the log, or for both. They train in turns, each time in a process of its own. Writes report.md,
results.json and steps.svg. Exit status 1 where something could not be measured. Half an hour.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import report_page
from larger.one import prepare_process

THREADS = 2
DEVICE = "cxl-pmem"
_CAPACITY_SHARE = 0.5  # of the device, in bytes of the tables
_ROUNDS, _QUICK_ROUNDS = 2, 1
_MAX_WARMUP_S = 120.0  # a large cache is long in filling


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two pools. settings: PoolSettings; measured: of each round, what larger.one said."""

    settings: Any
    measured: list[dict[str, Any]]

    @property
    def ms(self) -> list[float]:
        return [result["ms_per_step"] for result in self.measured]

    @property
    def error(self) -> float:
        """Of the predicted step, relative to the measured one's median."""
        return float(self.settings.step.ms / statistics.median(self.ms) - 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A workload: two tiers, and three."""

    name: str
    two: Side
    three: Side

    @property
    def ratios(self) -> list[float]:
        """Of each round, how many times as fast three tiers are."""
        return [two / three for two, three in zip(self.two.ms, self.three.ms, strict=True)]


def main() -> None:
    prepare_process(THREADS)
    from placement_check.comparison import ROOT, add_arguments, choose, report_directory
    from placement_check.configurations import CONFIGURATIONS
    from tiers.report import write_report

    parser = argparse.ArgumentParser(
        prog="python -m tiers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    on_disk = [each for each in CONFIGURATIONS if not each.in_memory]
    chosen = choose(on_disk, arguments, ("uniform",))
    directory = report_directory(arguments, "larger/tiers")
    cells, record = compare(chosen, arguments)
    text = json.dumps(record, indent=1, default=str).replace(f"{ROOT}/", "")
    text = re.sub(r'"[^"]*/holdfast-larger-[^"/]*', '"MEMORY', text)
    (directory / "results.json").write_text(text + "\n")
    write_report(cells, record, directory)
    print(report_page.read(directory))
    if len(cells) < len(chosen):
        sys.exit("not everything could be measured: results.json says why")


def compare(chosen: list[Any], arguments: argparse.Namespace) -> tuple[list[Cell], dict[str, Any]]:
    import machine
    from holdfast_lab.placement.dial_probe import dial_of, probe_dialled
    from larger.runner import Options, Runner
    from placement_check.prediction import Predictor

    runner = Runner(
        Options(
            quick=True,  # small tables
            sections=(),
            workloads=(),
            disk=arguments.disk.absolute(),
            memory=arguments.memory.absolute(),
            limits_memory=False,
        )
    )
    cells: list[Cell] = []
    probed: dict[str, Any] = {}
    with runner.directories() as (disk, memory):
        predictor = Predictor(disk, memory)
        machine.wait_until_idle(arguments.patience)
        predictor.tiers[False] = predictor.probed(in_memory=False)
        device = probe_dialled(memory, dial_of(DEVICE), on_step=lambda _done, _total=None: None).tier
        device = replace(device, directory=memory)
        probed = {"disk": asdict(predictor.tiers[False]), "device": asdict(device)}
        for configuration in chosen:
            try:
                cells.append(_cell(configuration, runner, predictor, device, arguments))
            except KeyError as error:  # larger.one said something else than its figures
                probed[configuration.name] = f"no {error}: {runner.results}"
            runner.drop_ids()
    cells_record = {cell.name: {"two": asdict(cell.two), "three": asdict(cell.three)} for cell in cells}
    return cells, runner.record() | {"probed": probed, "cells": cells_record}


def _cell(configuration: Any, runner: Any, predictor: Any, device: Any, arguments: argparse.Namespace) -> Cell:
    import machine
    from holdfast_lab.placement.settings import best_settings

    run = configuration.run()
    if arguments.quick:
        run = replace(run, steps=run.steps // 2)
    source = runner.source(run.workload, run.num_batches)
    machine.wait_until_idle(arguments.patience)
    inputs = predictor.inputs(configuration, source)
    dram, disk = predictor.tiers[False].tiers
    dram = replace(dram, capacity_bytes=configuration.scratchpad_bytes)
    near = replace(device, capacity_bytes=round(_CAPACITY_SHARE * run.workload.table_bytes))
    settings = {
        "two": best_settings(inputs, [dram, disk]),
        "three": best_settings(replace(inputs, log_medium=near, victim_medium=near), [dram, disk, near]),
    }
    measured: dict[str, list[dict[str, Any]]] = {"two": [], "three": []}
    for number in range(_QUICK_ROUNDS if arguments.quick else _ROUNDS):
        for side, taken in settings.items():
            assert taken is not None, "no room for a step's rows"
            sized = replace(
                run,
                scratchpad_bytes=taken.scratchpad_bytes,
                log_bytes=taken.log_bytes,
                log_in_memory=taken.log_directory is not None,
                log_dial=DEVICE if taken.log_directory is not None else None,
                victim_bytes=taken.victim_bytes,
                victim_dial=DEVICE if taken.victim_bytes else None,
                max_warmup_s=_MAX_WARMUP_S,
            )
            machine.wait_until_idle(arguments.patience)
            measure = partial(runner.measure_again, f"{configuration.name}, {side} tiers, round {number}", sized)
            measured[side].append(measure())
    cell = Cell(
        name=configuration.name,
        two=Side(settings=settings["two"], measured=measured["two"]),
        three=Side(settings=settings["three"], measured=measured["three"]),
    )
    print(f"{cell.name}: {', '.join(f'{ratio:.2f}' for ratio in cell.ratios)} times", file=sys.stderr, flush=True)
    return cell


if __name__ == "__main__":
    main()
