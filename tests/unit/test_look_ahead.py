"""Loops that take their batches one by one have the rows of the coming ones fetched, and train the same bits."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.data import Loader, SyntheticConfig, SyntheticSource
from holdfast.errors import IdError, StateError

ROWS = {"item": 3000, "shop": 50}
SAMPLES = 32
DIM = 8


@dataclass(frozen=True)
class Batch:
    features: Any
    dense: Tensor


def features_of(number: int, *, as_bags: bool = False) -> Any:
    generator = torch.Generator().manual_seed(number)
    ids = [torch.randint(0, size, (SAMPLES,), generator=generator) for size in ROWS.values()]
    if as_bags:
        return {key: (of_key, torch.arange(SAMPLES)) for key, of_key in zip(ROWS, ids, strict=True)}
    weights = torch.rand(len(ROWS) * SAMPLES, generator=generator)
    return holdfast.JaggedFeatures(list(ROWS), torch.cat(ids), torch.arange(len(ROWS) * SAMPLES + 1), weights)


def batch_of(number: int, **form: bool) -> Batch:
    return Batch(features_of(number, **form), torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(number)))


def batches(first: int = 1, last: int | None = None, **form: bool) -> Iterator[Batch]:
    for number in itertools.count(first) if last is None else range(first, last + 1):
        yield batch_of(number, **form)


class Run:
    """A pool in training, of two collections; as a user's loop has it."""

    def __init__(
        self, directory: Path, medium: Any = "block", loader: Any = None, extra: Any = None, **options: Any
    ) -> None:
        self.directory = directory
        torch.manual_seed(0)
        self.pool = holdfast.Pool(directory, seed=1, medium=medium, log_bytes=1 << 20, **options)
        self.rows = [
            holdfast.EmbeddingBagCollection(
                self.pool,
                [holdfast.EmbeddingBagConfig(name=key, num_embeddings=size, embedding_dim=DIM, feature_names=[key])],
            )
            for key, size in ROWS.items()
        ]
        self.over = nn.Sequential(nn.Linear(len(ROWS) * DIM + 3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.over.parameters(), lr=0.1)
        self.checkpoint = holdfast.Checkpoint(
            self.pool,
            model=self.over,
            optimizer=self.optimizer,
            loader=None if loader is None else loader(self.pool),
            extra=extra,
        )
        self.checkpoint.resume()

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        pooled = [rows(batch.features).values() for rows in self.rows]
        (self.over(torch.cat([*pooled, batch.dense], dim=1)) ** 2).mean().backward()
        self.optimizer.step()
        for rows in self.rows:
            rows.optimizer.step()
        self.checkpoint.commit()

    def train(self, coming: Iterable[Batch], steps: int) -> None:
        for batch in itertools.islice(coming, steps):
            self.step(batch)

    def traffic(self, name: str) -> float:
        traffic = self.pool.traffic()
        assert traffic is not None
        return traffic[name]

    def end(self) -> str:
        self.pool.close()
        return digest_pool(_core.Reader(str(self.directory))).whole


@pytest.fixture
def expected(tmp_path: Path) -> Callable[..., str]:
    """The digest of so many steps over batches that nobody wraps."""

    def train(steps: int, **form: bool) -> str:
        run = Run(tmp_path / "expected")
        run.train(batches(**form), steps)
        return run.end()

    return train


def test_rows_of_the_next_batch_are_there_in_the_readmes_loop(tmp_path: Path) -> None:
    source = SyntheticSource(SyntheticConfig(num_samples=4_000, rows=(5_000, 70), num_dense=3))
    with holdfast.Pool(tmp_path / "pool", medium="block", log_bytes=1 << 20) as pool:
        tables = [
            holdfast.EmbeddingBagConfig(
                name=f.name, num_embeddings=f.num_embeddings, embedding_dim=DIM, feature_names=[f.name]
            )
            for f in source.features
        ]
        rows = holdfast.EmbeddingBagCollection(pool, tables)
        loader = Loader(source, batch_size=64, seed=0)
        checkpoint = holdfast.Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[], loader=loader)
        checkpoint.resume()
        while pool.step < 20:
            batch = next(loader)
            rows(batch.features).values().sum().backward()
            rows.optimizer.step()
            checkpoint.commit()
            assert pool.cursor == pool.step * 64
        traffic = pool.traffic()
        assert traffic is not None
        assert traffic["rows_missed"] > 0
        assert traffic["demand_fetches"] == 0
        loader.close()


