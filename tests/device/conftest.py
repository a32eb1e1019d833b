"""Kernels run on the machine's GPU if it has one; else Triton's interpreter runs them on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from holdfast.device import kernels
from holdfast.device.kernels.dispatch import using

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "numerics"))  # its reference of what rows become

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    # Triton asks for it when a kernel is defined. So it is imported here, with our kernels, and what comes later finds
    # the environment as it was. More of Triton is imported by the first launch.
    assert "triton" not in sys.modules, "imported before its interpreter could be asked for"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in ("lookup", "segment_sum", "update", "move", "keys"):
            importlib.import_module(f"holdfast.device.kernels.{name}_triton")
        with using("triton"):
            kernels.gather_rows(torch.ones(1, 1), None, torch.zeros(1, dtype=torch.int32), torch.empty(1, 1), None)
