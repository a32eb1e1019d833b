"""Within float32 tolerance of torch.nn.EmbeddingBag with torch.optim, and of FBGEMM's formulas in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from holdfast import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.optim import RowOptimizerSpec
from row_reference import Bags
from twin import Twin, jagged, random_bags, read_table, table

ROWS, DIM, SAMPLES, STEPS = 12, 8, 16, 6


def loss_of(pooled: Tensor, step: int) -> Tensor:
    target = torch.randn(pooled.shape, generator=torch.Generator().manual_seed(step))
    return (pooled - target).square().mean() * 10


def bags_of(step: int, touch_all: bool) -> Bags:
    bags = dict(random_bags("ab", ROWS, SAMPLES, seed=step))
    if touch_all:  # where the peer moves rows that the batch does not name (weight decay, momentum)
        bags["a"] = [[*bag, sample % ROWS] for sample, bag in enumerate(bags["a"])]
    return bags


def train_ours(directory: Path, optimizer: RowOptimizerSpec, pooling: str, *, touch_all: bool) -> tuple[Tensor, Tensor]:
    """Rows before and after."""
    with Twin(directory, [table("t", ["a", "b"], rows=ROWS, dim=DIM, pooling=pooling)], optimizer) as twin:
        start = twin.tables[0].weights.clone()
        for step in range(STEPS):
            loss_of(twin.emb(jagged(bags_of(step, touch_all))).values(), step).backward()
            twin.emb.optimizer.step()
            twin.pool.commit(step)
        return start, read_table(directory, 0)[0]


def pool_with_torch(weight: Tensor, bags: Bags, pooling: str, *, sparse: bool = False) -> Tensor:
    columns = []
    for feature in "ab":
        ragged = jagged({feature: bags[feature]})
        columns.append(
            nn.functional.embedding_bag(
                ragged.values(), weight, ragged.offsets()[:-1], mode=pooling, sparse=sparse and pooling == "sum"
            )
        )
    return torch.cat(columns, dim=1)


def train_torch(
    start: Tensor, make: Callable[[list[Tensor]], torch.optim.Optimizer], pooling: str, *, touch_all: bool, sparse: bool
) -> Tensor:
    weight = start.clone().requires_grad_()
    optimizer = make([weight])
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(pool_with_torch(weight, bags_of(step, touch_all), pooling, sparse=sparse), step).backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize(
    ("ours", "theirs", "touch_all", "sparse"),
    [
        (SGD(lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2), False, False),
        (SGD(lr=0.2), lambda p: torch.optim.SGD(p, lr=0.2), False, True),
        (SGD(lr=0.2, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.1), True, False),
        (Adagrad(lr=0.2, eps=1e-10), lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-10), False, False),
        (
            Adagrad(lr=0.2, eps=1e-10, weight_decay=0.1),
            lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-10, weight_decay=0.1),
            True,
            False,
        ),
        (Adam(lr=0.05), lambda p: torch.optim.Adam(p, lr=0.05), True, False),
        (Adam(lr=0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1), True, False),
    ],
    ids=["SGD", "SGD-sparse", "SGD-decay", "Adagrad", "Adagrad-decay", "Adam", "AdamW"],
)
def test_rows_are_those_of_torch_optim(pool_root: Path, pooling, ours, theirs, touch_all, sparse):
    start, found = train_ours(pool_root / "pool", ours, pooling, touch_all=touch_all)
    expected = train_torch(start, theirs, pooling, touch_all=touch_all, sparse=sparse)
    assert (found - start).abs().max() > 0.05, "rows have moved"
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_rows_are_those_of_torchs_sparse_adam(pool_root: Path):
    start, found = train_ours(pool_root / "pool", Adam(lr=0.05, eps=1e-10), "sum", touch_all=False)
    expected = train_torch(
        start, lambda p: torch.optim.SparseAdam(p, lr=0.05, eps=1e-10), "sum", touch_all=False, sparse=True
    )
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


# FBGEMM's definitions (fbgemm_gpu/codegen/genscript/optimizers.py) in float64: (w, state, g, t) in, w out.
LR, EPS, DECAY, BETA1, BETA2 = 0.05, 1e-6, 0.02, 0.8, 0.95


def exact_sgd(w: Tensor, _state: list[Tensor], g: Tensor, _t: int) -> Tensor:
    return w - LR * (g + DECAY * w)


def exact_rowwise_adagrad(w: Tensor, state: list[Tensor], g: Tensor, _t: int) -> Tensor:
    g = g + DECAY * w  # weight_decay_mode L2
    state[0] += g.square().mean(1, keepdim=True)
    return w - LR / (state[0].sqrt() + EPS) * g


def exact_adagrad(w: Tensor, state: list[Tensor], g: Tensor, _t: int) -> Tensor:
    g = g + DECAY * w
    state[0] = state[0] + g.square()
    return w - LR * g / (state[0].sqrt() + EPS)


def adam(w: Tensor, state: list[Tensor], g: Tensor, t: int, *, rowwise: bool = False) -> Tensor:
    square = g.square().mean(1, keepdim=True) if rowwise else g.square()
    state[0] = BETA1 * state[0] + (1 - BETA1) * g
    state[1] = BETA2 * state[1] + (1 - BETA2) * square
    m_hat, v_hat = state[0] / (1 - BETA1**t), state[1] / (1 - BETA2**t)
    return w - LR * (m_hat / (v_hat.sqrt() + EPS) + DECAY * w)


def partial_rowwise_adam(w: Tensor, state: list[Tensor], g: Tensor, t: int) -> Tensor:
    return adam(w, state, g, t, rowwise=True)


BETAS = (BETA1, BETA2)


@pytest.mark.parametrize(
    ("optimizer", "formula"),
    [
        (SGD(lr=LR, weight_decay=DECAY), exact_sgd),
        (RowWiseAdagrad(lr=LR, weight_decay=DECAY, eps=EPS), exact_rowwise_adagrad),
        (Adagrad(lr=LR, weight_decay=DECAY, eps=EPS), exact_adagrad),
        (Adam(lr=LR, weight_decay=DECAY, eps=EPS, betas=BETAS), adam),
        (RowWiseAdam(lr=LR, weight_decay=DECAY, eps=EPS, betas=BETAS), partial_rowwise_adam),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_rows_are_those_of_fbgemms_formula(pool_root: Path, optimizer, formula):
    start, found = train_ours(pool_root / "pool", optimizer, "mean", touch_all=False)
    weights = start.double()
    state = [torch.zeros(ROWS, 1, dtype=torch.float64), torch.zeros(ROWS, 1, dtype=torch.float64)]
    if formula in (exact_adagrad, adam):
        state = [torch.zeros(ROWS, DIM, dtype=torch.float64) for _ in range(2)]
    elif formula is partial_rowwise_adam:
        state[0] = torch.zeros(ROWS, DIM, dtype=torch.float64)
    for step in range(STEPS):
        leaf = weights.clone().requires_grad_()
        bags = bags_of(step, touch_all=False)
        loss_of(pool_with_torch(leaf, bags, "mean").float(), step).backward()
        assert leaf.grad is not None
        touched = sorted({row for feature in bags.values() for bag in feature for row in bag})
        of_rows = [tensor[touched] for tensor in state]
        weights[touched] = formula(weights[touched], of_rows, leaf.grad[touched], step + 1)
        for whole, part in zip(state, of_rows, strict=True):
            whole[touched] = part
    torch.testing.assert_close(found, weights.float(), rtol=2e-5, atol=2e-6)