@pytest.mark.parametrize("as_bags", [False, True])
def test_a_wrapped_generator_trains_the_same_bits_and_waits_for_no_row(
    tmp_path: Path, expected: Callable[..., str], as_bags: bool
) -> None:
    run = Run(tmp_path / "wrapped")
    run.train(holdfast.prefetch(batches(as_bags=as_bags), run.pool), 12)
    assert run.traffic("rows_missed") > 0
    assert run.traffic("demand_fetches") == 0
    assert run.end() == expected(12, as_bags=as_bags)


def test_a_dataloaders_dict_of_columns_is_looked_up_as_it_is(tmp_path: Path, expected: Callable[..., str]) -> None:
    """Ids as they come out of a table's columns, labels and texts beside them."""

    def columns() -> Iterator[Batch]:
        for batch in batches(as_bags=True):
            ids = {
                key: ids if number == 0 else ids[:, None]
                for number, (key, (ids, _)) in enumerate(batch.features.items())
            }
            beside = {"label": torch.ones(SAMPLES), "title": ["none"] * SAMPLES, "epoch": 3}
            yield dataclasses.replace(batch, features={**beside, **ids})

    run = Run(tmp_path / "wrapped")
    run.train(holdfast.prefetch(columns(), run.pool), 12)
    assert run.traffic("rows_missed") > 0
    assert run.traffic("demand_fetches") == 0
    assert run.end() == expected(12, as_bags=True)


def test_features_that_the_loop_makes_itself_are_planned_again_and_their_rows_are_there(
    tmp_path: Path, expected: Callable[..., str]
) -> None:
    run = Run(tmp_path / "wrapped")
    numbers = holdfast.prefetch(range(1, 1000), run.pool, features=features_of)
    run.train((batch_of(number) for number in numbers), 12)
    assert run.traffic("demand_fetches") == 0
    assert run.end() == expected(12)


def with_pytorch(ids: Tensor) -> None:
    ids[:SAMPLES] = ids[:SAMPLES].flip(0) // 2


def with_numpy(ids: Tensor) -> None:
    of_item = ids.numpy()[:SAMPLES]  # of whose changes PyTorch knows nothing
    of_item[:] = of_item[::-1] // 2


@pytest.mark.parametrize("change", [with_pytorch, with_numpy])
def test_ids_that_are_changed_in_place_are_looked_up_as_they_are(
    tmp_path: Path, change: Callable[[Tensor], None]
) -> None:
    ends = []
    for wrapped in (False, True):
        run = Run(tmp_path / f"wrapped {wrapped}")
        for batch in itertools.islice(holdfast.prefetch(batches(), run.pool) if wrapped else batches(), 6):
            change(batch.features.values())
            run.step(batch)
        ends.append(run.end())
    assert ends[0] == ends[1]


def in_numpys_memory() -> Iterator[Any]:
    memory = np.zeros(SAMPLES, np.int64)
    for number in range(5):
        memory[:] = number
        yield {"item": torch.from_numpy(memory)}


def in_torchs_memory() -> Iterator[Any]:
    given = {"item": torch.zeros(SAMPLES, dtype=torch.int64)}
    for number in range(5):
        given["item"].fill_(number)
        yield given


def in_one_dict() -> Iterator[Any]:
    given = {}
    for number in range(5):
        given["item"] = torch.full((SAMPLES,), number)
        yield given


