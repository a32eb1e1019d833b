"""Forward, backward and every row optimizer give the slow reference's bits, through EmbeddingBagCollection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import SGD, Adagrad, Adam, JaggedFeatures, RowWiseAdagrad, RowWiseAdam
from holdfast.pools.optim import RowOptimizerSpec
from row_reference import Bags, BagWeights, f32, fold, lane_sums
from twin import Twin, jagged, random_bags, random_weights, read_table, same_bits, table

OPTIMIZERS = [
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.01),
    RowWiseAdagrad(lr=0.1),
    RowWiseAdagrad(lr=0.05, weight_decay=0.02, eps=1e-3),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, weight_decay=0.01, eps=1e-5),
    Adam(lr=0.01),
    Adam(lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
    RowWiseAdam(lr=0.01),
    RowWiseAdam(lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6),
]


def spell(spec: RowOptimizerSpec) -> str:
    return type(spec).__name__ + ("-with-options" if spec.weight_decay else "")


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=spell)
def test_four_steps_of_every_optimizer_give_the_references_rows_and_state(
    pool_root: Path, optimizer: RowOptimizerSpec, dtype: str
):
    tables = [
        table("shared", ["a", "b"], rows=20, dim=8, data_type=dtype),
        table("averaged", ["c"], rows=9, dim=19, pooling="mean", data_type=dtype),
        table("wide", ["d"], rows=9, dim=32, data_type=dtype),
    ]
    with Twin(pool_root / "pool", tables, optimizer) as twin:
        twin.check()
        for step in range(4):
            bags = {**random_bags("ab", 20, 5, seed=step), **random_bags("cd", 9, 5, seed=100 + step)}
            twin.step(bags, seed=step, weights=random_weights(bags, seed=step) if step % 2 else None)
        twin.check()


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_rows_start_at_a_function_of_seed_table_and_row(pool_root: Path, dtype: str):
    tables = [
        table("default", ["a"], rows=70, dim=17, data_type=dtype),
        table("bounded", ["b"], rows=70, dim=4, data_type=dtype, weight_init_min=-1.0, weight_init_max=3.0),
        table("constant", ["c"], rows=3, dim=4, data_type=dtype, weight_init_min=0.5, weight_init_max=0.5),
    ]
    with Twin(pool_root / "pool", tables, SGD(), seed=12345) as twin:
        twin.check()
        bounded = twin.tables[1].weights
        assert -1.0 <= bounded.min() < -0.9
        assert 2.9 < bounded.max() <= 3.0
        assert torch.equal(twin.tables[2].weights, torch.full((3, 4), 0.5))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Bags], list[BagWeights | None]]:
    """Up to three batches of the features x, y (ids below 6) and z (ids below 70); number of samples per batch."""
    bags: list[Bags] = []
    weights: list[BagWeights | None] = []
    for _ in range(draw(st.integers(1, 3))):
        samples = draw(st.integers(1, 4))
        one = {
            feature: draw(st.lists(st.lists(st.integers(0, rows - 1), max_size=5), min_size=samples, max_size=samples))
            for feature, rows in (("x", 6), ("y", 6), ("z", 70))
        }
        bags.append(one)
        numbers = st.floats(-4, 4, width=32)
        weighted = draw(st.booleans())
        weights.append({f: [[draw(numbers) for _ in bag] for bag in of] for f, of in one.items()} if weighted else None)
    return bags, weights


@given(
    batches=batches(),
    optimizer=st.sampled_from(OPTIMIZERS),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    pooling=st.sampled_from(["sum", "mean"]),
    dim=st.sampled_from([1, 3, 8, 16, 17, 33]),
)
@settings(derandomize=True, database=None, max_examples=40)
def test_any_batches_give_the_references_bits(
    new_root: Callable[[], Path],
    batches: tuple[list[Bags], list[BagWeights | None]],
    optimizer: RowOptimizerSpec,
    dtype: str,
    pooling: str,
    dim: int,
):
    tables = [
        table("small", ["x", "y"], rows=6, dim=dim, pooling=pooling, data_type=dtype),
        table("large", ["z"], rows=70, dim=4, data_type=dtype),
    ]
    with Twin(new_root() / "pool", tables, optimizer) as twin:
        for step, (bags, weights) in enumerate(zip(*batches, strict=True)):
            twin.step(bags, seed=step, weights=weights)
        twin.check()


def test_an_empty_bag_pools_to_zeros_and_moves_no_row(pool_root: Path):
    tables = [table("t", ["a", "b"], pooling="mean")]
    with Twin(pool_root / "pool", tables, SGD(lr=1.0)) as twin:
        start, _ = read_table(twin.pool.directory, 0)
        twin.step({"a": [[], []], "b": [[], []]}, seed=1)
        output = twin.emb(jagged({"a": [[], [3]], "b": [[], []]})).values()
        assert same_bits(output[0], torch.zeros(16))
        assert same_bits(output[1, :8], start[3])
        assert same_bits(read_table(twin.pool.directory, 0)[0], start)


def test_a_row_that_occurs_often_gets_its_gradients_summed_in_order_of_occurrence(pool_root: Path):
    # Absorbed when they come after the big one, not when they come first: the order shows in the bits.
    coefficients = torch.tensor([[2.0**24], [1.0], [1.0], [-(2.0**24)]])
    with Twin(pool_root / "pool", [table("t", ["a"], rows=2, dim=1)], SGD(lr=1.0)) as twin:
        start = twin.tables[0].weights[1].clone()
        output = twin.emb(jagged({"a": [[1], [1], [1], [1]]})).values()
        (output * coefficients).sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(4)
        moved, _ = read_table(twin.pool.directory, 0)
        assert same_bits(moved[1], start - f32(0.0))
        assert f32(2.0**24) + 1 + 1 - 2.0**24 == 0.0


def test_features_that_share_a_table_add_up_first_declared_first(pool_root: Path):
    with Twin(pool_root / "pool", [table("t", ["a", "b"], rows=2, dim=1)], SGD(lr=1.0)) as twin:
        start = twin.tables[0].weights[1].clone()
        output = twin.emb(jagged({"b": [[1], [1]], "a": [[1], [1]]})).values()
        # a: 2^24 and 1, then b: 1 and -2^24. In the order of the batch (b first) the sum would be 1.
        (output * torch.tensor([[2.0**24, 1.0], [1.0, -(2.0**24)]])).sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(2)
        assert same_bits(read_table(twin.pool.directory, 0)[0][1], start)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_gradients_of_per_sample_weights_are_autograds(pool_root: Path, pooling: str):
    tables = [table("t", ["a", "b"], rows=20, dim=19, pooling=pooling), table("u", ["c"], rows=20, dim=4)]
    with Twin(pool_root / "pool", tables, SGD()) as twin:
        bags = random_bags("abc", 20, 6, seed=3)
        ragged = jagged(bags, random_weights(bags, seed=4), keys=["c", "a", "b"])
        weights = ragged.weights_or_none()
        assert weights is not None
        weights.requires_grad_()
        coefficients = twin.coefficients(6, seed=5)
        output = twin.emb(ragged).values()
        (output * coefficients).sum().backward()

        expected = weights.detach().clone().requires_grad_()
        per_tree, per_autograd = [], []
        position = 0
        for feature in ("c", "a", "b"):
            reference, column = {"a": (0, 0), "b": (0, 19), "c": (1, 38)}[feature]
            rows = twin.tables[reference]
            for sample, bag in enumerate(bags[feature]):
                grad = coefficients[sample, column : column + rows.config.embedding_dim]
                total = torch.zeros(rows.config.embedding_dim)
                for row in bag:
                    total = total + expected[position] * rows.weights[row]
                    dot = fold(lane_sums(grad * rows.weights[row]))
                    per_tree.append(dot * rows.bag_factor(len(bag)) if rows.config.pooling == "mean" else dot)
                    position += 1
                per_autograd.append((rows.bag_factor(len(bag)) * total * grad).sum())
        torch.stack(per_autograd).sum().backward()
        assert weights.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(weights.grad, expected.grad)
        assert same_bits(weights.grad, torch.stack(per_tree))


def test_weights_that_need_no_gradient_get_none(pool_root: Path):
    with Twin(pool_root / "pool", [table("t", ["a"])], SGD()) as twin:
        weights = torch.ones(2)
        twin.emb(JaggedFeatures(["a"], torch.tensor([1, 2]), torch.tensor([0, 2]), weights)).values().sum().backward()
        assert weights.grad is None
