"""How large a log is where nobody says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, JaggedFeatures, Pool
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
