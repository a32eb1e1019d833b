"""What must be so in a process for PyTorch on the CPU to give the same bits as in every other. Imports no torch.

MKL, which PyTorch calls for float32 products, chooses among its paths by where operands happen to lie in memory, unless
``MKL_CBWR`` asks for a strict branch; it reads that variable once, at its first call in the process.
"""

from __future__ import annotations

import os
import sys
import warnings

_VARIABLE = "MKL_CBWR"
_STRICT = "AUTO,STRICT"
_remembered: list[str] = []


def prepare_environment() -> None:
    """Sets what the process needs for the same bits everywhere. Call it before anything computes with torch; whoever set
    MKL_CBWR on their own keeps it (`check_environment` says if it does not suffice)."""
    os.environ.setdefault(_VARIABLE, _STRICT)


def check_environment(warn: bool = True) -> list[str]:
    """What stands in the way of the same bits in every process, as sentences that say what to do; empty if nothing does.

    warn: also as a RuntimeWarning, each once in the life of the process.
    """
    problems = []
    value = os.environ.get(_VARIABLE)
    if not _is_strict(value):
        problems.append(
            f"{_VARIABLE}={value or ''}: "
        )
    for problem in problems:
        if warn and problem not in _remembered:
            _remembered.append(problem)
            warnings.warn(problem, RuntimeWarning, stacklevel=2)
    return problems


def _is_strict(value: str | None) -> bool:
    return value is not None and value.upper().endswith(",STRICT")
