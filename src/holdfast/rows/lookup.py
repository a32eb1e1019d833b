"""Lookup: what autograd knows of a lookup in the pool's rows."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from holdfast.errors import StepError
from holdfast.rows.row_access import RowAccess


class Lookup(torch.autograd.Function):
    """Pooled vectors of captured rows, which get their gradient; so do per-sample weights that want one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, access: RowAccess, captured: Any) -> Tensor:
        ctx.access, ctx.captured, ctx.anchor, ctx.weights = access, captured, anchor, weights
        return access.lookup(captured)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> NoReturn:
        raise StepError("a lookup has no forward-mode derivative by its per-sample weights: use backward")

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        access: RowAccess = ctx.access
        if torch._C._functorch.is_legacy_batchedtensor(grads[0]) or torch._C._functorch.is_batchedtensor(grads[0]):
            raise StepError(
                "several gradients of the pooled vectors at once (is_grads_batched, vmap of a backward): rows take one "
                "at a time"
            )
        grad = grads[0].detach()  # after backward(create_graph=True) it has a graph, of which rows are no part
        anchor_grad = _add_gradient(ctx, grad) if _is_asked_for(ctx.anchor) else None
        weight_grad = None
        if ctx.needs_input_grad[1]:
            found = torch.zeros(ctx.weights.shape, dtype=torch.float32, device="cpu")
            access.weight_gradient(ctx.captured, grad, found)
            weight_grad = found.to(ctx.weights.device)
            if grads[0].requires_grad:
                weight_grad = _Last.apply(weight_grad, grads[0])  # type: ignore[no-untyped-call]
        return anchor_grad, weight_grad, None, None


def _add_gradient(ctx: Any, grad: Tensor) -> Tensor:
    """Gives the rows their gradient; returns the anchor's. All gradients of a step have one factor, so it must be 1
    still: what earlier ones were multiplied with would be the later ones', too."""
    factor: Tensor | None = ctx.anchor.grad
    is_here = factor is None or factor.device.type == "cpu"
    if factor is not None and is_here and factor.isfinite() and factor != 1.0:
        raise StepError(
            f"a backward pass after row gradients of this step were multiplied with {float(factor):.3g} (clipped, "
            "unscaled), a factor that all of the step have in common: do that once, after the last backward pass, or "
            "drop what there is before this one (rows.optimizer.zero_grad())"
        )
    added: Tensor = ctx.access.add_gradient(ctx.captured, grad)
    if factor is None or is_here:
        return added
    return torch.where((factor == 1.0) | factor.isnan(), added, float("nan"))  # nobody waits for a device here


def _is_asked_for(leaf: Tensor) -> bool:
    """Whether the backward that runs gives `leaf` a gradient: torch.autograd.grad does not, which names others."""
    return torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)


class _Last(torch.autograd.Function):
    """A gradient that has none itself."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, of: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise StepError("the gradient of per-sample weights is not differentiated again")
