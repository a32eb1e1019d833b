"""ShardedRows: the embedding tables of a group's pool, as one of its ranks sees them.

A trainer routes the ids of its part of a batch to their owners and joins what comes back. An owner plans, captures,
pools and updates the rows that it has, for all trainers, in the order of the whole batch: so whole tables are trained
with the bits that one process gives them, however many trainers there are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holdfast import _core
from holdfast.batch import JaggedFeatures
from holdfast.errors import ConfigError
from holdfast.optim import RowOptimizer, RowOptimizerSpec
from holdfast.sharding.manifest import Manifest
from holdfast.sharding.roles import Roles
from holdfast.tables import EmbeddingBagConfig


class ShardedRows:
    """Tables, features and the row optimizer; on owners the collection over the member pool as well.

    tables: as the pool was made with, in any order of their own. optimizer: of the rows.
    """

    def __init__(
        self,
        manifest: Manifest,
        roles: Roles,
        member: _core.Pool | None,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: RowOptimizerSpec,
    ) -> None:
        numbers = {entry.name: number for number, entry in enumerate(manifest.tables)}
        entries = [manifest.tables[numbers[table.name]] for table in tables]
        self.features = [(feature, t) for t, table in enumerate(tables) for feature in table.feature_names]
        self.table_of_feature = [numbers[tables[t].name] for _, t in self.features]  # in the pool
        self.output_width = sum(entries[table].embedding_dim for _, table in self.features)
        self._blocks: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._router = manifest.router(entries, self.features)
        self._member = member
        self._collection = None
        if member is not None:
            self._collection = member.collection([numbers[table.name] for table in tables], self.features)
        # What RowOptimizer asks of a collection.
        self.anchor = torch.zeros((), requires_grad=True)
        self._gradients: list[tuple[_core.Capture, NDArray[np.float32]]] = []
        self._summed: _core.SummedGradients | None = None
        self.optimizer = RowOptimizer(self, optimizer)

    description = ""  # see EmbeddingBagCollection

    def as_module(self) -> nn.Module:
        """What stands in a model where one process has its EmbeddingBagCollection; it is never called."""
        return nn.Identity()

    # Trainers.

    def route(self, features: JaggedFeatures) -> _core.Route:
        """Where the ids of a trainer's part of a batch go. Raises IdError (names feature, sample and value),
        ConfigError."""
        keys = tuple(features.keys())
        block_of = self._blocks.get(keys)
        if block_of is None:
            if missing := [name for name, _ in self.features if name not in keys]:
                raise ConfigError(f"the batch has no feature '{missing[0]}' (it has {', '.join(keys)})")
            block_of = self._blocks[keys] = tuple(keys.index(name) for name, _ in self.features)
        if features.weights_or_none() is not None:
            raise ConfigError("per-sample weights do not travel between ranks yet: train without, or on one rank")
        num_bags = features.stride()
        return self._router.route(
            features.values().numpy(), features.offsets().numpy(), None, block_of, len(keys), 0, num_bags
        )

    # Owners.

    def plan(self, counts: NDArray[np.int64], messages: NDArray[np.int32]) -> _core.Plan:
        """The plan of what all trainers asked this owner for: counts int64 [trainers, features, 2], messages one after
        the other. Raises what is wrong with them: they come from elsewhere."""
        assert self._collection is not None
        return self._collection.plan_routed(counts, messages, True)

    def announce(self, plan: _core.Plan) -> None:
        assert self._member is not None
        self._member.announce(plan)

    def capture(self, plan: _core.Plan) -> _core.Capture:
        assert self._member is not None
        self._summed = None
        return self._member.capture(plan)

    def lookup(self, capture: _core.Capture, out: Tensor) -> None:
        """Pools into float32 `out`, one dimension: the trainers' blocks, one after the other."""
        assert self._member is not None
        self._member.lookup(capture, out.numpy().reshape(1, -1))

    def evaluate(self, plan: _core.Plan, out: Tensor) -> None:
        """The same, without a trace."""
        assert self._member is not None
        self._member.evaluate(plan, out.numpy().reshape(1, -1))

    def add_gradient(self, capture: _core.Capture, grad: Tensor) -> None:
        """Keeps the gradients of what `lookup` gave, laid out alike."""
        self._gradients = [(capture, grad.numpy().reshape(1, -1))]
        self.anchor.grad = torch.ones(())

    def gradient_square(self) -> float:
        """Of this owner's row gradients, each row's summed over its occurrences: the sum of squares."""
        if self._member is None:
            return 0.0
        if self._summed is None:
            self._summed = self._member.sum_gradients(self._gradients)
        return self._summed.sum_of_squares

    def scale_gradients(self, factor: float) -> None:
        self.anchor.grad = torch.tensor(factor)

    # RowOptimizer's.

    def update_rows(self, *, gradient_scale: Tensor, **hyperparameters: float) -> None:
        """The update verb, as ``optimizer.step()`` calls it."""
        if self._member is None or not self._gradients:
            return
        scale = float(gradient_scale)
        if self._summed is not None:
            self._member.update_summed(self._summed, gradient_scale=scale, **hyperparameters)
        else:
            self._member.update(self._gradients, gradient_scale=scale, **hyperparameters)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self._gradients = []
        self._summed = None
        self.anchor.grad = None


def clip_factor(square: float, max_norm: float) -> float:
    """What all gradients are multiplied with, as ``torch.nn.utils.clip_grad_norm_`` does it."""
    return min(1.0, max_norm / (math.sqrt(square) + 1e-6))
