"""Sums of gradients per unique row: a fixed tree over each row's occurrences.

A row's occurrences are cut into chunks of 64, each summed one after another from zero; so are the chunks' sums, and
theirs, until one is left. The tree depends on the row's number of occurrences alone, so its bits do not depend on what
else is in the batch; up to 64 occurrences they are the CPU's (core/kernels/update.inc.h). No sum is made by atomics.

Bytes: the gradient of every occurrence once, 4 for its offset, 4 × dim written a row. Under industrial skew one row may
have most of the occurrences: 100,000 of them are 1,563 sums of 64 side by side, then 25, then one, each level a launch
of a few microseconds that only exists where the batch has such a row. Sums of chunks take 1/32 of the gradients' bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.device.kernels.dispatch import runs_triton

CHUNK = 64


def segment_sum(
    grad: Tensor,
    row_start: Tensor,
    gradient_offset: Tensor,
    dim: int,
    *,
    scale: Tensor | None,
    max_occurrences: int,
    alignment: int = 1,
) -> Tensor:
    """Each unique row's gradient, summed over its occurrences: float32 ``[num_unique, dim]``.

    grad: float32 ``[batch_size, width]``, contiguous. row_start: int32 ``[num_unique + 1]``: row u's occurrences are
    those from ``row_start[u]`` to ``row_start[u + 1]``, in order. gradient_offset: the 32 bits ``[num_lookups]``
    (as int32) of where an occurrence's gradient begins, in elements of `grad`. scale: float32 ``[num_lookups]``, what
    an occurrence's gradient is multiplied with. max_occurrences: of one row; at least as many as any has.
    alignment: a power of two that divides all of `gradient_offset`; it makes for wider loads, never for other bits.
    """
    num_unique = row_start.numel() - 1
    if num_unique == 0:
        return torch.empty(0, dim, dtype=torch.float32, device=grad.device)
    if runs_triton(grad):
        from holdfast.device.kernels import segment_sum_triton

        return segment_sum_triton.segment_sum(
            grad, row_start, gradient_offset, dim, scale=scale, max_occurrences=max_occurrences, alignment=alignment
        )
    return _segment_sum(grad, row_start, gradient_offset, dim, scale)


def _segment_sum(grad: Tensor, row_start: Tensor, gradient_offset: Tensor, dim: int, scale: Tensor | None) -> Tensor:
    if gradient_offset.numel() == 0:
        return torch.zeros(row_start.numel() - 1, dim, dtype=torch.float32, device=grad.device)
    flat = grad.view(-1)
    windows = flat.as_strided((flat.numel() - dim + 1, dim), (1, 1))
    offset = gradient_offset.long() & 0xFFFFFFFF
    counts = row_start.diff().long()
    sums, counts = _sum_chunks(windows, offset, scale, counts)
    while int(counts.max()) > 1:
        sums, counts = _sum_chunks(sums, torch.arange(sums.shape[0], device=grad.device), None, counts)
    return sums


def _sum_chunks(items: Tensor, places: Tensor, scale: Tensor | None, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of chunks of each row's items, which are behind one another in `places`; and how many a row has now, which
    is one also where it had none."""
    chunks = ((counts + CHUNK - 1) // CHUNK).clamp(min=1)
    row = torch.repeat_interleave(chunks)
    nth_chunk = torch.arange(row.numel(), device=row.device) - (chunks.cumsum(0) - chunks)[row]
    begin = (counts.cumsum(0) - counts)[row] + nth_chunk * CHUNK
    length = (counts[row] - nth_chunk * CHUNK).clamp(max=CHUNK)
    sums = torch.zeros(row.numel(), items.shape[1], dtype=torch.float32, device=items.device)
    for nth in range(int(length.max())):
        longer = (length > nth).nonzero().flatten()
        item = begin[longer] + nth
        values = items[places[item]]
        sums[longer] += values if scale is None else scale[item, None] * values
    return sums, chunks
