"""The dense state of a group of ranks: what one process would save, and what differs from rank to rank beside it.

Invariants
- Dense parameters, optimizers, schedulers and the loader's position are the same on all trainers: rank 0's are saved.
- Random numbers differ, and buffers of the model and what users give as `extra` may: those of other ranks lie beside
  rank 0's, by rank, and only where they differ.
- What is saved is as of the end of the step: all trainers tell rank 0 before it collects.
- What a rank's bits depend on beside its state is compared with what that rank was recorded with, else with rank 0's
  record; it is said once, not by each rank, where it changed alike on all.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from holdfast import _core
from holdfast.errors import ConfigError, Corrupted
from holdfast.pools.dense_state import DenseState
from holdfast.pools.one_rank import OneRank
from holdfast.state import provenance, state_tree
from holdfast.state.generators import rng_state

if TYPE_CHECKING:
    from holdfast.group.group import Group
    from holdfast.train.training_state import TrainingState

_RANDOM_NUMBERS = "rng_of_ranks"
_OWN = "state_of_ranks"
_ORIGINS = provenance.OF_RANKS


class RankStates:
    """Collects and restores it. `state` is this process's."""

    def __init__(self, group: OneRank | Group, state: TrainingState) -> None:
        self._group = group
        self._state = state
        # This rank's, as rank 0 has them: the generators, and the checksum of the rest; -1 where it is rank 0's own.
        self._told_rng = b""
        self._told_own = -1
        self._last_own = -1  # the checksum at the last exchange
        # On rank 0, by rank.
        self._random_numbers: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._provenance: dict[str, dict[str, Any]] = {}  # where it is not rank 0's, as of the newest start

    def differs_from_told(self) -> bool:
        """Whether `exchange` would tell rank 0 something of this rank's."""
        if self._group.num_trainers == 1 or not self._group.is_trainer:
            return False
        if self._group.rank != 0 and pack(rng_state()) != self._told_rng:
            return True
        return self._checksum_of(pack(self._state.own())) != self._last_own

    @staticmethod
    def _checksum_of(own: bytes) -> int:
        return _core.crc32c(0, np.frombuffer(own, np.uint8))

    def exchange(self) -> None:
        """Tells rank 0 what differs on this rank. All trainers call it before `collect`; others may."""
        if self._group.num_trainers == 1 or not self._group.is_trainer:
            return
        is_first = self._group.rank == 0
        rng = b"" if is_first else pack(rng_state())
        own = pack(self._state.own())
        checksum = self._last_own = self._checksum_of(own)
        mine = [checksum, int(rng != self._told_rng), int(checksum != self._told_own)]
        everyones = self._group.gather_numbers(mine, "what differs between ranks")
        firsts = everyones[0][0]
        differs = [checksum != firsts for checksum, _, _ in everyones]
        sends_rng = [bool(is_new) for _, is_new, _ in everyones]
        sends_own = [other and bool(is_new) for other, (_, _, is_new) in zip(differs, everyones, strict=True)]
        if any(sends_rng) or any(sends_own):
            rank = self._group.rank
            told = _join(rng if sends_rng[rank] else b"", own if sends_own[rank] else b"")
            parts = self._group.gather_bytes(told, "what differs between ranks", among_trainers=True)
            if is_first:
                self._note(parts)
        if is_first:
            self._own = {rank: data for rank, data in self._own.items() if differs[int(rank)]}
        self._told_rng = rng
        self._told_own = checksum if checksum != firsts else -1

    def _note(self, parts: list[bytes]) -> None:
        for rank, part in enumerate(parts):
            rng, own = _split(part)
            if rng:
                self._random_numbers[str(rank)] = rng
            if own:
                self._own[str(rank)] = own

    def collect(self, cursor: int | None = None) -> DenseState | None:
        """Rank 0's to save; None elsewhere."""
        if self._group.rank != 0:
            return None
        beside: dict[str, Any] = {_RANDOM_NUMBERS: self._random_numbers} if self._random_numbers else {}
        beside |= {_OWN: self._own} if self._own else {}
        beside |= {_ORIGINS: self._provenance} if self._provenance else {}
        return self._state.collect(rng_state(), cursor, **beside)

    def load(self, structure: bytes, tensors: bytes) -> dict[str, Any]:
        """Restores this rank's, from the same bytes on all ranks; returns its generators' state, which is for the
        caller to set. A trainer that was not there when they were saved keeps the generators that it has.

        Raises StateError, Corrupted.
        """
        tree = state_tree.unpack(structure, tensors)
        of_others, own_of_others = tree.pop(_RANDOM_NUMBERS, {}), tree.pop(_OWN, {})
        rng: dict[str, Any] = tree.pop("rng")
        rank = self._group.rank
        self._exchange_provenance(tree, tree.pop(_ORIGINS, {}))
        if rank == 0:
            self._random_numbers, self._own = self._of_those_here(of_others), self._of_those_here(own_of_others)
            self._state.load(tree)
            return rng
        self._state.load(tree, whose=f"rank {rank}: ")
        if (mine := own_of_others.get(str(rank))) is not None and self._group.is_trainer:
            self._state.load_own(unpack(mine))
            self._told_own = self._checksum_of(mine)
        self._told_rng = of_others.get(str(rank), b"")
        return unpack(self._told_rng) if self._told_rng else rng_state()

    def saved(self, name: str, structure: bytes, tensors: bytes) -> Any:
        """This rank's part of that name, rank 0's where it has none of its own. Raises Corrupted."""
        tree = state_tree.unpack(structure, tensors)
        mine = tree.get(_OWN, {}).get(str(self._group.rank)) if self._group.is_trainer else None
        return ({} if mine is None else unpack(mine)).get(name, tree.get(name))

    def _exchange_provenance(self, tree: dict[str, Any], of_others: Mapping[str, Mapping[str, Any]]) -> None:
        """Rank 0 learns what all trainers' bits depend on. Leaves in `tree` what this rank is to be compared with."""
        of_rank_0 = tree.pop(provenance.RECORD, {})
        if not self._group.is_trainer:
            return
        mine = self._state.provenance()
        everyones = self._group.gather(mine, "what everyone computes with", among_trainers=True)
        rank, first = self._group.rank, everyones[0]
        self._provenance = {str(other): theirs for other, theirs in enumerate(everyones) if theirs != first}
        saved = of_others.get(str(rank), of_rank_0)
        tree[provenance.RECORD] = {
            name: was
            for name, was in saved.items()
            if rank == 0 or (was, mine.get(name)) != (of_rank_0.get(name), first.get(name))  # rank 0 says that
        }

    def _of_those_here(self, of_ranks: dict[str, bytes]) -> dict[str, bytes]:
        return {rank: data for rank, data in of_ranks.items() if int(rank) < self._group.num_trainers}


