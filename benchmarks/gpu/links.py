"""How fast the machine moves bytes: within the device, between it and the host, within the host."""

from __future__ import annotations

import os
import platform
import statistics
import time
from typing import Any

import torch

from gpu.timing import seconds_of
from holdfast.device.queues import current_queue, host_empty, new_queue

_MIB = 1 << 20


def describe_device(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": device.type,
        "name": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        import triton

        facts |= {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
        }
    return facts


def measure_device_copy(device: torch.device, *, smoke: bool) -> dict[str, float]:
    """Bytes per second of one tensor copied to another, read and written."""
    num_bytes = 4 * _MIB if smoke else 2048 * _MIB
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    to = torch.empty_like(source)
    seconds = seconds_of(device, [lambda: _copy(to, source)], 3 if smoke else 20)
    return {"bytes_per_s": 2 * num_bytes / seconds, "bytes": num_bytes}


def measure_link(device: torch.device, *, smoke: bool) -> dict[str, float]:
    """Bytes per second between page-locked host memory and the device: one way, the other, both at once."""
    num_bytes, rounds = (4 * _MIB, 3) if smoke else (512 * _MIB, 10)
    hosts = [host_empty((num_bytes,), torch.uint8, device).fill_(1) for _ in range(2)]
    devices = [torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    queues = new_queue(device), new_queue(device)

    def both() -> None:
        now = current_queue(device)
        begin = now.mark()
        for queue, to, source in zip(queues, (devices[0], hosts[1]), (hosts[0], devices[1]), strict=True):
            queue.follow(begin)
            with queue:
                _copy(to, source)
            now.follow(queue.mark())

    return {
        "to_device": num_bytes / seconds_of(device, [lambda: _copy(devices[0], hosts[0])], rounds),
        "to_host": num_bytes / seconds_of(device, [lambda: _copy(hosts[1], devices[1])], rounds),
        "both": 2 * num_bytes / seconds_of(device, [both], rounds),
        "bytes": num_bytes,
    }


def measure_host_copy(*, smoke: bool) -> dict[str, float]:
    """Bytes per second of host memory copied by all of torch's threads, read and written."""
    num_bytes = 4 * _MIB if smoke else 2048 * _MIB
    source, to = (torch.ones(num_bytes // 4) for _ in range(2))
    seconds = []
    for _ in range(3 if smoke else 8):
        began = time.perf_counter()
        to.copy_(source)
        seconds.append(time.perf_counter() - began)
    return {
        "bytes_per_s": 2 * num_bytes / statistics.median(seconds),
        "bytes": num_bytes,
        "threads": torch.get_num_threads(),
    }


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)
