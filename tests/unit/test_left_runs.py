"""What a run leaves behind that was left in its midst, by an error or Ctrl-C, with nothing closed: nothing."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from holdfast import Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.data import Loader, SyntheticConfig, SyntheticSource


@pytest.fixture
def no_garbage_is_collected() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-loader")]


def begin(directory: Path, medium: Any) -> tuple[EmbeddingBagCollection, Loader[Any], Checkpoint]:
    source = SyntheticSource(SyntheticConfig(num_samples=4_000, rows=(5_000, 70), num_dense=3))
    pool = Pool(directory, seed=1, medium=medium, log_bytes=1 << 20)
    tables = [
        EmbeddingBagConfig(name=f.name, num_embeddings=f.num_embeddings, embedding_dim=8, feature_names=[f.name])
        for f in source.features
    ]
    rows = EmbeddingBagCollection(pool, tables)
    loader = Loader(source, batch_size=64, seed=0)
    return rows, loader, Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[], loader=loader)


def train_two_steps_and_leave(directory: Path, medium: Any) -> None:
    rows, loader, checkpoint = begin(directory, medium)
    checkpoint.resume()
    for _ in range(2):
        rows(next(loader).features).values().sum().backward()
        rows.optimizer.step()
        checkpoint.commit()
    rows(next(loader).features)


@pytest.mark.parametrize("medium", ["memory", "block"])
@pytest.mark.usefixtures("no_garbage_is_collected")
def test_threads_of_its_loader_end_and_its_pool_is_in_nobodys_way(pool_root: Path, medium: str) -> None:
    train_two_steps_and_leave(pool_root / "pool", medium)
    with Pool(pool_root / "pool") as pool:
        assert pool.step == 2
    assert not loader_threads()
