"""Numbers that are none never stay in a pool: gradients that are not finite, settings that would make rows so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import (
    SGD,
    Adagrad,
    Adam,
    Checkpoint,
    DeviceConfig,
    EmbeddingBagCollection,
    Pool,
    RowWiseAdagrad,
    RowWiseAdam,
    clip_grad_norm_,
)
from holdfast.errors import ConfigError, NonFiniteLoss, StepError
from twin import jagged, random_bags, same_bits, table

TABLES = [table("t", ["a", "b"]), table("u", ["c"], dim=19, pooling="mean")]


@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("way", ["near_memory", "scratchpad"])
def test_a_gradient_that_is_not_finite_never_stays_in_the_pool(way: Any, with_loss: bool, pool_root: Path) -> None:
    """Where the loss is finite, too: the root of 0 has none."""

    def rows_of(pool: Pool) -> list[Tensor]:
        return [pool.collections[0].read(number, torch.arange(20)) for number in range(2)]

    def train(*factors: float) -> list[Tensor]:
        with Pool(pool_root / "pool", seed=7) as pool:
            rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=DeviceConfig(rows=way))
            checkpoint = Checkpoint(pool, model=nn.Identity(), optimizer=[])
            checkpoint.resume()
            for factor in factors:
                loss = (factor * rows(jagged(random_bags("abc", 20, 5, pool.step))).values()).square().sum().sqrt()
                assert loss.isfinite()
                loss.backward()
                rows.optimizer.step()
                checkpoint.commit(loss=loss if with_loss else None)
            checkpoint.flush()
            return rows_of(pool)

    train(1.0)
    with pytest.raises(NonFiniteLoss, match=r"gradient of the rows of step 3 is not finite: the pool stays at step 2"):
        train(1.0, 0.0)
    with Pool(pool_root / "pool") as pool:
        EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=DeviceConfig(rows=way))
        assert pool.step == 2
        assert all(row.isfinite().all() for row in rows_of(pool))
    assert all(row.isfinite().all() for row in train(1.0))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("optimizer", [SGD(lr=1e30), Adagrad(), RowWiseAdam()], ids=["weight", "state", "row's state"])
@pytest.mark.parametrize("options", [{}, {"medium": "block"}], ids=["in place", "log store"])
@pytest.mark.parametrize("way", ["near_memory", "scratchpad"])
def test_a_row_that_its_update_made_infinite_never_stays_in_the_pool(
    way: Any, options: dict[str, Any], optimizer: Any, passes: int, pool_root: Path
) -> None:
    """Its gradient is finite: a weight, or the square in its state, is beyond float32."""
    if way == "scratchpad" and passes == 2:
        pytest.skip("rows in slots take one pass a step")

    def train(*factors: float) -> None:
        with Pool(pool_root / "pool", seed=7, **options) as pool:
            rows = EmbeddingBagCollection(pool, TABLES, optimizer=optimizer, device=DeviceConfig(rows=way))
            checkpoint = Checkpoint(pool, model=nn.Identity(), optimizer=[])
            checkpoint.resume()
            for factor in factors:
                for _ in range(passes):
                    pooled = rows({feature: torch.tensor([id_]) for feature, id_ in (("a", 3), ("b", 4), ("c", 11))})
                    (pooled.values()[:, 16:] * factor).sum().backward()
                rows.optimizer.step()
                checkpoint.commit(loss=1.0)
            checkpoint.flush()

    train(1e-30, 1e-30)
    with pytest.raises(NonFiniteLoss, match=r"row 11 of table 'u' is not finite .*step 3.* stays at step 2"):
        train(1e25)
    with Pool(pool_root / "pool", **options) as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=optimizer, device=DeviceConfig(rows=way))
        assert pool.step == 2
        assert rows.read(1, torch.arange(20)).isfinite().all()
    train(1e-30)


def test_a_step_whose_dense_gradients_alone_overflow_is_skipped_as_its_error_says(pool_root: Path) -> None:
    """A scaler skips the dense optimizer; the rows' own gradients were finite until a norm that is not was clipped."""

    def train(*, heeds: bool) -> list[float]:
        with Pool(pool_root / "pool", seed=7) as pool:
            rows, head = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1)), nn.Linear(1, 1)
            dense, scaler = torch.optim.SGD(head.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=16.0)
            checkpoint = Checkpoint(pool, model=head, optimizer=dense, scaler=scaler)
            scales = []
            for step in range(checkpoint.resume(), 3):
                dense.zero_grad()
                of_dense = head(torch.tensor([torch.nan if step == 1 else 1.0])).sum()
                of_rows = rows(jagged(random_bags("abc", 20, 5, step))).values().square().mean()
                scaler.scale(of_dense + of_rows).backward()
                for optimizer in (dense, rows.optimizer):
                    scaler.unscale_(optimizer)
                norm = clip_grad_norm_(head.parameters(), rows, 1.0)
                assert norm.isfinite() == (step != 1)
                for optimizer in (dense, rows.optimizer):
                    if norm.isfinite() or not heeds:
                        scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                checkpoint.commit()
            checkpoint.flush()
            return scales

    with pytest.raises(NonFiniteLoss, match=r"with a GradScaler step no optimizer where the norm .* is not finite"):
        train(heeds=False)
    assert train(heeds=True) == [8.0, 8.0]


