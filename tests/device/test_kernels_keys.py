"""Rows of tables with keys in slots: Triton's kernels and their twins to the bit, and initial values as the core's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.device import kernels
from holdfast.device.kernels.keys import read_records, records
from kernel_cases import DEVICE, DIMS, DTYPES, EITHER, generator, in_torch, in_triton, needs_triton, normals, same_bits

TABLES = 3
STEP = 9
INT64 = np.iinfo(np.int64)


class KeyedRows:
    """Rows in slots, a third of them some other key's, a third left behind or nobody's yet."""

    def __init__(self, kind: int, dim: int, dtype: torch.dtype, num_rows: int, seed: int, num_slots: int = 40) -> None:
        self.kind, self.num_rows = kind, num_rows
        draw = np.random.default_rng(seed)
        self.weights = normals(num_slots, dim, seed=seed, dtype=dtype)
        width = (0, 1, dim, 2 * dim, dim + 1)[kind]
        self.slots = torch.randperm(num_slots, generator=generator(seed))[:num_rows].to(torch.int32).to(DEVICE)
        self.keys = torch.from_numpy(draw.integers(INT64.min, INT64.max, num_rows)).to(DEVICE)
        self.tables = torch.from_numpy(draw.integers(0, TABLES, num_rows).astype(np.int32)).to(DEVICE)
        self.oldest = torch.tensor([4, 0, 7], device=DEVICE)[self.tables.long()]
        self.admit_after = torch.tensor([0, 3, 2], device=DEVICE)
        self.initial = kernels.InitialValues.of(
            seed, [(-0.5, 0.25), (1.0, 1.0), (-65504.0, 70000.0)], self.slots.device
        )
        self.state = normals(num_slots, width + 4, seed=seed + 1).abs()
        kinds = torch.from_numpy(draw.integers(0, 3, num_rows)).to(DEVICE)
        self.is_its_keys = torch.zeros(num_rows, dtype=torch.bool, device=DEVICE)
        for u in range(num_rows):
            key, step, updates = int(self.keys[u]), STEP - 1, 1 + u % 3
            if kinds[u] == 0:
                key = key ^ (1 << (u % 63))
            elif kinds[u] == 1:
                step, updates = (int(self.oldest[u]) - 1, 2) if u % 2 and self.tables[u] != 1 else (0, 0)
            else:
                self.is_its_keys[u] = True
            self.state[int(self.slots[u]), -4:] = records(torch.tensor([key]), step, torch.tensor([updates]))[0]
        self.sums = normals(num_rows, dim, seed=seed + 2)

    def started(self) -> tuple[Tensor, Tensor]:
        weights, state = self.weights.clone(), self.state.clone()
        kernels.start_keys(weights, state, self.slots, self.keys, self.tables, self.oldest, self.initial)
        return weights, state

    def updated(self, weights: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        weights, state = weights.clone(), state.clone()
        fresh_weights = weights.new_zeros(self.num_rows, weights.shape[1])
        fresh_state = state.new_zeros(self.num_rows, state.shape[1])
        kernels.update_rows(
            self.kind,
            weights,
            state,
            self.slots,
            self.sums,
            hyperparameters=kernels.Hyperparameters(learning_rate=0.07, step=3, epsilon=1e-8, beta1=0.9, beta2=0.999),
            gradient_scale=torch.tensor(0.5, device=DEVICE),
            rounding=(7, self.tables, self.keys),
            fresh_weights=fresh_weights,
            fresh_state=fresh_state,
            keyed=kernels.KeyUpdate(self.keys, self.tables, self.admit_after, STEP),
        )
        return weights, state, fresh_weights, fresh_state


@needs_triton
@given(
    kind=st.integers(0, 4),
    dim=st.sampled_from(DIMS),
    dtype=st.sampled_from(DTYPES),
    num_rows=st.sampled_from([0, 1, 3, 19]),
    seed=st.integers(0, 1 << 20),
)
@settings(derandomize=True, database=None, max_examples=60)
def test_kernels_and_twins_begin_and_update_alike(kind, dim, dtype, num_rows, seed):
    rows = KeyedRows(kind, dim, dtype, num_rows, seed)
    started = in_torch(rows.started)
    assert same_bits(in_triton(rows.started), started)
    assert same_bits(in_triton(lambda: rows.updated(*started)), in_torch(lambda: rows.updated(*started)))


@EITHER
@pytest.mark.parametrize("kind", range(5))
def test_what_is_not_its_keys_begins_and_nothing_else_changes(run: Any, kind: int) -> None:
    rows = KeyedRows(kind, 24, torch.float32, 30, seed=kind)
    weights, state = run(rows.started)
    place = rows.slots.long()
    own = place[rows.is_its_keys]
    begun = place[~rows.is_its_keys]
    assert 5 < len(own) < 25
    assert same_bits(weights[own], rows.weights[own]) and same_bits(state[own], rows.state[own])
    assert not state[begun].any()
    assert same_bits(weights[place[(~rows.is_its_keys) & (rows.tables == 1)]].unique(), torch.ones(1, device=DEVICE))
    others = torch.ones(40, dtype=torch.bool, device=DEVICE)
    others[place] = False
    assert same_bits(weights[others], rows.weights[others]) and same_bits(state[others], rows.state[others])


@EITHER
@pytest.mark.parametrize("kind", range(5))
def test_records_are_written_and_keys_that_are_not_admitted_do_not_train(run: Any, kind: int) -> None:
    rows = KeyedRows(kind, 8, torch.bfloat16, 30, seed=kind)
    before = run(rows.started)
    _, _, weights, state = run(lambda: rows.updated(*before))
    place = rows.slots.long()
    updates = read_records(before[1][place])[2] + 1
    keys, steps, counts = read_records(state)
    assert torch.equal(keys, rows.keys) and torch.equal(counts, updates) and set(steps.tolist()) == {STEP}
    trains = updates >= rows.admit_after[rows.tables.long()]
    assert trains.any() and not trains.all()
    held = place[~trains]
    assert same_bits(weights[~trains], before[0][held]) and same_bits(state[~trains][:, :-4], before[1][held][:, :-4])
    assert (weights[trains] != before[0][place[trains]]).any(dim=1).float().mean() > 0.9


@EITHER
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_keys_begin_with_the_cores_initial_values(run: Any, dtype: str, pool_root: Path) -> None:
    keys = torch.tensor([5, -1, INT64.min, INT64.max, 1 << 40, 0])
    with Pool(pool_root / "pool", seed=(1 << 64) - 3, medium="memory") as pool, torch.no_grad():
        tables = [
            EmbeddingBagConfig(
                num_embeddings=None,
                embedding_dim=21,
                name=name,
                feature_names=[name],
                data_type=dtype,
                capacity=100,
                weight_init_min=-0.7,
                weight_init_max=0.9,
            )
            for name in "ab"
        ]
        rows = EmbeddingBagCollection(pool, tables)
        bag = (keys, torch.arange(len(keys) + 1))
        expected = rows({"a": bag, "b": bag}).values()[:, 21:]
    torch_dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    weights = torch.zeros(len(keys), 21, dtype=torch_dtype, device=DEVICE)
    initial = kernels.InitialValues.of((1 << 64) - 3, [(0.0, 0.0), (-0.7, 0.9)], weights.device)
    run(
        lambda: kernels.start_keys(
            weights,
            torch.ones(len(keys), 4, device=DEVICE),
            torch.arange(len(keys), dtype=torch.int32, device=DEVICE),
            keys.to(DEVICE),
            torch.ones(len(keys), dtype=torch.int32, device=DEVICE),
            torch.zeros(len(keys), dtype=torch.int64, device=DEVICE),
            initial,
        )
    )
    assert torch.equal(weights.float().cpu(), expected)
