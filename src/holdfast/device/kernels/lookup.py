"""Pooled lookup from slots, and the gradients of per-sample weights.

Sums have one order, the one of the lookups, in float32 without contraction: bits are those of the CPU's lookup
(core/kernels/pool.inc.h), wherever rows lie and whatever else is in the batch.

Bytes: the row of every lookup once (rows that repeat come from the cache), 4 for its slot, 4 × dim written for each
bag. What takes time is latency, three loads deep (bag, slot, row): a tile of bags keeps eight rows of each bag in
flight where bags are long, and many bags where they are short, so that about 32 KiB are on their way to each
multiprocessor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.device.kernels.dispatch import runs_triton
from holdfast.device.kernels.rows import fold_lanes, lane_sums


def pooled_lookup(
    weights: Tensor,
    lookup_slot: Tensor,
    bag_start: Tensor,
    columns: Tensor,
    out: Tensor,
    *,
    scale: Tensor | None,
    mean: bool,
    alignment: int = 1,
) -> None:
    """Writes every feature's pooled rows into its columns of `out`; empty bags give zeros. Other columns are left.

    weights: ``[num_slots, dim]``, float32, float16 or bfloat16. lookup_slot: int32 ``[num_lookups]``, the slot of each
    lookup. bag_start: int32 ``[num_features × batch_size + 1]``: bag b of feature f are the lookups from
    ``bag_start[f × batch_size + b]`` to the next. columns: int32 ``[num_features]``, where a feature's begin.
    out: float32 ``[batch_size, width]``, contiguous. scale: float32 ``[num_lookups]``, per-sample weights.
    mean: sums are divided by the bag's length. alignment: a power of two that divides `width` and all of `columns`;
    it makes for wider stores, never for other bits.
    """
    if bag_start.numel() <= 1:
        return
    if runs_triton(weights):
        from holdfast.device.kernels import lookup_triton

        lookup_triton.pooled_lookup(
            weights, lookup_slot, bag_start, columns, out, scale=scale, mean=mean, alignment=alignment
        )
    else:
        _pooled_lookup(weights, lookup_slot, bag_start, columns, out, scale, mean)


def scale_gradients(
    weights: Tensor,
    lookup_slot: Tensor,
    bag_start: Tensor,
    columns: Tensor,
    grad: Tensor,
    *,
    mean: bool,
    alignment: int = 1,
) -> Tensor:
    """d loss / d per-sample weights: of each lookup, the dot product of its bag's gradient and its row; for a mean,
    divided by the bag's length. float32 ``[num_lookups]``.

    grad: float32 ``[batch_size, width]``, contiguous, of the pooled output. The rest is as `pooled_lookup` has it.
    """
    if lookup_slot.numel() == 0:
        return torch.empty(0, dtype=torch.float32, device=weights.device)
    if runs_triton(weights):
        from holdfast.device.kernels import lookup_triton

        return lookup_triton.scale_gradients(
            weights, lookup_slot, bag_start, columns, grad, mean=mean, alignment=alignment
        )
    return _scale_gradients(weights, lookup_slot, bag_start, columns, grad, mean)


def _pooled_lookup(
    weights: Tensor,
    lookup_slot: Tensor,
    bag_start: Tensor,
    columns: Tensor,
    out: Tensor,
    scale: Tensor | None,
    mean: bool,
) -> None:
    dim = weights.shape[1]
    starts, lengths = bag_start[:-1].long(), bag_start.diff()
    sums = torch.zeros(lengths.numel(), dim, dtype=torch.float32, device=weights.device)
    for nth in range(int(lengths.max())):
        bags = (lengths > nth).nonzero().flatten()
        lookups = starts[bags] + nth
        rows = weights[lookup_slot[lookups].long()].float()
        sums[bags] += rows if scale is None else scale[lookups, None] * rows
    if mean:
        sums *= _mean_factor(lengths)[:, None]
    place = _first_element(columns, out) + torch.arange(dim, device=out.device)
    out.view(-1)[place] = sums


def _scale_gradients(
    weights: Tensor, lookup_slot: Tensor, bag_start: Tensor, columns: Tensor, grad: Tensor, mean: bool
) -> Tensor:
    dim = weights.shape[1]
    lengths = bag_start.diff()
    bag = torch.repeat_interleave(lengths.long(), output_size=lookup_slot.numel())
    of_bags = grad.view(-1)[_first_element(columns, grad) + torch.arange(dim, device=grad.device)]
    found = fold_lanes(lane_sums(of_bags[bag] * weights[lookup_slot.long()].float()))
    return found * _mean_factor(lengths)[bag] if mean else found


def _mean_factor(lengths: Tensor) -> Tensor:
    one = torch.ones(1, dtype=torch.float32, device=lengths.device)
    return one / lengths.clamp(min=1).float()


def _first_element(columns: Tensor, pooled: Tensor) -> Tensor:
    """Where each bag's columns begin in `pooled` [batch_size, width]: int64 [num_features × batch_size, 1]."""
    batch_size, width = pooled.shape
    samples = torch.arange(batch_size, device=pooled.device) * width
    return (columns.long()[:, None] + samples).view(-1, 1)
