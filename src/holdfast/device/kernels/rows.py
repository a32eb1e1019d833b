"""The sums over a row's elements, in plain torch: the fixed tree of core/kernels/lanes.inc.h."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 16


def lane_sums(products: Tensor) -> Tensor:
    """float32 ``[rows, dim]`` to ``[rows, 16]``: lane i adds elements i, i + 16, i + 32 … one after another."""
    padded = torch.nn.functional.pad(products, (0, -products.shape[1] % LANES))
    lanes = torch.zeros(products.shape[0], LANES, dtype=torch.float32, device=products.device)
    for first in range(0, padded.shape[1], LANES):
        lanes += padded[:, first : first + LANES]
    return lanes


def fold_lanes(lanes: Tensor) -> Tensor:
    """``[rows, 16]`` to ``[rows]``: lane i + (i + 8), of those i + (i + 4), i + (i + 2), i + (i + 1)."""
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
