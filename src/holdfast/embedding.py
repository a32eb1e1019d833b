"""EmbeddingBagCollection: embedding bags whose rows live in a pool, as an ``nn.Module``.

A training forward captures the batch's rows (undo log and working set in one) and pools from them; backward keeps the
gradient of the pooled output; ``optimizer.step()`` updates the rows and writes them home; ``Checkpoint.commit`` makes
the step durable. A forward in ``eval()`` mode or under ``torch.no_grad()`` reads rows and leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from holdfast import _core
from holdfast.batch import JaggedFeatures
from holdfast.errors import ConfigError, DataError, StepError
from holdfast.optim import OPTIMIZERS, RowOptimizer, RowOptimizerSpec, RowWiseAdagrad
from holdfast.pool import Pool
from holdfast.tables import EmbeddingBagConfig, normalize_all


@runtime_checkable
class KeyedJagged(Protocol):
    """The part of TorchRec's ``KeyedJaggedTensor`` that is used."""

    def keys(self) -> list[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class PlannedFeatures:
    """A batch's ids after the plan verb: what forward takes when planning ran ahead in the loader's thread."""

    plan: _core.Plan
    weights: Tensor | None


Features: TypeAlias = "KeyedJagged | Mapping[str, tuple[Tensor, Tensor]] | PlannedFeatures"


class PooledFeatures:
    """Pooled embeddings by feature, in the shape of TorchRec's ``KeyedTensor``.

    values: float32 ``[batch_size, sum of the features' dims]``, features in the order of ``keys``.
    """

    __slots__ = ("_keys", "_lengths", "_values")

    def __init__(self, keys: list[str], lengths: list[int], values: Tensor) -> None:
        self._keys = keys
        self._lengths = lengths
        self._values = values

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def length_per_key(self) -> list[int]:
        return self._lengths

    def to_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._keys, torch.split(self._values, self._lengths, dim=1), strict=True))

    def __getitem__(self, key: str) -> Tensor:
        start = sum(self._lengths[: self._keys.index(key)])
        return self._values[:, start : start + self._lengths[self._keys.index(key)]]


