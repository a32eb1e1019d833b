"""Whether rows fit where a system keeps them; what does not is refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import DoesNotFit
from holdfast_lab.sim.device import Device, Memory, Processor
from holdfast_lab.sim.model import Workload
from holdfast_lab.sim.system import Does, System

CACHE_ROLE = "cache"  # holds copies, of the part of all rows that the system's cache has
_OF_ROWS: frozenset[Does] = frozenset({"lookup", "update", "fetch", "evict", "log_rows"})


def check_capacity(system: System, devices: Mapping[str, Device], workload: Workload) -> None:
    """devices: by role. Raises DoesNotFit that names role and device."""
    memories = {role: device for role, device in devices.items() if isinstance(device, (Memory, Processor))}
    if system.cache is not None and CACHE_ROLE in memories:
        needed = system.cache.share * workload.table_bytes
        _check({CACHE_ROLE: memories[CACHE_ROLE]}, needed, f"{system.cache.share:.3g} of all rows", system, workload)
    roles = {role for stage in system.active.values() if stage.does in _OF_ROWS for role in stage.on}
    homes = {role: memory for role, memory in memories.items() if role in roles and role != CACHE_ROLE}
    if homes:
        _check(homes, workload.table_bytes, "the tables", system, workload)


def size_words(size_bytes: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes / 1e3:.3g} kB"


def _check(
    memories: Mapping[str, Memory | Processor], needed_bytes: float, what: str, system: System, workload: Workload
) -> None:
    there = sum(_modules(memory, workload) * memory.capacity_bytes for memory in memories.values())
    if needed_bytes <= there:
        return
    names = ", ".join(f"{role} ({system.devices[role]})" for role in memories)
    remedy = "make cache.share smaller" if CACHE_ROLE in memories else "give it more modules"
    raise DoesNotFit(
        f"system {system.title!r}: {what} take {size_words(needed_bytes)}, and {names} have {size_words(there)}: "
        f"{remedy}, or a larger capacity_bytes, or train fewer rows"
    )


def _modules(memory: Memory | Processor, workload: Workload) -> float:
    return memory.num_modules(workload) if isinstance(memory, Memory) else workload.gpus
