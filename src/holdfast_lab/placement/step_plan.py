"""The predicted step of a run as it is configured, on the machine that its tiers file describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.data.source import Source
from holdfast.errors import ConfigError
from holdfast.pools.directory import log_bytes_of
from holdfast.pools.machine import default_scratchpad_bytes
from holdfast.run.sections import RunConfig
from holdfast_lab.placement.access_profile import AccessProfile
from holdfast_lab.placement.demand import demand_of, reuse_of
from holdfast_lab.placement.host import Host
from holdfast_lab.placement.network_time import NetworkTime, time_network
from holdfast_lab.placement.program import log_tier
from holdfast_lab.placement.step_time import StepInputs, StepOptions, StepTime, predict_step
from holdfast_lab.placement.tiers import Tier, Tiers

_SECONDS_PER_DAY = 86_400
_MEDIUM_OF = {"in_place": "memory", "log": "block"}
_KINDS_OF = {"in_place": ("byte", "dram"), "log": ("block",)}


def step_inputs(
    config: RunConfig,
    source: Source,
    tiers: Tiers,
    profile: AccessProfile | None,
    *,
    network: NetworkTime | None = None,
) -> StepInputs:
    """Of a pool on the tier that takes the log; where a tier names a directory, the log alone is there, and the rows
    are at home on a block tier that names none. Times the network here, unless that was done.

    Raises ConfigError where the tiers have no costs, or those of another store than the run's, and what `demand_of` and
    `time_network` raise.
    """
    if tiers.host is None:
        raise ConfigError("tiers: there is no [host], without which no step can be predicted; `holdfast tiers probe`")
    medium, log_medium = _media(config, tiers.tiers, tiers.host)
    is_log_store = tiers.host.store == "log"
    pool = config.pool
    demand, _ = demand_of(config, source, profile)
    scratchpad_bytes = default_scratchpad_bytes() if pool.scratchpad_bytes is None else pool.scratchpad_bytes
    log_bytes = pool.log_bytes
    if log_bytes is None:
        table_bytes = demand.table_bytes
        log_bytes = log_bytes_of(is_log_store, table_bytes, scratchpad_bytes)
    return StepInputs(
        demand=demand,
        curves=reuse_of(config, source, profile),
        network=time_network(config, source) if network is None else network,
        host=tiers.host,
        medium=medium,
        options=StepOptions(
            scratchpad_bytes=scratchpad_bytes,
            log_bytes=log_bytes,
            workers=config.train.workers,
            victim_bytes=0 if pool.victims is None or not is_log_store else pool.victims.bytes,
        ),
        log_medium=log_medium,
        victim_medium=_victim_tier(tiers.tiers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Of a log store whose tables are new: a step in the middle of the first pass over the data and one of a later
    pass, seconds of either pass, what the pool takes on the disk when all of the data was seen, and what later passes
    write there.
    """

    first: StepTime
    later: StepTime
    first_s: float
    later_s: float
    disk_bytes: float
    written_bytes_per_day: float


def passes_of(inputs: StepInputs, num_steps: float) -> Passes | None:
    """num_steps: of one pass. None where rows are overwritten in place."""
    if inputs.host.store != "log" or num_steps < 2:
        return None
    first, later = (predict_step(inputs.with_options(steps_before=steps)) for steps in (num_steps / 2, num_steps))
    assert later.store_work is not None
    work = later.store_work
    written = work.record_bytes + inputs.demand.dense_bytes_per_batch + work.all_written_bytes
    return Passes(
        first=first,
        later=later,
        first_s=num_steps * first.ms / 1e3,
        later_s=num_steps * later.ms / 1e3,
        disk_bytes=work.home_bytes + inputs.options.log_bytes,
        written_bytes_per_day=written * _SECONDS_PER_DAY / (later.ms / 1e3),
    )


def plan_step(
    config: RunConfig,
    source: Source,
    tiers: Tiers,
    profile: AccessProfile | None,
    *,
    network: NetworkTime | None = None,
) -> StepTime:
    """The step that `step_inputs` foretell; raises what it raises."""
    return predict_step(step_inputs(config, source, tiers, profile, network=network))


def _victim_tier(tiers: Sequence[Tier]) -> Tier | None:
    """Byte-addressable, and the largest."""
    apart = [tier for tier in tiers if tier.directory is not None and tier.kind == "byte"]
    return max(apart, key=lambda tier: tier.capacity_bytes, default=None)


def _media(config: RunConfig, tiers: Sequence[Tier], host: Host) -> tuple[Tier, Tier | None]:
    """Of the rows at home, and of the log, where it is another: beside the rows where the pool has a victim cache and
    its log no place of its own."""
    wanted = config.pool.medium
    if wanted not in ("auto", _MEDIUM_OF[host.store]):
        raise ConfigError(
            f"pool.medium = {wanted!r}, but the tiers' [host] was measured with medium {_MEDIUM_OF[host.store]!r}; "
            "probe a directory on the medium that the pool is going to lie on"
        )
    apart = [tier for tier in tiers if tier.directory is not None]
    homes = [tier for tier in tiers if tier.directory is None and tier.kind == "block"]
    pool = config.pool
    is_beside = pool.victims is not None and (pool.log is None or pool.log.directory is None)
    if host.store == "log" and is_beside and homes:
        return max(homes, key=lambda tier: tier.capacity_bytes), None
    if host.store == "log" and apart and homes:
        of_log = max(apart, key=lambda tier: tier.write_bandwidth_bytes_per_s)
        return max(homes, key=lambda tier: tier.capacity_bytes), of_log
    medium = tiers[log_tier(tiers)]
    if medium.kind not in _KINDS_OF[host.store]:
        raise ConfigError(
            f"tiers: [host] has costs of store {host.store!r}, but the pool would lie on tier '{medium.name}' of kind "
            f"{medium.kind!r}: probe a directory there, or, where it is to have the log alone, give it a directory"
        )
    return medium, None