class EmbeddingBagCollection(nn.Module):
    """Pooled embedding tables in a pool.

    pool: makes the pool's tables where it is new; where it is not, they must be the ones that are asked for.
    tables: ``EmbeddingBagConfig`` of holdfast or of TorchRec. Several features may read one table.
    optimizer: of the rows; see ``holdfast.optim``.

    The tables are no parameters of the module: ``parameters()`` and ``state_dict()`` hold the dense part of a model
    alone, so any ``torch.optim`` optimizer takes it as it is.

    Raises ConfigError where a table differs from the pool's; names the field.
    """

    def __init__(self, pool: Pool, tables: Iterable[Any], *, optimizer: RowOptimizerSpec | None = None) -> None:
        super().__init__()
        spec = RowWiseAdagrad() if optimizer is None else optimizer
        self._tables = normalize_all(tables)
        numbers = pool.attach(self._tables, spec.kind, OPTIMIZERS)
        self._pool = pool
        self._keys = [feature for table in self._tables for feature in table.feature_names]
        self._dims = [table.embedding_dim for table in self._tables for _ in table.feature_names]
        features = [(feature, t) for t, table in enumerate(self._tables) for feature in table.feature_names]
        self._core = pool.core.collection(numbers, features)
        # A plain tensor, not a parameter: it exists so that autograd comes here, and to carry factors of the gradient.
        self.anchor = torch.zeros((), requires_grad=True)
        self._gradients: list[tuple[_core.Capture, np.ndarray[Any, Any]]] = []
        self._summed: _core.SummedGradients | None = None
        self._blocks: dict[tuple[str, ...], tuple[int, ...]] = {}
        self.optimizer = RowOptimizer(self, spec)
        pool.collections.append(self)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._tables

    def keys(self) -> list[str]:
        """The features in the order of the output."""
        return self._keys

    @property
    def output_width(self) -> int:
        """Columns of the pooled output: the sum of the features' dims."""
        return sum(self._dims)

    def plan(
        self, features: KeyedJagged | Mapping[str, tuple[Tensor, Tensor]], *, ahead: bool = True
    ) -> PlannedFeatures:
        """The plan verb: the batch's unique rows and where they occur. Needs the ids alone, so it may run in another
        thread (`ahead`), for every batch that is on its way.

        Raises IdError (names feature, sample and value), DataError, ConfigError.
        """
        jagged = JaggedFeatures.from_bags(features) if isinstance(features, Mapping) else features
        keys = tuple(jagged.keys())
        block_of = self._blocks.get(keys)
        if block_of is None:
            missing = [key for key in self._keys if key not in keys]
            if missing:
                raise ConfigError(f"the batch has no feature '{missing[0]}' (it has {', '.join(keys)})")
            block_of = self._blocks[keys] = tuple(keys.index(key) for key in self._keys)
        weights = jagged.weights_or_none()
        try:
            plan = self._core.plan(
                _cpu(jagged.values(), "ids", torch.int64).numpy(),
                _cpu(_offsets_of(jagged), "offsets", None).numpy(),
                None if weights is None else _cpu(weights.detach(), "weights", torch.float32).numpy(),
                block_of,
                len(keys),
                not ahead,
            )
        except (ValueError, TypeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"a batch's ids, offsets and weights do not fit together: {error}") from error
        return PlannedFeatures(plan, weights)

    def forward(self, features: Features) -> PooledFeatures:
        planned = features if isinstance(features, PlannedFeatures) else self.plan(features, ahead=False)
        if self.training and torch.is_grad_enabled():
            out = self.lookup(self.capture(planned), planned)
        else:
            out = self._empty(planned.plan)
            self._pool.core.evaluate(planned.plan, out.numpy())
        return PooledFeatures(self._keys, self._dims, out)

    def announce(self, planned: PlannedFeatures) -> None:
        """Says that `planned` is going to be captured, after the batches that were announced before: where rows come
        through a scratchpad, they are fetched while earlier batches train. Keep `planned` until then."""
        self._pool.core.announce(planned.plan)

    def capture(self, planned: PlannedFeatures) -> _core.Capture:
        """The capture verb: copies the plan's rows into the step's log record, whose sealing is on its way when this
        returns. Raises BatchTooLarge, PoolFull, StepError."""
        self._summed = None
        return self._pool.core.capture(planned.plan)

    def capture_ahead(self, planned: PlannedFeatures) -> bool:
        """Captures the next step's rows on the pool's own thread while this step computes; the rows that both steps
        update are handed over by this step's update. Call it after this step's forward. Returns False where it is not
        possible now; the next forward then captures as usual."""
        return self._pool.core.capture_ahead(planned.plan)

    def lookup(self, capture: _core.Capture, planned: PlannedFeatures) -> Tensor:
        """The lookup verb: pools from the captured rows. float32 ``[batch_size, output_width]``."""
        out: Tensor = _Lookup.apply(self.anchor, planned.weights, self, capture, planned)  # type: ignore[no-untyped-call]
        return out

    def gradient_norm(self) -> float:
        """L2 norm of this step's row gradients, each row's summed over its occurrences; 0 without any."""
        if not self._gradients:
            return 0.0
        if self._summed is None:
            self._summed = self._pool.core.sum_gradients(self._gradients)
        factor = 1.0 if self.anchor.grad is None else float(self.anchor.grad)
        return abs(factor) * math.sqrt(self._summed.sum_of_squares)

    def update_rows(self, **hyperparameters: float) -> None:
        """The update verb, as ``optimizer.step()`` calls it."""
        if not self._gradients:
            return
        if self._summed is not None:
            self._pool.core.update_summed(self._summed, **hyperparameters)
        else:
            self._pool.core.update(self._gradients, **hyperparameters)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forgets the row gradients since the last update."""
        self._gradients = []
        self._summed = None
        self.anchor.grad = None

    def add_gradient(self, capture: _core.Capture, grad: Tensor) -> Tensor:
        """Keeps the gradient of a capture's pooled output; returns the anchor's gradient."""
        if capture.step != self._pool.step + 1:
            raise StepError(f"backward through a forward of step {capture.step}, which is over")
        first = not self._gradients
        self._summed = None
        self._gradients.append((capture, grad.numpy()))
        return torch.tensor(float(first) if _core.all_finite(grad.numpy()) else float("nan"))

    def weight_gradient(self, capture: _core.Capture, planned: PlannedFeatures, grad: Tensor) -> Tensor:
        """Gradient of the per-sample weights, parallel to the batch's ids."""
        assert planned.weights is not None
        out = torch.zeros_like(planned.weights, dtype=torch.float32)
        for feature, (begin, end) in enumerate(capture.plan.spans):
            self._pool.core.scale_gradients(capture, feature, grad.numpy(), out[begin:end].numpy())
        return out

    def _empty(self, plan: _core.Plan) -> Tensor:
        return torch.empty(plan.num_bags, plan.output_width)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: Tensor | None,
        collection: EmbeddingBagCollection,
        capture: _core.Capture,
        planned: PlannedFeatures,
    ) -> Tensor:
        ctx.collection, ctx.capture, ctx.planned = collection, capture, planned
        out = collection._empty(capture.plan)
        collection._pool.core.lookup(capture, out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0].to(device="cpu", dtype=torch.float32).contiguous()
        anchor_grad = ctx.collection.add_gradient(ctx.capture, grad)
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = ctx.collection.weight_gradient(ctx.capture, ctx.planned, grad)
        return anchor_grad, weight_grad, None, None, None


def clip_grad_norm_(
    parameters: Iterable[Tensor],
    collections: EmbeddingBagCollection | Sequence[EmbeddingBagCollection],
    max_norm: float,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over dense and row gradients together: returns the total norm.

    parameters: of the dense part. Call it after every backward of the step and before ``optimizer.step()``.
    """
    group = [collections] if isinstance(collections, EmbeddingBagCollection) else list(collections)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(g) for g in gradients]
    norms += [torch.tensor(collection.gradient_norm()) for collection in group]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    for collection in group:
        if collection.anchor.grad is not None:
            collection.anchor.grad.mul_(factor)
    return total


def _offsets_of(jagged: KeyedJagged) -> Tensor:
    if hasattr(jagged, "offsets"):
        return jagged.offsets()
    lengths: Tensor = jagged.lengths()  # type: ignore[attr-defined]
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def _cpu(tensor: Tensor, what: str, dtype: torch.dtype | None) -> Tensor:
    if tensor.device.type != "cpu":
        raise DataError(f"{what} are on {tensor.device}: the plan reads them on the CPU, keep a copy there")
    if dtype is None:
        return tensor.contiguous()
    if tensor.dtype.is_floating_point != dtype.is_floating_point:
        raise DataError(f"{what} are {tensor.dtype}; {dtype} is needed")
    return tensor.to(dtype).contiguous()