def check_same_batches(group: OneRank | Group, batch_size: int) -> None:
    """Of the trainers' loaders, each of which takes its part of every batch. All of them call it. Raises
    ConfigError."""
    if group.num_trainers == 1 or not group.is_trainer:
        return
    for rank, (theirs,) in enumerate(group.gather_numbers([batch_size], "everyone's batch size")):
        if theirs != batch_size:
            raise ConfigError(
                f"the loader of rank {rank} has batch_size = {theirs}, that of rank {group.rank} {batch_size}: make "
                "them the same, each takes its part of every batch"
            )
    if batch_size < group.num_trainers:
        raise ConfigError(
            f"batch_size = {batch_size} for {group.num_trainers} ranks that train: some would have no sample of any "
            "batch, and a mean over none is NaN; give them a larger batch, or start fewer"
        )


def checksum_of(parameters: Iterable[torch.Tensor]) -> int:
    """CRC-32C of the parameters, one after the other."""
    crc = 0
    for parameter in parameters:
        data = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        crc = _core.crc32c(crc, data)
    return crc


def checksums_of(
    parameters: Iterable[torch.Tensor], row_optimizers: Iterable[torch.optim.Optimizer], row_updates: Iterable[int]
) -> int:
    """Of what all trainers have alike: in the lower 32 bits of the dense parameters; in the upper ones of the settings
    of the row optimizers, by which each owner updates its rows, and of their updates. Not negative."""
    settings = [float(number) for number in row_updates]
    for optimizer in row_optimizers:
        for group in optimizer.param_groups:
            settings += [float(group[name]) for name in ("lr", "eps", "weight_decay")]
            settings += [float(beta) for beta in group["betas"]]
    of_settings = checksum_of([torch.tensor(settings, dtype=torch.float64, device="cpu")]) >> 1
    return of_settings << 32 | checksum_of(parameters)


def pack(tree: Any) -> bytes:
    """A state tree as one string of bytes."""
    structure, tensors = state_tree.flatten(tree, ordered=True)
    offsets, total = state_tree.layout(tensors)
    data = np.zeros(total, np.uint8)
    for tensor, offset in zip(tensors, offsets, strict=True):
        on_host = tensor.detach().cpu().contiguous().view(-1)
        data[offset : offset + tensor.nbytes] = on_host.view(torch.uint8).numpy() if tensor.nbytes else 0
    return _join(structure, data.tobytes())


def unpack(packed: bytes) -> dict[str, Any]:
    """Raises Corrupted."""
    tree: dict[str, Any] = state_tree.unpack(*_split(packed))
    return tree


def _join(first: bytes, second: bytes) -> bytes:
    return struct.pack("<Q", len(first)) + first + second


def _split(joined: bytes) -> tuple[bytes, bytes]:
    if len(joined) < 8 or struct.unpack_from("<Q", joined)[0] > len(joined) - 8:
        raise Corrupted("a rank's part of the dense state is cut short")
    end = 8 + int(struct.unpack_from("<Q", joined)[0])
    return joined[8:end], joined[end:]
