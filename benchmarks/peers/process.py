"""What every measuring process of the peers does: its environment, and one JSON object on standard output."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

# What a peer needs from the process, set before torch is loaded; README.md says what each is worth.
_ENVIRONMENT = {
    "THP_MEM_ALLOC_ENABLE": "1",  # PyTorch: transparent huge pages under large tensors, hence under the tables
}


def report(
    arguments: argparse.Namespace, measure: Callable[[argparse.Namespace], dict[str, Any]], **environment: str
) -> None:
    """Runs ``measure`` and prints its result, with configuration and versions. Uses ``arguments.threads`` and
    ``arguments.wait_policy``; ``environment`` is set besides."""
    environment = _ENVIRONMENT | {"OMP_NUM_THREADS": str(arguments.threads)} | environment
    if arguments.wait_policy != "unset":
        environment["OMP_WAIT_POLICY"] = arguments.wait_policy
    os.environ.update(environment)
    # Libraries write to standard output as they please: it becomes standard error, and the JSON alone goes out.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    result = measure(arguments)
    config = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    result = {
        "config": config,
        "versions": _versions(),
        "processor": _processor(),
        "num_cpus": len(os.sched_getaffinity(0)),
        "environment": environment,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    } | result
    json.dump(result, output)
    output.write("\n")
    output.flush()


def _versions() -> dict[str, str]:
    packages = ("torch", "fbgemm_gpu-cpu", "torchrec", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
