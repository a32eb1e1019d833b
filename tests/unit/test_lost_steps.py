"""A pool that is closed without its last dense state does not go on from where it was, and says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import SGD, Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.group.shared_pool import SharedPool

FEATURES = {"f": (torch.tensor([1, 2]), torch.tensor([0, 2]))}


class Loop:
    def __init__(self, kind: type[Pool], directory: Path, medium: Any, dense_interval: int) -> None:
        self.pool = kind(directory, medium=medium, dense_interval=dense_interval)
        table = EmbeddingBagConfig(num_embeddings=100, embedding_dim=4, name="t", feature_names=["f"])
        self.rows = EmbeddingBagCollection(self.pool, [table], optimizer=SGD())
        self.model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer, self.checkpoint = optimizer, Checkpoint(self.pool, model=self.model, optimizer=optimizer)
        self.step = self.checkpoint.resume()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(self.rows(FEATURES).values()).sum().backward()
            self.optimizer.step()
            self.rows.optimizer.step()
            self.checkpoint.commit()


@contextmanager
def said() -> Iterator[list[str]]:
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield words
    words += [f"{Path(each.filename).name}: {each.message}" for each in caught if "closed at step" in str(each.message)]


@pytest.mark.parametrize("medium", ["memory", "block"])
@pytest.mark.parametrize("kind", [Pool, SharedPool], ids=["a process", "ranks"])
def test_it_says_from_which_step_it_will_go_on_and_where_the_line_is(
    kind: type[Pool], medium: str, pool_root: Path
) -> None:
    loop = Loop(kind, pool_root / "pool", medium, 5)
    with said() as words, loop.pool:
        loop.train(13)
    [words_of_it] = words
    assert words_of_it.startswith(
        "test_lost_steps.py: the pool is closed at step 13, and its newest dense state is of "
    )
    assert words_of_it.endswith("so it will not go on from where it is: call checkpoint.flush() before it is closed")
    again = Loop(kind, pool_root / "pool", medium, 5)
    assert again.step == 10
    with said() as words:
        again.train(3)
        again.checkpoint.flush()
        again.pool.close()
        again.pool.close()
    assert words == []
    last = Loop(kind, pool_root / "pool", medium, 5)
    assert last.step == 13
    with said() as words:
        last.pool.close()
    assert words == []


def interrupted(loop: Loop) -> None:
    with loop.pool:
        loop.train(3)
        raise KeyboardInterrupt


def test_it_says_nothing_of_steps_that_all_have_one_nor_beside_an_error(pool_root: Path) -> None:
    with said() as words:
        with Loop(Pool, pool_root / "each", "memory", 1).pool as pool:
            assert pool.step == 0
        each = Loop(Pool, pool_root / "each", "memory", 1)
        each.train(3)
        each.pool.close()
        with pytest.raises(KeyboardInterrupt):
            interrupted(Loop(Pool, pool_root / "pool", "memory", 5))
        with Pool(pool_root / "rows", medium="memory", dense_interval=5) as pool:  # without a Checkpoint
            table = EmbeddingBagConfig(num_embeddings=100, embedding_dim=4, name="t", feature_names=["f"])
            EmbeddingBagCollection(pool, [table])
            pool.commit(1)
    assert words == []
