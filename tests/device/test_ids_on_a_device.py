"""Ids that lie on a device, where trainers move whole batches: the bits of ids in the host's memory, and a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast import Adam, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, Pool, prefetch
from holdfast.data.batch import JaggedFeatures
from holdfast.device.options import DeviceConfig
from holdfast.errors import DataError
from pretended_cuda import CUDA, Machine, pretended_cuda

WAYS = {
    "near_memory": DeviceConfig(kind="cuda", rows="near_memory"),
    "scratchpad": DeviceConfig(kind="cuda", rows="scratchpad", scratchpad_bytes=60_000),
}
ROWS, DIM, STEPS = {"seen": 90, "word": 40}, 6, 4


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with pretended_cuda(monkeypatch) as machine:
        yield machine


def bags(step: int) -> dict[str, tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return {
        name: (torch.randint(0, rows, (9,), generator=draw), torch.tensor([0, 2, 2, 7, 9]))
        for name, rows in ROWS.items()
    }


def moved_bags(step: int) -> dict[str, Any]:
    return {name: (ids.to(CUDA), offsets.to(CUDA)) for name, (ids, offsets) in bags(step).items()}


def weighted(step: int) -> JaggedFeatures:
    """With weights that get a gradient."""
    plain = JaggedFeatures.from_bags(bags(step))
    weights = torch.rand(18, generator=torch.Generator().manual_seed(step + 50)).requires_grad_()
    return JaggedFeatures(plain.keys(), plain.values(), plain.offsets(), weights)


def weighted_there(step: int) -> JaggedFeatures:
    here = weighted(step)
    weights = here.weights_or_none()
    assert weights is not None
    there = weights.detach().to(CUDA).requires_grad_()
    return JaggedFeatures(here.keys(), here.values().to(CUDA), here.offsets().to(CUDA), there)


# Of pooled collections, and of one of sequences: what a batch is, and the same one on the device.
BATCHES: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
    "bags": (bags, moved_bags),
    "beside a text": (bags, lambda step: {"text": "any", **moved_bags(step)}),
    "weighted": (weighted, weighted_there),
    "sequences": (
        lambda step: {name: ids[:8].reshape(4, 2) for name, (ids, _) in bags(step).items()},
        lambda step: {name: ids[:8].reshape(4, 2).to(CUDA) for name, (ids, _) in bags(step).items()},
    ),
    "ragged sequences": (lambda step: JaggedFeatures.from_bags(bags(step)), weighted_there),
}


def train(directory: Path, way: str, kind: str, batch_of: Callable[[int], Any], *, ahead: bool = False) -> list[Any]:
    """Outputs and gradients of weights by step, and all rows at the end."""
    found: list[Any] = []
    with Pool(directory, seed=3) as pool:
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ]
        made: Any = EmbeddingCollection if "sequences" in kind else EmbeddingBagCollection
        rows = made(pool, tables, optimizer=Adam(lr=0.1), device=WAYS[way])
        batches = map(batch_of, range(STEPS))
        for step, batch in enumerate(prefetch(batches, pool) if ahead else batches):
            out = rows(batch)
            pieces = [out.values()] if kind not in ("sequences", "ragged sequences") else list(out.values())
            values = [piece.values() if hasattr(piece, "lengths") else piece for piece in pieces]
            assert all(value.device == CUDA for value in values)
            by_column = torch.arange(1.0, DIM + 1).to(CUDA)
            sum((value.unflatten(-1, (-1, DIM)) * by_column).sum() for value in values).backward()
            weights = batch.weights_or_none() if isinstance(batch, JaggedFeatures) else None
            if weights is not None and kind == "weighted":
                assert weights.grad is not None and weights.grad.device == weights.device
                found.append(weights.grad.cpu())
            rows.optimizer.step()
            pool.commit(step + 1)
            found += [value.detach().cpu() for value in values]
        found += [rows.read(number, torch.arange(size)).cpu() for number, size in enumerate(ROWS.values())]
    return found


@pytest.mark.dear
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("way", WAYS)
def test_ids_on_a_device_end_with_the_bits_of_ids_on_the_host(
    way: str, kind: str, machine: Machine, pool_root: Path
) -> None:
    here, there = BATCHES[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = train(pool_root / "here", way, kind, here)
    with pytest.warns(RuntimeWarning, match="ids lie on a device") as told:
        found = train(pool_root / "there", way, kind, there)
    assert {warning.filename for warning in told} == {__file__}
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    # The backward pass of a split makes zeros of which the pretended device does not know where they are.
    problems = [problem for problem in machine.problems if problem != "aten.cat.default has operands on both sides"]
    assert problems == []


def test_a_batch_that_is_planned_ahead_may_lie_on_a_device(machine: Machine, pool_root: Path) -> None:
    here, there = BATCHES["bags"]
    expected = train(pool_root / "here", "scratchpad", "bags", here)
    with pytest.warns(RuntimeWarning, match="ids lie on a device"):
        found = train(pool_root / "there", "scratchpad", "bags", there, ahead=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert machine.problems == []


def test_ids_of_the_meta_device_are_refused_by_name(pool_root: Path) -> None:
    with Pool(pool_root / "pool") as pool:
        rows = EmbeddingBagCollection(
            pool, [EmbeddingBagConfig(name="seen", num_embeddings=9, embedding_dim=2, feature_names=["seen"])]
        )
        features = JaggedFeatures(["seen"], torch.zeros(2, dtype=torch.int64, device="meta"), torch.tensor([0, 1, 2]))
        with pytest.raises(DataError, match="ids are on the meta device, where tensors have no elements"):
            rows(features)
