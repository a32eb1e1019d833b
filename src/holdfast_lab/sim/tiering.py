"""Tables over tiers of memory, and how many nodes they take: the question of MTrainS (Kassa et al. 2023, arXiv
2305.01515).

Where rows live, and how long a batch takes of each memory, is the answer of `holdfast_lab.placement`'s integer program,
as its text says: the slowest memory sets the pace, and hot rows are placed rather than cached. But batches are
not made durable here, for MTrainS does not: the log lies on a medium of its own that takes no time. What links,
processors and software take is the simulator's part: `placed` puts a placement into a system of stages.

Of n nodes each holds one row in n of every table, hot ones and cold, and gets one in n of a batch's different rows.
Nodes are needed for capacity, or, with `most_batch_s`, for bandwidth as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, get_args

from holdfast.errors import ConfigError, DoesNotFit
from holdfast_lab.sim.device import Memory
from holdfast_lab.sim.library import Library
from holdfast_lab.sim.model import Model, TableGroup
from holdfast_lab.sim.system import System

if TYPE_CHECKING:
    from holdfast_lab.placement.ladder import Rung
    from holdfast_lab.placement.plan import Plan
    from holdfast_lab.placement.program import Demand, TableDemand
    from holdfast_lab.placement.tiers import Tier, TierKind

FAST_KINDS = ("hbm", "dram")
_ROLE_OF_KIND = {"dram": "tables"}  # a system whose host has DRAM keeps its tables there
_MOST_NODES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """How many nodes; batch_s: what the memory that limiting_stage names takes for a batch; plan: of one node."""

    nodes: int
    batch_s: float
    limiting_stage: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """The same model on nodes with HBM and DRAM alone, and with all of their tiers."""

    fast_only: Nodes
    all_tiers: Nodes

    @property
    def times_fewer(self) -> float:
        return self.fast_only.nodes / self.all_tiers.nodes


def tiers_of(system: System, library: Library) -> tuple[Tier, ...]:
    """The tiers of one node: the system's memories of the roles hbm, tables (DRAM), byte and block. Raises ConfigError
    where there are none."""
    from holdfast_lab.placement.tiers import TierKind

    tiers = []
    for kind in get_args(TierKind):
        device = library.device(system.devices[role]) if (role := _role(kind)) in system.devices else None
        if isinstance(device, Memory):
            tiers.append(_tier(system.devices[role], kind, device))
    if not tiers:
        raise ConfigError(
            f"system {system.title!r}: none of its devices is memory of the roles hbm, tables, byte, block"
        )
    return tuple(tiers)


def demand_of_model(model: Model, nodes: int = 1) -> Demand:
    """What one of `nodes` nodes is asked for. Tables alike count as one."""
    from holdfast_lab.placement.program import Demand

    dense_bytes = (model.bottom_parameters + model.top_parameters) * model.parameter_bytes
    tables = tuple(_table_demand(model, number, group, nodes) for number, group in enumerate(model.tables))
    return Demand(tables=tables, dense_bytes=math.ceil(dense_bytes))


def nodes_needed(model: Model, tiers: Sequence[Tier], *, most_batch_s: float = math.inf) -> Nodes:
    """The fewest nodes with these tiers that hold the model, and whose memories take no longer for a batch than that.

    Raises DoesNotFit where not even thousands of nodes do.
    """
    by_capacity = nodes = _fewest_by_capacity(model, tiers)
    found = _on_nodes(model, tiers, nodes)
    while found is None or found.batch_s > most_batch_s:
        nodes *= 2
        if nodes > _MOST_NODES:
            raise DoesNotFit(f"{_MOST_NODES:,} nodes neither hold the model nor read it in {most_batch_s} s a batch")
        found = _on_nodes(model, tiers, nodes)
    too_few = max(nodes // 2, by_capacity - 1)
    while found.nodes - too_few > 1:
        middle = (too_few + found.nodes) // 2
        tried = _on_nodes(model, tiers, middle)
        if tried is None or tried.batch_s > most_batch_s:
            too_few = middle
        else:
            found = tried
    return found


def compare(model: Model, tiers: Sequence[Tier], *, most_batch_s: float = math.inf) -> Saving:
    """Raises ConfigError where the node has neither HBM nor DRAM."""
    fast = [tier for tier in tiers if tier.kind in FAST_KINDS]
    if not fast:
        raise ConfigError("tiers: there is neither HBM nor DRAM to compare with")
    return Saving(
        fast_only=nodes_needed(model, fast, most_batch_s=most_batch_s),
        all_tiers=nodes_needed(model, tiers, most_batch_s=most_batch_s),
    )


def placed(system: System, plan: Plan) -> System:
    """The system whose stages move what the plan says: of a batch's different rows, the part that lives on the memory
    which a stage is on, and of those that stages move to or from HBM, all that do not live there."""
    rows = {use.kind: 0.0 for use in plan.tiers}
    for use in plan.tiers:
        rows[use.kind] += use.unique_rows_per_batch
    all_rows = sum(rows.values()) or 1.0
    parts = {_role(kind): of_kind / all_rows for kind, of_kind in rows.items()}
    stages = dict(system.stages)
    for name, stage in stages.items():
        if stage.does in ("fetch", "evict"):
            role = next((role for role in stage.on if role in map(_role, ("dram", "byte", "block"))), None)
            if role is not None:
                part = parts.get(role, 0.0)
                stages[name] = replace(stage, part=part, skip=stage.skip or part == 0.0)
        elif stage.does == "move_rows":
            stages[name] = replace(stage, part=1.0 - parts.get("hbm", 0.0))
    return replace(system, stages=stages)


def _role(kind: str) -> str:
    return _ROLE_OF_KIND.get(kind, kind)


def _tier(name: str, kind: TierKind, memory: Memory) -> Tier:
    from holdfast_lab.placement.tiers import Tier

    if not math.isfinite(memory.capacity_bytes):
        raise ConfigError(f"devices.{name}.capacity_bytes is missing; a tier needs it")
    modules = memory.modules if memory.modules_by == "fixed" else 1.0
    reads_per_s = memory.outstanding_requests * modules / memory.read_latency_s if memory.read_latency_s else None
    return Tier(
        name=name,
        kind=kind,
        capacity_bytes=int(memory.capacity_bytes * modules),
        read_bandwidth_bytes_per_s=memory.read_bandwidth_bytes_per_s * modules,
        write_bandwidth_bytes_per_s=memory.write_bandwidth_bytes_per_s * modules,
        read_latency_ns=memory.read_latency_s * 1e9,
        access_granularity_bytes=memory.granularity_bytes,
        random_reads_per_s=reads_per_s,
        sync_latency_ns=memory.write_latency_s * 1e9,
    )


def _log_medium(demand: Demand, tiers: Sequence[Tier]) -> Tier:
    """Has room for the log and for no row, and takes it in no time."""
    from holdfast_lab.placement.tiers import MOST_FIGURE, Tier

    return Tier(
        name="the log",
        kind="byte",
        capacity_bytes=demand.reserved_bytes,
        read_bandwidth_bytes_per_s=0.5 * min(tier.read_bandwidth_bytes_per_s for tier in tiers),
        write_bandwidth_bytes_per_s=MOST_FIGURE,
        read_latency_ns=0.0,
        access_granularity_bytes=64,
    )


def _table_demand(model: Model, number: int, group: TableGroup, nodes: int) -> TableDemand:
    from holdfast_lab.placement.demand import expected_ladder
    from holdfast_lab.placement.program import TableDemand

    accesses = model.batch_size * group.lookups
    ladder = expected_ladder(max(1, round(group.rows)), model.zipf_exponent, accesses)
    return TableDemand(
        name=f"tables {number}",
        weight_bytes=math.ceil(group.dim * model.weight_bytes),
        state_bytes=math.ceil(model.state_bytes),
        accesses_per_batch=accesses * group.count / nodes,
        ladder=_scaled(ladder, group.count / nodes),
    )


def _scaled(ladder: Sequence[Rung], times: float) -> tuple[Rung, ...]:
    """So many times the rows, as many of them hot; rungs that become one are one."""
    from holdfast_lab.placement.ladder import Rung

    rungs = [
        Rung(
            rows=math.ceil(rung.rows * times),
            access_share=rung.access_share,
            unique_rows_per_batch=rung.unique_rows_per_batch * times,
        )
        for rung in ladder
    ]
    kept = [below for below, rung in pairwise(rungs) if below.rows < rung.rows]
    return (*kept, rungs[-1])


def _fewest_by_capacity(model: Model, tiers: Sequence[Tier]) -> int:
    """Fewer cannot hold the rows."""
    table_bytes = demand_of_model(model).table_bytes
    return max(1, math.ceil(table_bytes / sum(tier.capacity_bytes for tier in tiers)))


def _on_nodes(model: Model, tiers: Sequence[Tier], nodes: int) -> Nodes | None:
    """None where the rows do not fit."""
    from holdfast_lab.placement.plan import plan_placement

    demand = demand_of_model(model, nodes)
    try:
        plan = plan_placement(demand, [*tiers, _log_medium(demand, tiers)])
    except DoesNotFit:
        return None
    return Nodes(nodes=nodes, batch_s=plan.ms_per_batch / 1e3, limiting_stage=plan.limiting_stage, plan=plan)
