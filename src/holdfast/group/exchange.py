"""Exchange: a batch's way from trainers to owners and back.

For every batch travel: counts, with how far each rank is; ids, with their weights; pooled vectors; their gradients;
gradients of weights, where these are wanted. Counts and ids of a batch travel while earlier ones compute, so that
owners plan ahead, and fetch rows ahead where these come from a disk.

- Bytes of a step, to other ranks, which `Group.sent_bytes` counts: for every id 4 bytes (8 where a table has more than
  2**32 places, or keys), or less where a memory rank gets them sorted: 2 bytes, up to 65,536 different ones, and 4 for
  each different one; 4 for the length of a bag with several ids, and 4 * dim for every non-empty bag at each of its
  owners, there and back; a table that lies whole has one owner, so its vectors are whole and come once. Counts
  are 16 bytes a feature, from each trainer to each owner, and 40 for how far a rank is, to every other. A per-sample
  weight is 4 bytes, and 4 for its gradient; where a split table's mean is taken, 4 more go with each bag.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from holdfast import _core
from holdfast.group.group import Group, Pending
from holdfast.group.pool_share import Status

_IDS = 0xFFFF_FFFF  # the bit above says that they have weights (core/routing/route_message.h)


class PlanRouted(Protocol):
    def __call__(self, counts: NDArray[np.int64], messages: NDArray[np.int32], *, evaluates: bool) -> _core.Plan: ...


@dataclass(slots=True)
class Travelling:
    """A batch whose ids are on their way. counts: int64 [trainers, features, 2], on owners, as `Router` has them."""

    route: _core.Route | None
    header: Pending
    headers: NDArray[np.int64]  # of all ranks, one after the other
    statuses: list[Status] = field(default_factory=list)
    counts: NDArray[np.int64] | None = None
    ids: Pending | None = None
    messages: Tensor | None = None
    plan: _core.Plan | None = None
    is_planned: bool = False


class Exchange:
    """The collectives of a group's steps, in their order, of one collection.

    router: of its batches, on every rank. plan: an owner's, of what all trainers ask for.
    """

    def __init__(self, group: Group, router: _core.Router, num_features: int, plan: PlanRouted) -> None:
        self._group = group
        self._router = router
        self._plan = plan
        roles = group.roles
        with_counts = Status.WIDTH + 2 * num_features
        self._sent_widths = [
            with_counts if group.is_trainer and rank in roles.owners else Status.WIDTH
            for rank in range(group.world_size)
        ]
        self._received_widths = [
            with_counts if group.is_owner and rank in roles.trainers else Status.WIDTH
            for rank in range(group.world_size)
        ]

    def send_counts(self, route: _core.Route | None, status: Status) -> Travelling:
        """Begins a batch: how much goes to whom, and how far this rank is. route: None where there is no further batch,
        and on ranks that do not train."""
        sent = np.zeros(sum(self._sent_widths), np.int64)
        begin = 0
        for rank, width in enumerate(self._sent_widths):
            sent[begin : begin + Status.WIDTH] = status.numbers()
            if route is not None and width > Status.WIDTH:
                counts = route.counts[rank - self._group.roles.owners.start]
                sent[begin + Status.WIDTH : begin + width] = counts.reshape(-1)
            begin += width
        headers = np.empty(sum(self._received_widths), np.int64)
        pending = self._group.all_to_all(
            torch.from_numpy(headers), self._received_widths, torch.from_numpy(sent), self._sent_widths, "counts"
        )
        return Travelling(route=route, header=pending, headers=headers)

    def send_ids(self, batch: Travelling) -> None:
        """Waits for the counts; the ids are on their way then."""
        batch.header.wait()
        begins = np.cumsum([0, *self._received_widths])
        batch.statuses = [Status(*batch.headers[begin : begin + Status.WIDTH].tolist()) for begin in begins[:-1]]
        group, roles = self._group, self._group.roles
        received_words, sent_words = [0] * group.world_size, [0] * group.world_size
        if group.is_owner:
            of_trainers = batch.headers[: begins[len(roles.trainers)]].reshape(len(roles.trainers), -1)
            batch.counts = np.ascontiguousarray(of_trainers[:, Status.WIDTH :]).reshape(len(roles.trainers), -1, 2)
            received_words[: len(roles.trainers)] = self._router.message_words(batch.counts)
        message = torch.empty(0, dtype=torch.int32, device="cpu")
        if batch.route is not None:
            message = torch.from_numpy(batch.route.message)
            for owner, words in zip(roles.owners, batch.route.message_words, strict=True):
                sent_words[owner] = int(words)
        batch.messages = torch.empty(sum(received_words), dtype=torch.int32, device="cpu")
        batch.ids = group.all_to_all(batch.messages, received_words, message, sent_words, "ids")

    def plan(self, batch: Travelling, *, evaluates: bool) -> None:
        """Waits for the ids; plans them on owners. evaluates: new keys get no rows."""
        assert batch.ids is not None and batch.messages is not None
        batch.ids.wait()
        if self._group.is_owner:
            assert batch.counts is not None
            batch.plan = self._plan(batch.counts, batch.messages.numpy(), evaluates=evaluates)
        batch.messages = batch.ids = None
        batch.is_planned = True

    def send_vectors(self, batch: Travelling, vectors: Tensor | None) -> tuple[Pending, Tensor]:
        """Owners' pooled vectors go to their trainers. Returns where a trainer's come, owner by owner."""
        return self._vectors(batch, vectors, towards_trainers=True, what="vectors")

    def send_gradients(self, batch: Travelling, gradients: Tensor | None) -> tuple[Pending, Tensor]:
        """The same way back."""
        return self._vectors(batch, gradients, towards_trainers=False, what="gradients")

    def send_weight_gradients(self, batch: Travelling, gradients: Tensor | None) -> tuple[Pending, Tensor]:
        """Owners' gradients of per-sample weights, one for each id, go to their trainers."""
        group, roles = self._group, self._group.roles
        sent_splits, received_splits = [0] * group.world_size, [0] * group.world_size
        if batch.counts is not None:
            sent_splits[: len(roles.trainers)] = num_ids_in(batch.counts).sum(axis=1).tolist()
        if batch.route is not None:
            for owner, num_ids in zip(roles.owners, num_ids_in(batch.route.counts).sum(axis=1), strict=True):
                received_splits[owner] = int(num_ids)
        received = torch.empty(sum(received_splits), dtype=torch.float32, device="cpu")
        sent = torch.empty(0, dtype=torch.float32, device="cpu") if gradients is None else gradients
        return group.all_to_all(received, received_splits, sent, sent_splits, "gradients of weights"), received

    def _vectors(
        self, batch: Travelling, sent: Tensor | None, *, towards_trainers: bool, what: str
    ) -> tuple[Pending, Tensor]:
        group, roles = self._group, self._group.roles
        of_owner, of_trainer = [0] * group.world_size, [0] * group.world_size
        if batch.plan is not None:
            for trainer, floats in zip(roles.trainers, batch.plan.output_floats, strict=True):
                of_owner[trainer] = int(floats)
        if batch.route is not None:
            for owner, floats in zip(roles.owners, batch.route.block_floats, strict=True):
                of_trainer[owner] = int(floats)
        sent_splits, received_splits = (of_owner, of_trainer) if towards_trainers else (of_trainer, of_owner)
        received = torch.empty(sum(received_splits), dtype=torch.float32, device="cpu")
        sent = torch.empty(0, dtype=torch.float32, device="cpu") if sent is None else sent
        return group.all_to_all(received, received_splits, sent, sent_splits, what), received


def num_ids_in(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of counts of bags and ids, `[..., 2]`: the ids."""
    return counts[..., 1] & _IDS