def in_bags_of_one_memory(part: str) -> Iterator[Any]:
    offsets, weights = np.arange(SAMPLES + 1), np.zeros(SAMPLES, np.float32)
    for number in range(5):
        if part == "offsets":
            offsets[1:] = SAMPLES - number
        else:
            weights[:] = number
        ids = torch.full((SAMPLES,), number)
        yield holdfast.JaggedFeatures(["item"], ids, torch.from_numpy(offsets), torch.from_numpy(weights))


@pytest.mark.parametrize("part", ["offsets", "weights"])
def test_bags_that_are_written_over_while_they_wait_are_refused_as_their_ids_are(tmp_path: Path, part: str) -> None:
    run = Run(tmp_path / "wrapped", medium="memory")
    with pytest.raises(StateError, match="changed while it waited"):
        list(holdfast.prefetch(in_bags_of_one_memory(part), run.pool))
    run.pool.close()


def in_nested_tensors() -> Iterator[Any]:
    memory = np.zeros(SAMPLES, np.int64)
    for number in range(5):
        memory[:] = number
        yield {"item": torch.nested.nested_tensor_from_jagged(torch.from_numpy(memory), torch.arange(SAMPLES + 1))}


@pytest.mark.parametrize("made", [in_numpys_memory, in_torchs_memory, in_one_dict, in_nested_tensors])
def test_a_batch_that_is_written_over_while_it_waits_is_refused(tmp_path: Path, made: Callable[[], Any]) -> None:
    """Taken one by one each is right; of those taken ahead each would be the last one."""
    assert [int(batch["item"][0]) for batch in made()] == [0, 1, 2, 3, 4]
    run = Run(tmp_path / "wrapped", medium="memory")
    with pytest.raises(StateError, match="changed while it waited"):
        list(holdfast.prefetch(made(), run.pool))
    run.pool.close()


class OfOnesOwn:
    def __init__(self, number: int, memory: np.ndarray[Any, Any]) -> None:
        memory[:] = number
        self.bags = {"item": torch.from_numpy(memory)}


class OfSlots:
    """Shows nothing: what it has is found by whoever knows it."""

    __slots__ = ("bags",)

    def __init__(self, number: int, memory: np.ndarray[Any, Any]) -> None:
        memory[:] = number
        self.bags = {"item": torch.from_numpy(memory)}


@pytest.mark.parametrize(
    ("kind", "features"),
    [(OfOnesOwn, None), (OfOnesOwn, lambda batch: batch.bags), (OfSlots, lambda batch: batch.bags)],
)
def test_a_batch_of_a_class_of_ones_own_that_is_written_over_is_refused_as_well(
    tmp_path: Path, kind: Any, features: Any
) -> None:
    run, memory = Run(tmp_path / "wrapped", medium="memory"), np.zeros(SAMPLES, np.int64)
    with pytest.raises(StateError, match="changed while it waited"):
        list(holdfast.prefetch((kind(number, memory) for number in range(5)), run.pool, features=features))
    given = (kind(number, np.zeros(SAMPLES, np.int64)) for number in range(5))
    handed_out = [int(one.bags["item"][0]) for one in holdfast.prefetch(given, run.pool, features=features)]
    assert handed_out == [0, 1, 2, 3, 4]
    run.pool.close()


class MadeWhenAsked(UserDict[str, Any]):
    """Stacks a column whenever it is asked for one, as lazy frames and lists of samples do."""

    def __getitem__(self, key: str) -> Tensor:
        return torch.stack(self.data[key])


def test_a_batch_that_makes_its_tensors_when_it_is_asked_is_the_same_batch(tmp_path: Path) -> None:
    run = Run(tmp_path / "wrapped", medium="memory")
    given = [MadeWhenAsked(item=[torch.tensor(number), torch.tensor(1)]) for number in range(5)]
    assert [int(batch["item"][0]) for batch in holdfast.prefetch(given, run.pool)] == [0, 1, 2, 3, 4]
    run.pool.close()


