"""How large a log is where nobody says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest
import torch

from holdfast import SGD, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, JaggedFeatures, MediumDial, Pool
from holdfast.device.options import DeviceConfig
from holdfast.group.shared_pool import SharedPool
from holdfast.pools.directory import log_bytes_of

GIB = 1 << 30


@pytest.mark.parametrize(
    ("table_bytes", "scratchpad_bytes", "expected"),
    [
        (0, GIB, 16 << 20),
        (1 << 20, GIB, 16 << 20),
        (10 << 20, GIB, 160 << 20),
        (64 << 20, GIB, GIB),
        (GIB // 2, 4 * GIB, 2 * GIB),
        (3 * GIB, 4 * GIB, 4 * GIB),
        (3 * GIB, GIB, GIB),
        (8 * GIB, 4 * GIB, GIB),
        (24 * GIB, 4 * GIB, 3 * GIB),
        (100 * GIB, 4 * GIB, 8 * GIB),
        (100 * GIB, 1 << 20, GIB),
        (1000 * GIB, 100 * GIB, 16 * GIB),
    ],
)
def test_a_row_log_follows_the_tables_and_the_scratchpad(
    table_bytes: int, scratchpad_bytes: int, expected: int
) -> None:
    assert log_bytes_of(True, table_bytes, scratchpad_bytes) == expected
    assert log_bytes_of(False, table_bytes, scratchpad_bytes) == 16 << 20


def test_a_small_pool_of_its_own_choice_takes_steps_that_have_all_of_its_rows(tmp_path: Path) -> None:
    """A row of 264 bytes takes a sector of the log, nearly twice its own."""
    num_rows = 6000
    table = EmbeddingBagConfig(num_embeddings=num_rows, embedding_dim=66, name="t", feature_names=["f"])
    every_row = JaggedFeatures(["f"], torch.arange(num_rows), torch.arange(num_rows + 1))
    with Pool(tmp_path / "pool", medium="block") as pool:
        rows = EmbeddingBagCollection(pool, [table])
        assert pool.core.log_bytes < 100 << 20
        for step in range(8):
            rows(every_row).values().sum().backward()
            rows.optimizer.step()
            pool.commit(step)
        pool.core.flush()
        assert pool.durable_step == 8


@pytest.mark.dear
@pytest.mark.parametrize("kind", [Pool, SharedPool], ids=["a process", "ranks"])
def test_in_a_log_of_its_own_choice_steps_never_want_a_dense_state_before_its_time(
    kind: type[Pool], pool_root: Path
) -> None:
    """Of steps that have megabytes of rows, so that the log had to become larger, beside a dense state of one."""
    num_rows, interval = 20_000, 12
    table = EmbeddingBagConfig(num_embeddings=num_rows, embedding_dim=64, name="t", feature_names=["f"])
    every_row = JaggedFeatures(["f"], torch.arange(num_rows), torch.arange(0, num_rows + 1, 100))
    dial = MediumDial(like="pmem")  # as on DAX memory, dense states are written little by little
    with kind(pool_root / "pool", medium="memory", dense_interval=interval, dial=dial) as pool:
        rows = EmbeddingBagCollection(pool, [table])
        model = torch.nn.Linear(64, 4000)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint = Checkpoint(pool, model=model, optimizer=optimizer)
        checkpoint.resume()
        due = []
        for step in range(1, 4 * interval + 1):
            optimizer.zero_grad()
            model(rows(every_row).values()).sum().backward()
            pool.average_gradients(model)
            optimizer.step()
            rows.optimizer.step()
            if pool.dense_due:
                due.append(step)
            checkpoint.commit()
    assert due == list(range(interval, 4 * interval + 1, interval))


@pytest.mark.parametrize("steps_of_log", [2.2, 5.5, 12.0, None])
@pytest.mark.parametrize(
    ("way", "collections", "passes"),
    [
        ("near_memory", 1, 1),
        ("near_memory", 3, 1),
        ("near_memory", 1, 6),
        ("near_memory", 3, 4),
        ("scratchpad", 1, 1),  # rows in slots are updated from one forward pass of a collection
        ("scratchpad", 3, 1),
    ],
)
def test_a_log_of_a_few_steps_is_enough_whatever_collections_and_passes_a_step_is_made_of(
    way: Literal["near_memory", "scratchpad"],
    collections: int,
    passes: int,
    steps_of_log: float | None,
    pool_root: Path,
) -> None:
    """Dense states come early enough for it, however far apart they were to be; of its own choice it grows."""
    num_rows, most_ids = 5000, 240
    record_bytes = most_ids * (8 + 8 * 4) + 512
    log_bytes = None if steps_of_log is None else int(steps_of_log * collections * passes * record_bytes)
    random.seed(3)
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(num_embeddings=num_rows, embedding_dim=8, name=f"t{n}", feature_names=[f"f{n}"])
        for n in range(collections)
    ]
    with Pool(pool_root / "pool", medium="memory", dense_interval=1000, log_bytes=log_bytes) as pool:
        device = DeviceConfig(rows=way)
        of_tables = [EmbeddingBagCollection(pool, [table], optimizer=SGD(), device=device) for table in tables]
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        checkpoint = Checkpoint(pool, model=model, optimizer=optimizer)
        checkpoint.resume()
        for step in range(1, 41):
            optimizer.zero_grad()
            for _ in range(passes):
                for rows, table in zip(of_tables, tables, strict=True):
                    ids = torch.randint(num_rows, (random.randint(most_ids // 2, most_ids),))
                    features = {table.feature_names[0]: (ids, torch.tensor([0, len(ids)]))}
                    model(rows(features).values()).sum().backward()
            optimizer.step()
            for rows in of_tables:
                rows.optimizer.step()
            checkpoint.commit(step)
        assert pool.step == 40
