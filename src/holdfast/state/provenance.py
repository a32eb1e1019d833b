"""What a run's bits depend on beside its state: recorded with every dense state, compared when one is loaded.

Invariants
- holdfast's own kernels depend on none of it; PyTorch's do. So a run goes on under others, with a warning.
- A record does not change from step to step while the process's settings do not: neither does the text of a state.
- It is no part of what a digest covers: runs that end with the same bits may say different things here.
- Dense states of before there was a record load without a word.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.state.reproducibility import device_settings, mkl_mode

RECORD = "provenance"  # in the tree of a dense state
OF_RANKS = "provenance_of_ranks"  # there, too, by rank: where it is not rank 0's

# What a difference means; what is not here decides which kernels a device's products take.
_MEANING = {
    "torch": "kernels may sum in another order",
    "threads": "PyTorch cuts its sums by threads",
    "instruction_set": "PyTorch, MKL and oneDNN choose other kernels",
    "processor": "PyTorch, MKL and oneDNN choose other kernels",
    "mkl": "float32 products take other paths",
    "float32_products": "float32 products are rounded otherwise",
    "devices": "another device has other kernels",
}
_DECIDES = ("avx", "fma", "f16c", "sse4", "amx", "asimd", "sve", "bf16", "i8mm")  # how names of instruction sets begin


class Provenance:
    """Of one Checkpoint's process: what its states record, and what they are compared with.

    model: where its parameters are says which devices count.
    """

    def __init__(self, model: nn.Module) -> None:
        self._devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        self._record = self.present()

    def record(self) -> dict[str, Any]:
        """To be kept with a state. Warns where the number of threads is not what it was at the last one."""
        num_threads = torch.get_num_threads()
        if num_threads != self._record["threads"]:
            present = {**self._record, "threads": num_threads}
            warn_of_changes(changes(self._record, present), stacklevel=6)
            self._record = present
        return self._record

    def compare(self, saved: Mapping[str, Any], whose: str = "") -> None:
        """Warns, once, of what differs from the record of a state that is loaded. whose: begins the warning."""
        self._record = self.present()
        warn_of_changes(changes(saved, self._record), stacklevel=6, whose=whose)

    def present(self) -> dict[str, Any]:
        record = {
            "torch": torch.__version__.split("+")[0],
            "threads": torch.get_num_threads(),
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "processor": _processor(),
            "mkl": mkl_mode(),
            "float32_products": _float32_products(),
            "devices": " ".join(sorted({device.type for device in self._devices} or {"cpu"})),
        }
        for device in sorted(self._devices, key=str):
            record |= device_settings(device)
        return record


def changes(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """What differs, in words; what only one of the two knows does not."""
    lines = []
    for name in present:
        if name in saved and saved[name] != present[name]:
            was, now = saved[name], present[name]
            if name == "processor":
                was, now = _without_common_words(was, now)
            meaning = _MEANING.get(name, "the device computes products otherwise")
            lines.append(f"{name.replace('_', ' ')}: was {was}, is {now} ({meaning})")
    return lines


def warn_of_changes(lines: Sequence[str], stacklevel: int, whose: str = "") -> None:
    """As one RuntimeWarning, where there are any. stacklevel: whose line it names; 2 is the caller's. whose: begins
    it."""
    if lines:
        warnings.warn(
            f"{whose}the run goes on where it was, but not with the bits that it would have had without "
            f"{'this change' if len(lines) == 1 else 'these changes'}: {'; '.join(lines)}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


@functools.cache
def _processor() -> str:
    """Its maker, and the instruction sets that decide which kernels are chosen."""
    facts: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    offered = (facts.get("flags") or facts.get("Features") or "").split()
    maker = facts.get("vendor_id") or facts.get("CPU implementer") or "unknown"
    return " ".join([maker, *sorted(flag for flag in offered if flag.startswith(_DECIDES))])


def _without_common_words(was: str, now: str) -> tuple[str, str]:
    """Lists of dozens of instruction sets that differ in a few."""
    one, other = was.split(), now.split()
    only = [" ".join(word for word in mine if word not in theirs) for mine, theirs in ((one, other), (other, one))]
    return f"one with {only[0] or 'less'}", f"one with {only[1] or 'less'}"


def _float32_products() -> str:
    """How oneDNN may round them: torch.set_float32_matmul_precision says so on the CPU, too."""
    return str(getattr(getattr(torch.backends.mkldnn, "matmul", None), "fp32_precision", "none"))
