"""What the schedules come to by arithmetic, and the simulator's ScratchPipe on the same workload.

The arithmetic is of the declared figures alone: rows cross a link that has a way for each direction, the accelerator
does one thing at a time, and what is in turn adds up. Missed rows are the simulator's (sim/caches.py), at the size of
the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from dialled_steps import Accelerator
from holdfast.errors import ConfigError, DoesNotFit
from holdfast_lab.sim.caches import missed_rows_per_batch
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import Model, TableGroup, workload_of
from holdfast_lab.sim.system import Cache
from holdfast_lab.sim.work import amounts_of
from scratchpipe.batches import BATCH, FULL_BATCH, FULL_ROWS, NUM_DENSE, ROWS, SCALE, TABLES, Workload
from scratchpipe.systems import LINK, ROW_OF_LOG_BYTES, Mode

_HARDWARE = "scratchpipe-v100"
_SYSTEMS = {"static": "scratchpipe-static", "lru": "scratchpipe-lru", "forward": "scratchpipe"}
_LEAST_EXPONENT = 1e-6


def model_of(workload: Workload, *, full: bool) -> Model:
    rows, batch = (FULL_ROWS, FULL_BATCH) if full else (ROWS, BATCH)
    return Model(
        batch_size=batch,
        tables=(TableGroup(count=TABLES, rows=rows, dim=workload.dim, lookups=workload.lookups),),
        bottom=(64, workload.dim),
        top=(256, 64, 1),
        num_dense=NUM_DENSE,
        zipf_exponent=max(workload.exponent, _LEAST_EXPONENT),
    )


def accelerator_of(workload: Workload) -> Accelerator:
    """What the library's V100 takes for a full batch, its rows in its own memory."""
    library, work = read_library(), workload_of(model_of(workload, full=True))
    system = library.system(_HARDWARE)

    def seconds(stage: str, device: str) -> float:
        amounts = amounts_of(system.stages[stage], work)
        return library.device(device).seconds(amounts, recently_written=False, modules=1.0)

    forward, top, backward = (
        seconds(name, "v100") for name in ("bottom_forward", "interaction_top", "bottom_backward")
    )
    rows_s = seconds("lookup", "v100-hbm") + seconds("update", "v100-hbm")
    return Accelerator(bottom_forward_s=forward, top_s=rows_s + top, bottom_backward_s=backward)


@cache
def missed_rows(workload: Workload, *, static: bool) -> float:
    """Of a batch of the run."""
    policy = "static" if static else "lru"
    return missed_rows_per_batch(Cache(policy=policy, share=workload.cache), model_of(workload, full=False))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Seconds of a full batch, each alone."""

    fetch_s: float
    write_s: float
    train_s: float


def ways_of(workload: Workload, mode: Mode, accelerator: Accelerator, unique: float, log_bytes_per_s: float) -> Ways:
    """unique: different rows of a batch of the run. log_bytes_per_s: of a full batch."""
    missed = unique if mode.in_place else missed_rows(workload, static=mode.keeps)
    fetch_s = SCALE * missed * workload.row_bytes / LINK if mode.dialled else 0.0
    logged_s = SCALE * unique * (workload.row_bytes + ROW_OF_LOG_BYTES) / log_bytes_per_s
    return Ways(fetch_s=fetch_s, write_s=fetch_s if mode.in_place else logged_s, train_s=accelerator.total_s)


def predicted_s(mode: Mode, ways: Ways) -> float:
    """A batch: what is in turn adds up, of what is side by side the longest counts."""
    if mode.window > 1:
        return max(ways.fetch_s, ways.write_s, ways.train_s)
    if mode.synchronous:
        return ways.fetch_s + ways.train_s + ways.write_s
    return max(ways.fetch_s + ways.train_s, ways.write_s)


@cache
def library_ms(workload: Workload) -> dict[str, float | None]:
    """The simulator's ScratchPipe and its opponents, on a V100 and a server, where the window fits."""
    library = read_library()
    on_hardware = library.system(_HARDWARE).devices
    found: dict[str, float | None] = {}
    for mode, name in _SYSTEMS.items():
        system = library.system(name)
        assert system.cache is not None
        system = replace(
            system,
            devices={role: on_hardware[role] for role in system.devices},
            cache=replace(system.cache, share=workload.cache),
        )
        try:
            found[mode] = 1e3 * library.run(system, model_of(workload, full=True)).batch_s
        except (ConfigError, DoesNotFit):
            found[mode] = None
    return found
