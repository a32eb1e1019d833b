"""The parts of the benchmark, in order, with the time that is kept for each on a GPU."""

from __future__ import annotations

import gc
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpu.batches import SCRATCHPADS, write_batches
from gpu.gather import measure_gather
from gpu.kernel_times import measure_kernels
from gpu.links import describe_device, measure_device_copy, measure_host_copy, measure_link
from gpu.process import Part, Settings, Telling
from gpu.shapes import LAWS, NAMES, make_case
from gpu.training import MARGIN, Way, make_pool, measure_resident, measure_steps
from holdfast.device.faults import open_device
from holdfast.state.reproducibility import keep_freed_memory, prepare_device
from holdfast.train.dense_part import DenseOptions

OPTIONS = {
    "bf16": DenseOptions(bf16=True),
    "graphs": DenseOptions(graphs=True),
    "compile": DenseOptions(compile=True),
    "bf16, compile, graphs": DenseOptions(bf16=True, compile=True, graphs=True),
}
_SMALL, _LARGE = SCRATCHPADS
WAYS = {
    f"scratchpad, 1/{_SMALL}": Way(rows="scratchpad"),
    f"scratchpad, 1/{_LARGE}": Way(rows="scratchpad", ratio=_LARGE),
    "direct": Way(rows="direct"),
    "near_memory": Way(rows="near_memory"),
    "near_memory, relaxed": Way(rows="near_memory", relaxed=True),
}
RESIDENT = "resident"
DEVICE = "machine/device"
GATHERED = ("rm1", "mlperf")
_COMPILING_S = 40.0
_ONE_RUN_S = 8.0


def kernels_key(name: str, law: str) -> str:
    return f"kernels/{name}/{law}"


def gather_key(name: str, law: str) -> str:
    return f"gather/{name}/{law}"


def steps_key(name: str, way: str, options: str = "") -> str:
    """way: of WAYS, or RESIDENT. options: of OPTIONS, or none."""
    return "/".join(part for part in ("steps", name, way, options) if part)


def all_parts() -> list[Part]:
    seconds = {"kaggle": (20, 60), "rm1": (35, 75), "mlperf": (35, 130)}
    return [
        Part("machine", (DEVICE, "machine/device_copy", "machine/link", "machine/host_copy"), 20, _machine),
        *(
            Part(
                f"kernels of {name}",
                tuple(kernels_key(name, law) for law in LAWS),
                seconds[name][0],
                partial(_kernels, name),
            )
            for name in NAMES
        ),
        *(Part(f"steps of {name}", _keys_of_steps(name), seconds[name][1], partial(_steps, name)) for name in NAMES),
        *(
            Part(f"gather of {name}", tuple(gather_key(name, law) for law in LAWS), 20, partial(_gather, name))
            for name in GATHERED
        ),
    ]


def _keys_of_steps(name: str) -> tuple[str, ...]:
    keys = [steps_key(name, way) for way in (RESIDENT, *WAYS)]
    if make_case(name, smoke=False).options:
        keys += [steps_key(name, way, options) for options in OPTIONS for way in (RESIDENT, next(iter(WAYS)))]
    return tuple(keys)


def _machine(telling: Telling, settings: Settings, directory: Path) -> None:
    device = open_device(settings.device)
    smoke = settings.smoke
    telling.measure(DEVICE, lambda: describe_device(device))
    telling.measure("machine/device_copy", lambda: measure_device_copy(device, smoke=smoke))
    telling.measure("machine/link", lambda: measure_link(device, smoke=smoke))
    telling.measure("machine/host_copy", lambda: measure_host_copy(smoke=smoke))


def _kernels(name: str, telling: Telling, settings: Settings, directory: Path) -> None:
    device = open_device(settings.device)
    case = make_case(name, smoke=settings.smoke)
    for law in LAWS:
        telling.measure(kernels_key(name, law), partial(measure_kernels, case, law, device, smoke=settings.smoke))
        _tidy(device)


def _steps(name: str, telling: Telling, settings: Settings, directory: Path) -> None:
    """The pool is made once; every run goes on with it from where the one before ended."""
    keep_freed_memory()
    device = open_device(settings.device)
    prepare_device(device)
    case = make_case(name, smoke=settings.smoke).in_pool(_bytes_free(directory, device))
    source, num_filling = write_batches(case, directory / "ids", case.settling + case.steps + MARGIN)
    make_pool(case, directory / "pool")

    def measure(way: str, options: str, needs_s: float) -> None:
        dense = OPTIONS.get(options, DenseOptions())

        def work() -> dict[str, Any]:
            if way == RESIDENT:
                return measure_resident(case, source, num_filling, dense, device)
            chosen = replace(WAYS[way], dense=dense)
            return measure_steps(case, source, num_filling, chosen, directory / "pool", device, telling.ends)

        telling.measure(steps_key(name, way, options), work, needs_s=0.0 if settings.smoke else needs_s)
        _tidy(device)

    for way in (RESIDENT, *WAYS):
        measure(way, "", _ONE_RUN_S)
    for options, dense in OPTIONS.items() if case.options else ():
        for way in (RESIDENT, next(iter(WAYS))):
            measure(way, options, _COMPILING_S if dense.compile else _ONE_RUN_S)


def _gather(name: str, telling: Telling, settings: Settings, directory: Path) -> None:
    device = open_device(settings.device)
    case = make_case(name, smoke=settings.smoke).in_pool(_bytes_free(directory, device))
    make_pool(case, directory / "pool")
    for law in LAWS:
        telling.measure(
            gather_key(name, law),
            partial(measure_gather, case, law, directory / "pool", device, smoke=settings.smoke),
        )
        _tidy(device)


def _bytes_free(directory: Path, device: torch.device) -> int:
    """For tables: in the pool's directory and in the host's memory, which may be the same, and on the device."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = [shutil.disk_usage(directory).free, int(fields["MemAvailable"].split()[0]) * 1024]
    if device.type == "cuda":
        free.append(torch.cuda.mem_get_info(device)[0])
    return min(free)


def _tidy(device: torch.device) -> None:
    """What a measurement held is free for the next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