def test_bags_that_are_replaced_in_their_dict_are_looked_up_as_they_are(tmp_path: Path) -> None:
    ends = []
    for wrapped in (False, True):
        run = Run(tmp_path / f"wrapped {wrapped}")
        given = batches(as_bags=True)
        for batch in itertools.islice(holdfast.prefetch(given, run.pool) if wrapped else given, 6):
            batch.features["item"] = (batch.features["item"][0] // 3, batch.features["item"][1])
            run.step(batch)
        ends.append(run.end())
    assert ends[0] == ends[1]


def test_what_a_generator_raises_comes_after_the_batches_before_it(
    tmp_path: Path, expected: Callable[..., str]
) -> None:
    def failing() -> Iterator[Batch]:
        yield from batches(1, 5)
        raise OSError("the disk with the data is gone")

    run = Run(tmp_path / "wrapped")
    with pytest.raises(OSError, match="is gone"):
        run.train(holdfast.prefetch(failing(), run.pool), 100)
    assert run.pool.step == 5
    assert run.end() == expected(5)


def test_an_id_that_no_table_has_is_found_in_its_own_batch(tmp_path: Path, expected: Callable[..., str]) -> None:
    given = [batch_of(number) for number in range(1, 8)]
    given[4].features.values()[7] = ROWS["item"]
    run = Run(tmp_path / "wrapped")
    with pytest.raises(IdError, match="3000"):
        run.train(holdfast.prefetch(given, run.pool), 100)
    assert run.pool.step == 4
    assert run.end() == expected(4)


def test_a_loop_that_is_left_early_goes_on_with_the_next_batch(tmp_path: Path, expected: Callable[..., str]) -> None:
    run = Run(tmp_path / "wrapped")
    coming = holdfast.prefetch(batches(1, 9), run.pool)
    for steps in (3, 1, 100):
        for batch in coming:
            run.step(batch)
            steps -= 1
            if steps == 0:
                break
    assert run.pool.step == 9
    assert run.end() == expected(9)


def test_a_list_that_is_wrapped_begins_anew_with_every_loop(tmp_path: Path) -> None:
    run = Run(tmp_path / "wrapped")
    given = [batch_of(number) for number in range(1, 4)]
    coming = holdfast.prefetch(given, run.pool)
    assert len(coming) == 3
    for _ in range(2):
        assert [batch is one for batch, one in zip(coming, given, strict=True)] == [True] * 3
    run.pool.close()


def test_what_comes_when_training_is_interrupted_is_not_lost(tmp_path: Path, expected: Callable[..., str]) -> None:
    class Interrupting:
        def __init__(self) -> None:
            self.numbers = itertools.count(1)
            self.calls = 0

        def __iter__(self) -> Iterator[Batch]:
            return self

        def __next__(self) -> Batch:
            self.calls += 1
            if self.calls == 6:
                raise KeyboardInterrupt
            return batch_of(next(self.numbers))

    run = Run(tmp_path / "wrapped")
    coming = holdfast.prefetch(Interrupting(), run.pool)
    with pytest.raises(KeyboardInterrupt):
        run.train(coming, 10)
    run.train(coming, 10 - run.pool.step)
    assert run.end() == expected(10)


class Stream:
    """A loader of the user's own, as Checkpoint takes it."""

    def __init__(self) -> None:
        self.samples = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.samples += SAMPLES
        return batch_of(self.samples // SAMPLES)

    def seek(self, num_samples: int) -> None:
        self.samples = num_samples

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


def test_a_resume_goes_on_after_what_was_trained_not_after_what_was_fetched(tmp_path: Path) -> None:
    def life(name: str, steps: int, wrapped: bool) -> str:
        coming: Any = Stream()

        def loader(pool: holdfast.Pool) -> Any:
            nonlocal coming
            coming = holdfast.prefetch(coming, pool) if wrapped else coming
            return coming

        run = Run(tmp_path / name, loader=loader)
        run.train(coming, steps - run.pool.step)
        assert run.pool.cursor == steps * SAMPLES
        return run.end()

    for steps in (3, 8, 12):
        end = life("lives", steps, wrapped=True)
    assert end == life("whole", 12, wrapped=False)


def test_evaluation_in_the_middle_leaves_no_trace(tmp_path: Path, expected: Callable[..., str]) -> None:
    run = Run(tmp_path / "wrapped")
    for batch in itertools.islice(holdfast.prefetch(batches(), run.pool), 8):
        with torch.no_grad():
            for other in itertools.islice(holdfast.prefetch(batches(50), run.pool), 2):
                run.rows[0](other.features)
        run.step(batch)
    assert run.end() == expected(8)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.rand(1), random.random, lambda: np.random.rand(1)],  # noqa: NPY002
    ids=["torch", "python", "numpy"],
)
def test_a_batch_that_takes_global_random_numbers_is_not_taken_ahead(tmp_path: Path, draw: Callable[[], Any]) -> None:
    def drawing() -> Iterator[Batch]:
        for number in itertools.count(1):
            draw()
            yield batch_of(number)

    run = Run(tmp_path / "wrapped")
    with pytest.raises(StateError, match="a generator of its own"):
        next(holdfast.prefetch(drawing(), run.pool))
    run.pool.close()


