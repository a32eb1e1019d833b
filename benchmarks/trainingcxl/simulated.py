"""The same cells in the simulator: holdfast's own schedule over the declared media, before they are stretched.

The stages are those of the loop and of the pool's background thread; what they ask of a medium follows from the law of
the ids, not from the batches that were drawn. A processor's own work is not in it: the declared media stand for all of
the time that rows take.
"""

from __future__ import annotations

from dataclasses import replace

from dialled_steps import Accelerator
from holdfast_lab.sim.caches import missed_rows_per_batch
from holdfast_lab.sim.device import Compute, Device, Link, Memory
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.machine import Run, simulate
from holdfast_lab.sim.model import Model, TableGroup, Workload, workload_of
from holdfast_lab.sim.system import Cache, Stage, System
from holdfast_lab.sim.work import amounts_of
from trainingcxl.media import DeclaredLink, DeclaredMedium
from trainingcxl.models import BATCH, NUM_DENSE, ROWS, ZIPF, Shape
from trainingcxl.systems import SSD_SCRATCHPAD, Configuration

_NUMBER_BYTES = 8  # of a row, in the log
_SLICE_S = 20e-6  # what works on the medium at the same time takes turns about so
_GPU = ("bottom_forward", "interaction_top", "bottom_backward")


def model_of(shape: Shape) -> Model:
    return Model(
        batch_size=BATCH,
        tables=(TableGroup(count=shape.tables, rows=ROWS, dim=shape.dim, lookups=shape.lookups),),
        bottom=shape.bottom,
        top=shape.top,
        num_dense=NUM_DENSE,
        zipf_exponent=ZIPF,
    )


def accelerator_of(shape: Shape) -> Accelerator:
    """What the library's RTX 3090 takes for the model's dense part."""
    library, workload = read_library(), workload_of(model_of(shape))
    gpu, stages = library.device("rtx-3090"), library.system("cxl").stages
    forward, top, backward = (
        gpu.seconds(amounts_of(stages[name], workload), recently_written=False, modules=1.0) for name in _GPU
    )
    return Accelerator(bottom_forward_s=forward, top_s=top, bottom_backward_s=backward)


def simulated(shape: Shape, configuration: Configuration, accelerator: Accelerator) -> Run:
    """A cell. Of the SSD without its merges."""
    model = model_of(shape)
    workload = workload_of(model)
    medium = configuration.medium(shape)
    devices: dict[str, Device] = {
        "gpu": Compute(kind="compute", flops_per_s=1e18),
        "main": Compute(kind="compute", flops_per_s=1e18),
        "background": Compute(kind="compute", flops_per_s=1e18),
        "medium": _memory(medium),
        "link": _link(configuration.link),
    }
    stages = _stages(configuration, accelerator, workload, medium)
    system = System(title=configuration.title, devices={role: role for role in devices}, stages=stages)
    missed_rows = None
    if configuration.block:
        missed_rows = missed_rows_per_batch(Cache(policy="lru", share=SSD_SCRATCHPAD), model)
    return simulate(system, devices, workload, missed_rows=missed_rows)


def _memory(medium: DeclaredMedium) -> Memory:
    return Memory(
        kind="memory",
        read_bandwidth_bytes_per_s=medium.read,
        write_bandwidth_bytes_per_s=medium.write,
        read_latency_s=medium.read_s,
        write_latency_s=medium.write_s,
        outstanding_requests=medium.outstanding,
        granularity_bytes=medium.granularity,
        stream_write_efficiency=medium.stream_write / medium.write,
        parallelism=1,
    )


def _link(link: DeclaredLink) -> Link:
    return Link(
        kind="link", bandwidth_bytes_per_s=link.bandwidth, latency_s=link.latency_s, start_s=link.copy_s, parallelism=2
    )


