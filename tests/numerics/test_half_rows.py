"""16-bit rows: widened exactly, rounded stochastically, and the same way every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from holdfast import SGD, RowWiseAdagrad
from row_reference import storage_dtype
from twin import Twin, jagged, random_bags, read_table, same_bits, table

HALVES = ["fp16", "bf16"]


def step_of_ones(twin: Twin, rows: int) -> None:
    """SGD with gradient 1 on every element of every row."""
    twin.emb(jagged({"a": [[row] for row in range(rows)]})).values().sum().backward()
    twin.emb.optimizer.step()
    twin.pool.commit(rows)


def neighbours(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of `dtype` at or below, and at or above, float64 values."""
    nearest = exact.to(dtype)
    infinity = torch.tensor(float("inf"), dtype=dtype)
    below = torch.where(nearest.double() > exact, torch.nextafter(nearest, -infinity), nearest)
    above = torch.where(nearest.double() < exact, torch.nextafter(nearest, infinity), nearest)
    return below.double(), above.double()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_pooled_sums_of_half_rows_are_float32_sums_of_the_widened_rows(pool_root: Path, dtype: str, pooling: str):
    tables = [table("t", ["a", "b"], rows=40, dim=24, data_type=dtype, pooling=pooling)]
    with Twin(pool_root / "pool", tables, SGD()) as twin:
        bags = random_bags("ab", 40, 8, seed=1, longest=9)
        assert same_bits(twin.emb(jagged(bags)).values(), twin.forward(bags))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("learning_rate", [6e-5, 7e-4, 0.7])
def test_a_rounded_value_is_one_of_the_two_neighbours_and_right_on_average(
    pool_root: Path, dtype: str, learning_rate: float
):
    rows, dim = 500, 32
    config = table("t", ["a"], rows=rows, dim=dim, data_type=dtype, weight_init_min=0.5, weight_init_max=1.5)
    with Twin(pool_root / "pool", [config], SGD(lr=learning_rate)) as twin:
        old, _ = read_table(twin.pool.directory, 0)
        step_of_ones(twin, rows)
        new, _ = read_table(twin.pool.directory, 0)
    exact = (old - torch.tensor(learning_rate)).double()
    below, above = neighbours(exact, storage_dtype(config))
    assert bool(((new.double() == below) | (new.double() == above)).all())
    between = below < above
    up = (exact - below)[between] / (above - below)[between]
    deviation = ((new.double() == above)[between].double() - up).sum() / (up * (1 - up)).sum().sqrt()
    assert abs(float(deviation)) < 4.0, "standard deviations from unbiased"
    assert float((new != old).double().mean()) > 0.0, "an update below half a unit must not vanish in every row"


@pytest.mark.parametrize("dtype", HALVES)
def test_rounding_is_a_function_of_seed_table_step_and_row(pool_root: Path, dtype: str):
    def run(name: str, seed: int) -> list[Tensor]:
        config = table("t", ["a"], rows=50, dim=16, data_type=dtype, weight_init_min=1.0, weight_init_max=1.0)
        found = []
        with Twin(pool_root / name, [config], SGD(lr=2.0**-12), seed=seed) as twin:
            for _ in range(2):
                step_of_ones(twin, 50)
                found.append(read_table(twin.pool.directory, 0)[0])
        return found

    first, second, other = run("first", 7), run("second", 7), run("other", 8)
    assert all(map(same_bits, first, second))
    assert not same_bits(first[0], other[0])
    assert not same_bits(1.0 - first[0], first[0] - first[1]), "two steps round differently"
    assert first[0].unique(dim=0).shape[0] > 1, "two rows round differently"


@pytest.mark.parametrize("dtype", HALVES)
def test_a_value_beyond_the_largest_becomes_the_largest(pool_root: Path, dtype: str):
    largest = torch.finfo(storage_dtype(table("t", ["a"], data_type=dtype))).max
    config = table("t", ["a"], rows=4, dim=8, data_type=dtype, weight_init_min=-1.0, weight_init_max=1.0)
    with Twin(pool_root / "pool", [config], SGD(lr=3.0e38)) as twin:
        (twin.emb(jagged({"a": [[1], [2]]})).values() * torch.tensor([[1.0], [-1.0]])).sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(2)
        rows, _ = read_table(twin.pool.directory, 0)
    if dtype == "bf16":  # 3e38 is below bfloat16's largest number, float16's is 65504
        largest = 3.0e38
        assert bool(((rows[1:3].abs() / largest - 1).abs() < 0.01).all())
    else:
        assert torch.equal(rows[1:3], torch.tensor([[-largest], [largest]]).expand(2, 8))


def test_half_rows_keep_float32_state(pool_root: Path):
    config = table("t", ["a"], rows=4, dim=8, data_type="bf16")
    with Twin(pool_root / "pool", [config], RowWiseAdagrad(lr=0.1)) as twin:
        (twin.emb(jagged({"a": [[1]]})).values() * 1.1).sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(1)
        _, state = read_table(twin.pool.directory, 0)
    assert state[1, 0] == torch.tensor(1.1) * torch.tensor(1.1)
