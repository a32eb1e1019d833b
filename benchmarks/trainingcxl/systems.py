"""The paper's six configurations as runs of holdfast: every difference between them is a public switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dialled_steps import Accelerator
from trainingcxl.media import CXL, PCIE, DeclaredLink, DeclaredMedium, cxl_mem, pmem_of_host, ssd
from trainingcxl.models import BATCH, NUM_DENSE, ROWS, Shape

RELAXED_INTERVAL = 10  # batches from one log of the parameters to the next, where that is relaxed
_ENDLESS = 1_000_000
SSD_SCRATCHPAD = 0.05  # of the tables, in DRAM


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A system. near: rows are looked up and updated beside the memory, not by the host's processor."""

    name: str
    title: str
    medium: Callable[[Shape], DeclaredMedium]
    link: DeclaredLink
    near: bool
    synchronous: bool
    dense_interval: int = 1
    relaxed: bool = False
    block: bool = False


CONFIGURATIONS = {
    each.name: each
    for each in (
        Configuration(
            name="ssd",
            title="SSD",
            medium=lambda shape: ssd(),
            link=PCIE,
            near=False,
            synchronous=True,
            block=True,
        ),
        *(
            Configuration(
                name=name,
                title=title,
                medium=lambda shape, way=way: pmem_of_host(way),  # type: ignore[misc]
                link=PCIE,
                near=False,
                synchronous=True,
            )
            for name, title, way in (
                ("pmem", "PMEM, six modules", "modules"),
                ("pmem-third", "PMEM, a third of DRAM", "third"),
                ("pmem-2", "PMEM, the paper's table", "table"),
            )
        ),
        Configuration(name="pcie", title="PCIe", medium=cxl_mem, link=PCIE, near=True, synchronous=True),
        Configuration(name="cxl-d", title="CXL-D", medium=cxl_mem, link=CXL, near=True, synchronous=True),
        Configuration(name="cxl-b", title="CXL-B", medium=cxl_mem, link=CXL, near=True, synchronous=False),
        Configuration(
            name="cxl",
            title="CXL",
            medium=cxl_mem,
            link=CXL,
            near=True,
            synchronous=False,
            dense_interval=RELAXED_INTERVAL,
            relaxed=True,
        ),
        Configuration(
            name="none",
            title="no checkpoint",
            medium=lambda shape: cxl_mem(shape, free_log=True),
            link=CXL,
            near=True,
            synchronous=False,
            dense_interval=_ENDLESS,
        ),
    )
}
PAPERS = ("ssd", "pmem", "pcie", "cxl-d", "cxl-b", "cxl")


def run_toml(shape: Shape, configuration: Configuration, accelerator: Accelerator, stretch: float, batches: int) -> str:
    """The run's file. `holdfast train` takes it, from benchmarks/."""
    medium, link = configuration.medium(shape), configuration.link
    pool = [
        f'medium = "{"block" if configuration.block else "memory"}"',
        f"dense_interval = {configuration.dense_interval}",
        f"synchronous = {str(configuration.synchronous).lower()}",
    ]
    if configuration.block:
        pool.append(f"scratchpad_bytes = {int(SSD_SCRATCHPAD * shape.table_bytes)}")
    return f"""\
# TrainingCXL's {configuration.title} with {shape.name}: timing only, nothing is learned.
[data]
source = "trainingcxl.batches:drawn"
tables = {shape.tables}
rows = {ROWS}
lookups = {shape.lookups}
num_dense = {NUM_DENSE}
batch = {BATCH}
batches = {batches}

[embedding]
dim = {shape.dim}
optimizer = "sgd"

[model]
bottom = {list(shape.bottom)}
top = {list(shape.top)}

[train]
batch_size = {BATCH}
steps = {batches}
shuffle = false
window = 0
capture_ahead = {str(configuration.relaxed).lower()}

[pool]
{chr(10).join(pool)}

[pool.dial]
read_bandwidth_bytes_per_s = {medium.read}
write_bandwidth_bytes_per_s = {medium.write}
stream_write_bandwidth_bytes_per_s = {medium.stream_write}
read_latency_s = {medium.read_s}
write_latency_s = {medium.write_s}
outstanding_requests = {float(medium.outstanding)}
granularity_bytes = {medium.granularity}
sync_latency_s = {medium.sync_s}
cache_bytes = {medium.cache_bytes}
stretch = {stretch}

[device]
relaxed_lookup = {str(configuration.relaxed).lower()}

{
        accelerator.device_dial(
            "RTX 3090",
            link_bytes_per_s=link.bandwidth,
            link_latency_s=link.latency_s,
            copy_s=link.copy_s,
            stretch=stretch,
        )
    }"""
