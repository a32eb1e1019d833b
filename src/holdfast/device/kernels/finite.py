"""Whether a gradient is finite, without waiting for the answer."""

from __future__ import annotations

import torch
from torch import Tensor


def all_finite(grad: Tensor) -> Tensor:
    """Whether no element is infinite or a NaN: bool, 0-d, on the device. Reads `grad` once."""
    if grad.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=grad.device)
    largest: Tensor = torch.linalg.vector_norm(grad, float("inf"))
    return largest.isfinite()