def _stages(
    configuration: Configuration, accelerator: Accelerator, workload: Workload, medium: DeclaredMedium
) -> dict[str, Stage]:
    rows_bytes = workload.unique_rows * workload.row_bytes
    uncached = max(0.0, 1.0 - medium.cache_bytes / rows_bytes)
    log_part = 1.0 + _NUMBER_BYTES / workload.row_bytes
    updated = ("update", "bottom_backward")
    stages = {
        "bottom_forward": _given(accelerator.bottom_forward_s, after=_previous(*updated)),
        "capture": _rows("fetch", after=_previous(*updated)),
        "lookup": _rows("lookup", rows="accesses", part=uncached, after=("capture",)),
        "move_pooled": Stage(does="move_pooled", on=("link",), after=("lookup",)),
        "interaction_top": _given(accelerator.top_s, after=("bottom_forward", "move_pooled")),
        "move_gradients": Stage(does="move_gradients", on=("link",), after=("interaction_top",)),
        "bottom_backward": _given(accelerator.bottom_backward_s, after=("interaction_top",)),
        "reread": _rows("lookup", part=uncached, after=("move_gradients", "seal")),
        "update": _rows("evict", after=("reread",)),
        "seal": _background("append_rows", part=log_part, rows="unique", after=("capture", "previous.log_network")),
        "log_network": _background("log_network", after=("update", "bottom_backward", "seal")),
    }
    if configuration.block:
        return _block(stages, log_part, medium)
    if configuration.synchronous:
        stages["seal"] = _background("append_rows", part=log_part, rows="unique", after=("move_gradients",))
        for name in ("bottom_forward", "capture"):
            stages[name] = _with(stages[name], after=("previous.log_network",))
        return stages
    if configuration.dense_interval > 1:
        stages["log_network"] = _with(stages["log_network"], part=1.0 / configuration.dense_interval)
    else:  # a commit waits for the one before
        stages["capture"] = _with(stages["capture"], after_earlier={"log_network": 2})
        stages["bottom_forward"] = _with(stages["bottom_forward"], after_earlier={"log_network": 2})
    if configuration.relaxed:
        stages |= _relaxed(stages, workload, uncached)
    return stages


def _block(stages: dict[str, Stage], log_part: float, medium: DeclaredMedium) -> dict[str, Stage]:
    """Rows that the scratchpad lacks are fetched, new versions appended; rows are looked up and updated in DRAM."""
    for name in ("reread", "lookup"):
        stages[name] = _given(0.0, on=("main",), after=stages[name].after)
    stages["update"] = _given(0.0, on=("main",), after=("move_gradients",))
    stages["capture"] = _rows("fetch", rows="missed", after=("previous.log_network",))
    stages["bottom_forward"] = _with(stages["bottom_forward"], after=("previous.log_network",))
    stages["seal"] = _background("append_rows", part=log_part, rows="unique", after=("update", "bottom_backward"))
    stages["sync"] = _given(medium.sync_s, on=("background", "medium"), after=("seal",))
    stages["log_network"] = _with(stages["log_network"], after=("sync",))
    return stages


def _relaxed(stages: dict[str, Stage], workload: Workload, uncached: float) -> dict[str, Stage]:
    """Own rows are copied and pooled while the batch before computes, those that it has are handed over and added
    after its update."""
    own_rows = 1.0 - workload.repeated_rows / workload.unique_rows
    own = 1.0 - workload.overlap
    return {
        "copy_ahead": _background("fetch", part=own_rows, rows="unique", after=("previous.lookup", "previous.seal")),
        "read_ahead": _rows("fetch", part=own_rows, after=("previous.move_pooled",)),
        "lookup_ahead": _rows("lookup", rows="accesses", part=own * uncached, after=("read_ahead",)),
        "capture": _given(0.0, on=("main",), after=(*_previous("update", "bottom_backward"), "copy_ahead")),
        "lookup": _with(stages["lookup"], part=(1.0 - own) * uncached, after=("capture", "lookup_ahead")),
        "seal": _with(stages["seal"], after=("copy_ahead", "previous.update", "previous.log_network")),
    }


def _previous(*names: str) -> tuple[str, ...]:
    return tuple(f"previous.{name}" for name in names)


def _given(seconds: float, *, on: tuple[str, ...] = ("gpu",), after: tuple[str, ...]) -> Stage:
    return Stage(does="given", seconds=seconds, on=on, after=after)


def _rows(does: str, *, rows: str = "unique", part: float = 1.0, after: tuple[str, ...]) -> Stage:
    on = ("main", "medium")
    return Stage(does=does, rows=rows, part=part, on=on, after=after, slice_s=_SLICE_S)  # type: ignore[arg-type]


def _background(does: str, *, rows: str = "unique", part: float = 1.0, after: tuple[str, ...]) -> Stage:
    on = ("background", "medium")
    return Stage(does=does, rows=rows, part=part, on=on, after=after, slice_s=_SLICE_S)  # type: ignore[arg-type]


def _with(stage: Stage, **changes: object) -> Stage:
    return replace(stage, **changes)  # type: ignore[arg-type]
