"""The bits of a run do not depend on threads, or on whether rows are captured a step ahead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast import Adam, EmbeddingBagCollection, Pool, RowWiseAdagrad, _core, clip_grad_norm_
from holdfast.pools.optim import RowOptimizerSpec
from twin import Twin, jagged, random_bags, read_table, same_bits, table


def train_large_batches(directory: Path, optimizer: RowOptimizerSpec, dtype: str, num_threads: int) -> list[Tensor]:
    """Three steps of batches that are cut into many chunks; pooled outputs, then rows and state."""
    _core.set_num_threads(num_threads)
    torch.manual_seed(1)
    tables = [table("t", ["a", "b"], rows=6000, dim=16, data_type=dtype), table("u", ["c"], rows=3000, dim=33)]
    found = []
    with Pool(directory, seed=3) as pool:
        emb = EmbeddingBagCollection(pool, tables, optimizer=optimizer)
        for _ in range(3):
            offsets = torch.arange(0, 3 * 1500 + 1, 3)
            features = {key: (torch.randint(0, 3000, (3 * 1500,)), offsets) for key in "abc"}
            output = emb(features).values()
            found.append(output.detach())
            (output * torch.randn_like(output)).sum().backward()
            clip_grad_norm_([], emb, max_norm=50.0)
            emb.optimizer.step()
            pool.commit(1)
        return found + [tensor for number in range(2) for tensor in read_table(directory, number)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.01)], ids=["rowwise_adagrad", "adam"])
def test_one_and_two_threads_give_the_same_bits(pool_root: Path, optimizer: RowOptimizerSpec, dtype: str):
    one = train_large_batches(pool_root / "one", optimizer, dtype, 1)
    two = train_large_batches(pool_root / "two", optimizer, dtype, 2)
    assert all(map(same_bits, one, two))


# What a step does: how many micro-batches, whether the optimizer steps, whether the norm is taken first, what is
# captured ahead (nothing, the next batch, or another one than comes).
StepScript = tuple[int, bool, bool, str]
scripts = st.lists(
    st.tuples(
        st.integers(1, 2),
        st.sampled_from([True, True, True, False]),
        st.booleans(),
        st.sampled_from(["no", "next", "other"]),
    ),
    min_size=3,
    max_size=10,
)


def follow(
    directory: Path, script: list[StepScript], optimizer: RowOptimizerSpec, dtype: str, *, ahead: bool
) -> list[Tensor]:
    tables = [table("t", ["a", "b"], rows=40, data_type=dtype), table("u", ["c"], rows=12, dim=3, pooling="mean")]
    found = []
    with Pool(directory, seed=3, log_bytes=1 << 16) as pool:
        emb = EmbeddingBagCollection(pool, tables, optimizer=optimizer)

        def plan(step: int, micro: int):
            seed = 10 * step + micro
            return emb.plan(jagged({**random_bags("ab", 40, 6, seed), **random_bags("c", 12, 6, seed)}))

        upcoming = plan(0, 0)
        for step, (micro_batches, update, norm, captured) in enumerate(script):
            planned, upcoming = upcoming, plan(step + 1, 0)
            for micro in range(micro_batches):
                if micro:
                    planned = plan(step, micro)
                output = emb.lookup(emb.capture(planned), planned)
                found.append(output.detach())
                if ahead and captured != "no" and micro == micro_batches - 1:
                    emb.capture_ahead(upcoming if captured == "next" else plan(step + 1, 7))
                (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
            if norm:
                clip_grad_norm_([], emb, max_norm=1.0)
            if update:
                emb.optimizer.step()
            pool.commit(step)
        return found + [tensor for number in range(2) for tensor in read_table(directory, number)]


@given(
    script=scripts,
    optimizer=st.sampled_from([RowWiseAdagrad(lr=0.1), Adam(lr=0.01)]),
    dtype=st.sampled_from(["fp32", "fp16"]),
)
@settings(derandomize=True, database=None, max_examples=40)
def test_capture_ahead_changes_no_bit_whatever_the_steps_do(
    new_root: Callable[[], Path], script: list[StepScript], optimizer: RowOptimizerSpec, dtype: str
):
    root = new_root()
    plain = follow(root / "plain", script, optimizer, dtype, ahead=False)
    ahead = follow(root / "ahead", script, optimizer, dtype, ahead=True)
    assert all(map(same_bits, plain, ahead))


def test_many_steps_captured_ahead_give_the_references_rows(pool_root: Path):
    with Twin(pool_root / "pool", [table("t", ["a", "b"], rows=30)], RowWiseAdagrad(lr=0.1), log_bytes=1 << 14) as twin:
        batches = [random_bags("ab", 30, 4, seed) for seed in range(25)]
        planned = twin.emb.plan(jagged(batches[0]))
        taken = 0
        for step, bags in enumerate(batches):
            output = twin.emb.lookup(twin.emb.capture(planned), planned)
            assert same_bits(output, twin.forward(bags))
            planned = twin.emb.plan(jagged(batches[(step + 1) % len(batches)]))
            taken += twin.emb.capture_ahead(planned)
            coefficients = twin.coefficients(4, seed=step)
            (output * coefficients).sum().backward()
            twin.emb.optimizer.step()
            twin.pool.commit(step)
            twin.update(twin.gradients(bags, coefficients))
        assert taken == len(batches), "every step's rows could be captured ahead"
        twin.pool.flush()
        twin.check()
