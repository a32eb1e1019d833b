"""Anchor: the one parameter of a row optimizer, through which autograd and PyTorch's tools reach gradients of rows.

Backward gives it the gradient 1, and whatever multiplies that multiplies the rows': so unscaling works as it is. Its
norm is the norm of the rows' gradients, so clipping by norm does, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import getattr_static
from typing import Any, Self

import torch
from torch import Tensor

from holdfast.errors import StepError
from holdfast.rows.row_access import RowAccess
from holdfast.rows.untraced import untraced

_NORMS = (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm, torch._foreach_norm)
_GRAD, _DATA = (getattr_static(Tensor, name) for name in ("grad", "data"))
_VIEWS = (Tensor.detach, _DATA.__get__)
_ADDITIONS = (
    torch.add,
    Tensor.add,
    Tensor.add_,
    torch._foreach_add_,
    torch.sub,
    Tensor.sub,
    Tensor.sub_,
    torch._foreach_sub_,
)
_CLAMPS = (torch.clamp, Tensor.clamp, Tensor.clamp_, torch._foreach_clamp_min_, torch._foreach_clamp_max_)


class Anchor(Tensor):
    """A scalar that wants a gradient; `grad` is a RowGradient, or None."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _access: RowAccess

    @classmethod
    def of(cls, access: RowAccess) -> Self:
        """That of a collection whose rows are reached by `access`."""
        anchor: Any = torch.zeros((), dtype=torch.float32, device=access.device).as_subclass(cls)
        anchor._access = access
        made: Self = anchor.requires_grad_()
        return made

    @property
    @untraced
    def grad(self) -> Tensor | None:
        factor: Tensor | None = _GRAD.__get__(self)
        if factor is None:
            return None
        gradient = factor.as_subclass(RowGradient)
        gradient.access = self._access
        return gradient

    @grad.setter
    @untraced
    def grad(self, factor: Tensor | None) -> None:
        if factor is None:
            self._access.drop_gradients()
        _GRAD.__set__(self, None if factor is None else factor.as_subclass(Tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """There is one of a collection, as of its rows."""
        return self


class RowGradient(Tensor):
    """What the gradients of a step's rows are multiplied with, in the memory of the anchor's gradient."""

    access: RowAccess

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raises StepError for norms of another order than 2, where gradients are to be clipped one by one, and where
        something is added to them: to what they are multiplied with, that would be."""
        named = kwargs or {}
        if func in _CLAMPS:
            raise StepError("gradients of rows are not clipped one by one: clip their norm (holdfast.clip_grad_norm_)")
        if func in _ADDITIONS:
            raise StepError(
                "gradients of rows may be multiplied, and nothing be added to them (noise, their mean): add it to the "
                "gradient of the vectors that are looked up (vectors.register_hook)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func in _NORMS:
                order = args[1] if len(args) > 1 else named.get("ord", named.get("p"))
                if order not in (None, "fro", 2):
                    raise StepError(f"a norm of order {order} of the gradients of rows: they have that of order 2")
                if isinstance(args[0], cls):
                    return args[0].norm_of_rows()
                args = ([of.norm_of_rows() if isinstance(of, cls) else of for of in args[0]], *args[1:])
            result = func(*args, **named)
        if func in _VIEWS:
            result = result.as_subclass(cls)
            result.access = args[0].access
        return result

    @untraced
    def norm_of_rows(self) -> Tensor:
        """Float32, of no dimension; 0 once they are used or dropped."""
        factor = self.as_subclass(Tensor)
        if not self.access.has_gradients:
            return torch.zeros_like(factor)
        return (factor.abs().double() * self.access.square_of_gradients().sqrt()).float()