def test_a_gradient_that_is_not_finite_is_refused_however_often_its_step_is_committed(pool_root: Path) -> None:
    with Pool(pool_root / "pool", seed=7) as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1))
        before = rows.read(0, torch.arange(20))
        (rows(jagged(random_bags("abc", 20, 5, 1))).values() * float("nan")).sum().backward()
        rows.optimizer.zero_grad()  # the loop found it: nothing is updated
        rows.optimizer.step()
        assert pool.commit(1) == 1
        assert same_bits(rows.read(0, torch.arange(20)), before)
        (rows(jagged(random_bags("abc", 20, 5, 1))).values() * float("nan")).sum().backward()
        rows.optimizer.step()
        for _ in range(2):
            with pytest.raises(NonFiniteLoss, match="the pool stays at step 1"):
                pool.commit(2)


@pytest.mark.parametrize("kind", [Adagrad, RowWiseAdagrad, Adam, RowWiseAdam])
@pytest.mark.parametrize("eps", [0.0, 1e-50], ids=["0", "0 in float32"])
def test_an_eps_that_makes_rows_without_a_gradient_none_is_refused(kind: Any, eps: float) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}: eps = .*gradient is 0 would be NaN"):
        kind(eps=eps)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"lr": 1e39}, r"lr = 1e\+39; it must be finite"),
        ({"weight_decay": 1e39}, "weight_decay = .*finite"),
        ({"betas": (0.9, 0.99999999)}, r"betas = .*\[0, 1\)"),
        ({"betas": (0.9,)}, "betas two of them"),
        ({"betas": 0.9}, "betas two of them"),
        ({"lr": "0.1"}, "lr, eps, weight_decay are numbers"),
        ({"lr": None}, "lr, eps, weight_decay are numbers"),
        ({"lr": torch.ones(2)}, "lr, eps, weight_decay are numbers"),
    ],
)
def test_a_setting_that_is_none_in_float32_is_refused_when_it_is_said(given: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=f"Adam: .*{names}"):
        Adam(**given)


@pytest.mark.parametrize(
    ("setting", "value", "names"),
    [
        ("betas", (0.9, 0.99999999), "betas are"),
        ("betas", (1.0, 0.9), "betas are"),
        ("lr", 1e39, "lr is inf"),
        ("lr", "0.1", "are numbers"),
    ],
)
def test_a_setting_that_a_schedule_made_none_in_float32_updates_no_row(
    setting: str, value: Any, names: str, pool_root: Path
) -> None:
    with Pool(pool_root / "pool") as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=Adam(lr=0.1))
        before = rows.read(0, torch.arange(20))
        rows(jagged(random_bags("abc", 20, 5, 0))).values().sum().backward()
        rows.optimizer.param_groups[0][setting] = value
        with pytest.raises(StepError, match=names):
            rows.optimizer.step()
        assert same_bits(rows.read(0, torch.arange(20)), before)


class WithRoot(nn.Module):
    """Its loss is finite, and where the factor is 0 its gradient is not."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(19, 1)
        self.norm = nn.Parameter(torch.ones(3, dtype=dtype))
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]))  # learned, where it is not infinite
        self.register_buffer("never", torch.tensor(-torch.inf))

    def forward(self, pooled: Tensor, factor: float) -> Tensor:
        weights = torch.softmax(torch.zeros(2) + self.mask, 0)
        return weights[0] * self.linear(pooled[:, :19]).square().mean() + (factor * self.norm).square().sum().sqrt()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64], ids=str
)
@pytest.mark.parametrize("dense_interval", [1, 3])
@pytest.mark.parametrize("way", ["near_memory", "scratchpad"])
def test_a_parameter_that_is_not_finite_never_stays_in_the_pool(
    way: Any, dense_interval: int, dtype: torch.dtype, pool_root: Path
) -> None:
    """Where the loss is finite, too; and what was infinite from the start may be so."""

    def train(*factors: float) -> tuple[int, WithRoot]:
        torch.manual_seed(3)
        with Pool(pool_root / "pool", seed=7, dense_interval=dense_interval) as pool:
            rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=DeviceConfig(rows=way))
            model = WithRoot(dtype)
            dense = torch.optim.SGD(model.parameters(), lr=0.01)
            checkpoint = Checkpoint(pool, model=model, optimizer=dense)
            checkpoint.resume()
            for factor in factors:
                loss = model(rows(jagged(random_bags("abc", 20, 5, pool.step))).values(), factor).abs()
                assert loss.isfinite()
                loss.backward()
                rows.optimizer.step()
                dense.step()
                dense.zero_grad()
                checkpoint.commit(loss=loss)
            checkpoint.flush()
            return pool.step, model

    assert train(1.0, 1.0, 1.0)[0] == 3
    with pytest.raises(NonFiniteLoss, match=r"model\.norm is not finite at the end of step \d.*newest dense state"):
        train(*[1.0] * (dense_interval - 1), 0.0)
    step, model = train(1.0)
    assert step == 4
    assert model.norm.isfinite().all() and model.linear.weight.isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("fp32", 1e39, 2e39), ("fp32", -3e38, 3e38), ("fp16", -1e5, 1e5), ("fp16", 0.0, 65520.0), ("bf16", 0.0, 3.4e38)],
)
def test_rows_that_would_begin_beyond_their_dtype_are_refused(
    dtype: str, low: float, high: float, pool_root: Path
) -> None:
    """-3e38 to 3e38: what is drawn is a part of their difference."""
    beyond = table("t", ["a"], data_type=dtype, weight_init_min=low, weight_init_max=high)
    with (
        Pool(pool_root / "pool") as pool,
        pytest.raises(ConfigError, match=f"weight_init_max = .* within what {dtype}"),
    ):
        EmbeddingBagCollection(pool, [beyond])
    largest = torch.finfo({"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]).max
    within = table("t", ["a"], data_type=dtype, weight_init_min=0.0, weight_init_max=largest)
    with Pool(pool_root / "pool") as pool:
        assert EmbeddingBagCollection(pool, [within]).read(0, torch.arange(20)).isfinite().all()