GENERATOR, PLACE = torch.Generator(), {"next": 0}


def drawing_from_a_generator() -> Iterator[Batch]:
    while True:
        yield batch_of(int(torch.randint(1, 99, (), generator=GENERATOR)))


def counting_in_a_dict() -> Iterator[Batch]:
    while True:
        PLACE["next"] += 1
        yield batch_of(PLACE["next"])


@pytest.mark.parametrize("medium", ["block", "memory"])
@pytest.mark.parametrize("batches", [drawing_from_a_generator, counting_in_a_dict])
def test_batches_that_change_what_the_checkpoint_keeps_are_not_taken_ahead(
    tmp_path: Path, batches: Callable[[], Iterator[Batch]], medium: str
) -> None:
    """A resume would go on from there, and leave out those that were taken and not trained."""
    run = Run(tmp_path / "wrapped", medium=medium, extra={"noise": GENERATOR, "place": PLACE})
    with pytest.raises(StateError, match=r"changed extra\['(noise|place)'\], which the Checkpoint keeps"):
        next(holdfast.prefetch(batches(), run.pool))
    run.pool.close()


class Album:
    """An object of a user's, whose samples are no number."""

    samples = ("one", "two")

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def test_what_else_the_checkpoint_keeps_stands_in_no_ones_way(tmp_path: Path) -> None:
    run = Run(tmp_path / "wrapped", extra={"album": Album(), "history": [0.5], "generator": random.Random(1)})
    run.train(holdfast.prefetch(batches(), run.pool), 5)
    assert run.pool.step == 5
    run.pool.close()


@pytest.mark.parametrize("wrapped", ["the loader", "what is made of it"])
def test_a_loader_that_the_checkpoint_has_is_not_wrapped_beside_it(tmp_path: Path, wrapped: str) -> None:
    loader = Stream()
    run = Run(tmp_path / "wrapped", loader=lambda pool: loader)
    with pytest.raises(StateError, match=r"(wraps is the Checkpoint's loader|changed loader).*what prefetch returns"):
        next(holdfast.prefetch(loader if wrapped == "the loader" else (batch for batch in loader), run.pool))
    run.pool.close()


def test_a_pool_in_memory_takes_a_wrapped_loop_as_it_is(tmp_path: Path, expected: Callable[..., str]) -> None:
    run = Run(tmp_path / "wrapped", medium="memory")
    run.train(holdfast.prefetch(batches(), run.pool), 5)
    assert run.end() == expected(5)
