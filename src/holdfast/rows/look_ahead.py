"""Looking forward for loops that take their batches one by one: the coming ones are planned and announced meanwhile.

    for batch in holdfast.prefetch(batches, pool): ...      # any iterable: a DataLoader, a generator, a list

A ``holdfast.data.Loader`` that a Checkpoint is given needs no such call.

Invariants
- Nothing depends on it but time. A plan stands for the very features object that it was made of, with the very tensors,
  unchanged; whoever gives a collection anything else has it planned then. What is announced is a hint.
- Whatever goes wrong while a batch is planned ahead goes wrong once more when it is its turn, and is raised there.
- Only the thread that takes batches takes them from what is wrapped, announces, and lets go; planning alone is done in
  another.
- A batch is taken ahead of time only if that changes nothing that a Checkpoint keeps, the process's own generators
  among it: a resumed run would go on after the batches that were taken, and not after the one that trained.
- A batch is handed out as it was taken, or not at all: whoever makes batches may not write into those that wait.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from holdfast.errors import HoldfastError, StateError
from holdfast.pools.directory import check_pool
from holdfast.pools.pool import Pool
from holdfast.rows.collection import RowCollection
from holdfast.rows.coming import Coming, checksum_of, contents_of, count_of_changes, parts_of, tensors_of
from holdfast.rows.features import KeyedJagged
from holdfast.state import state_tree
from holdfast.state.generators import as_stateful, is_generator

Item = TypeVar("Item")
Planned = tuple[tuple[RowCollection, Coming], ...]

_AHEAD = 3  # batches beyond the one that trains
_DEEPEST = 4  # levels of tuples, mappings and dataclasses in which a batch's features are looked for


class LookAhead:
    """Plans batches for the collections of `pool` whose rows come through a scratchpad, and announces them.

    features: finds in a batch what collections are going to be called with; default: whatever in it has their keys.
    """

    def __init__(self, pool: Pool, features: Callable[[Any], Any] | None = None) -> None:
        check_pool(pool)
        self._pool = pool
        self._features = features
        self._announced: list[Planned] = []

    @property
    def in_order(self) -> bool:
        """Whether planning gives new keys their rows."""
        return any(rows.has_keys for rows in self._pool.collections)

    def plan(self, batch: object) -> Planned:
        """By any thread. What cannot be planned is left out."""
        collections = [rows for rows in self._pool.collections if rows.looks_forward and rows.takes_hints]
        if not collections:
            return ()
        planned = []
        for features in _features_in(batch if self._features is None else self._features(batch), _DEEPEST):
            keys = set(features.keys())
            for rows in collections:
                if keys.issuperset(rows.keys()):
                    with suppress(Exception):  # it says so again when they are looked up
                        planned.append((rows, Coming(features, tensors_of(features), rows.plan(features))))
        return tuple(planned)

    def turn(self, batches: Sequence[Planned]) -> None:
        """The first of `batches` is handed out now, the others follow: those that were not announced are; of any that
        is not among them nothing is kept."""
        for gone in [batch for batch in self._announced if not any(batch is one for one in batches)]:
            for rows, coming in gone:
                rows.forget(coming)
        for batch in batches:
            if any(batch is one for one in self._announced):
                continue
            for rows, coming in batch:
                with suppress(HoldfastError):  # of a pool that is closed, or has failed: its next verb says so
                    rows.expect(coming)
        self._announced = list(batches)


@dataclasses.dataclass(frozen=True, slots=True)
class _Held:
    """A tensor or an array of a batch, as it was when that was taken."""

    part: Any
    is_counted: bool
    mark: int


@dataclasses.dataclass(slots=True)
class _Taken:
    """A batch that was taken, and what it held then; or how taking it ended. at: where the source says that it is after
    it."""

    batch: Any = None
    held: Sequence[_Held] = ()
    planned: Future[Planned] | None = None
    at: dict[str, Any] | None = None
    error: Exception | None = None


class Prefetched(Generic[Item]):
    """See prefetch. What was taken ahead is kept through a loop that is left early."""

    def __init__(self, batches: Iterable[Item], pool: Pool, features: Callable[[Any], Any] | None, ahead: int) -> None:
        self._batches = batches
        self._pool = pool
        self._look = LookAhead(pool, features)
        self._features = features
        self._ahead = ahead
        self._planning: ThreadPoolExecutor | None = None
        self._source: Iterator[Item] | None = None
        self._coming: deque[_Taken] = deque()
        self._at: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Item]:
        """Begins anew, unless what is wrapped is an iterator: that goes on."""
        if not hasattr(self._batches, "__next__"):
            self._drop()
        return self

    def __next__(self) -> Item:
        if self._source is None:
            self._source = iter(self._batches)
        if not self._coming:
            self._coming.append(self._take())
        while len(self._coming) <= self._ahead and self._coming[-1].error is None:
            self._coming.append(self._take_early())
        first = self._coming[0]
        if self._is_changed(first):
            raise StateError(
                "prefetch: a batch was changed while it waited for its turn: what makes batches writes into the memory "
                "of earlier ones; have it give copies (tensor.clone()), or do not wrap it"
            )
        if first.planned is not None:
            self._look.turn([first.planned.result(), *self._planned_by_now()])
        # Last of all, so that Ctrl-C loses no batch.
        self._at = first.at
        self._coming.popleft()
        if first.error is not None:
            raise first.error
        return first.batch  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """``samples``, ``state_dict`` and what else is asked for: of what is wrapped, after the batch handed out."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    @property
    def samples(self) -> int:
        """Where the source was after the batch that was handed out last, if it counts its samples."""
        return int(self._batches.samples if self._at is None else self._at["samples"])  # type: ignore[attr-defined]

    def seek(self, num_samples: int) -> None:
        self._drop()
        self._batches.seek(num_samples)  # type: ignore[attr-defined]

    def state_dict(self) -> Any:
        """The source's, after the batch that was handed out last."""
        return self._batches.state_dict() if self._at is None else self._at["state"]  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self._drop()
        self._batches.load_state_dict(state)  # type: ignore[attr-defined]

    def _drop(self) -> None:
        self._coming.clear()
        self._look.turn([])
        self._source = None
        self._at = None

    def _take(self) -> _Taken:
        assert self._source is not None
        try:
            batch = next(self._source)
            held = [
                _Held(part, is_counted := _is_counted(part), _mark(part, is_counted)) for part in self._parts_of(batch)
            ]
        except Exception as error:  # StopIteration, too: whose turn it is, is told
            return _Taken(error=error)
        if self._planning is None:
            self._planning = ThreadPoolExecutor(1, thread_name_prefix="holdfast-plan")
        return _Taken(batch, held, self._planning.submit(self._look.plan, batch), self._where())

    def _parts_of(self, batch: Any) -> list[Tensor | np.ndarray[Any, Any]]:
        """What may be written over while the batch waits: its tensors and arrays; of a batch that shows none, those
        that it is looked up by, for which `features` has to be asked once more each time."""
        parts = list(_parts_of(_opened(batch), _DEEPEST))
        return parts if parts or self._features is None else list(_parts_of(self._features(batch), _DEEPEST))

    def _is_changed(self, taken: _Taken) -> bool:
        if taken.error is not None:
            return False
        parts = self._parts_of(taken.batch)
        return len(parts) != len(taken.held) or any(
            _mark(was.part, was.is_counted) != was.mark or (part is not was.part and not _are_same(part, was.part))
            for part, was in zip(parts, taken.held, strict=True)
        )

    def _take_early(self) -> _Taken:
        kept = {name: value for name, value in (self._pool.kept() or {}).items() if not isinstance(value, Prefetched)}
        for name, value in kept.items():
            if value is self._batches:
                raise StateError(
                    f"prefetch: what it wraps is the Checkpoint's {name}, which is ahead of the batch that trains, so "
                    "a resume would leave batches out: give the Checkpoint what prefetch returns"
                )
        generators, before = _generators(), _states(kept)
        taken = self._take()
        if taken.error is not None:
            return taken
        if _differ(generators, _generators()):
            raise StateError(
                "prefetch: taking a batch drew from the process's own random number generators (torch, NumPy or "
                "Python), so batches that are taken ahead would be others after a resume: give what makes them a "
                "generator of its own, or do not wrap it"
            )
        if changed := _changed(before, _states(kept)):
            raise StateError(
                f"prefetch: taking a batch changed {changed[0]}, which the Checkpoint keeps as it is after the batches "
                "that were taken ahead, so a resume would leave them out: wrap an object with state_dict, and give the "
                "Checkpoint what prefetch returns, or do not wrap it"
            )
        return taken

    def _where(self) -> dict[str, Any] | None:
        at: dict[str, Any] = {}
        if hasattr(self._batches, "samples"):
            at["samples"] = self._batches.samples
        if hasattr(self._batches, "state_dict"):
            at["state"] = copy.deepcopy(self._batches.state_dict())
        return at or None

    def _planned_by_now(self) -> list[Planned]:
        planned = []
        for taken in list(self._coming)[1:]:
            if taken.planned is None or not taken.planned.done() or taken.planned.exception() is not None:
                break
            planned.append(taken.planned.result())
        return planned


def prefetch(
    batches: Iterable[Item],
    pool: Pool,
    *,
    features: Callable[[Item], Any] | None = None,
    ahead: int = _AHEAD,
) -> Prefetched[Item]:
    """Gives what `batches` gives, and has the rows of the coming batches fetched while one trains.

    batches: any iterable; wrapped once, it is iterated as it would be without. What it draws at random comes from
        generators of its own, and the Checkpoint has none of what it changes. Where it has ``state_dict``, ``samples``
        or ``seek``, so has what this returns, and they speak of the batch that was handed out last: give that to the
        Checkpoint.
    features: of a batch, what a collection is called with; default: the features in it that have the collection's
        keys, in tuples, mappings and dataclasses. What is called with them must be the same objects: features that
        the model makes itself are planned again, and their rows are there.
    ahead: so many batches beyond the one handed out are taken.

    Raises StateError where taking a batch changes what a Checkpoint keeps, or a batch that was taken before.

    Without effect, but for batches taken ahead, where rows are not fetched through a scratchpad, and where several
    ranks share them: there every rank has to announce the same batches, which only a loop that does so itself can say.
    """
    return Prefetched(batches, pool, features, ahead)


def _parts_of(batch: Any, levels: int) -> Iterator[Tensor | np.ndarray[Any, Any]]:
    """The tensors and arrays of a batch."""
    if isinstance(batch, Tensor):
        yield from parts_of(batch)
    elif isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, KeyedJagged):
        weights = batch.weights_or_none()
        yield from (batch.values(), batch.offsets(), *(() if weights is None else (weights,)))
    elif levels > 0:
        for part in _members_of(batch):
            yield from _parts_of(part, levels - 1)


def _opened(batch: Any) -> Any:
    """A batch of a class of its own as a mapping of what it has; any other, as it is."""
    known = (Tensor, np.ndarray, KeyedJagged, Mapping, tuple, list, nn.Module, type)
    is_known = isinstance(batch, known) or dataclasses.is_dataclass(batch)
    return batch if is_known or not hasattr(batch, "__dict__") else vars(batch)


def _members_of(batch: Any) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, (tuple, list)):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    return ()


def _is_counted(part: Tensor | np.ndarray[Any, Any]) -> bool:
    """Whether PyTorch counts the changes of its contents: in memory of its own, not NumPy's or a worker's. To be asked
    before it is planned, which lends NumPy the memory."""
    if not isinstance(part, Tensor):
        return False
    is_plain = part.device.type == "cpu" and part.layout is torch.strided and not part.is_inference()
    return not is_plain or part.untyped_storage().resizable()


def _mark(part: Tensor | np.ndarray[Any, Any], is_counted: bool) -> int:
    """Another number when the contents have changed."""
    if isinstance(part, Tensor):
        return count_of_changes(part) if is_counted else contents_of(part)
    return 0 if part.dtype.hasobject else checksum_of(part)


def _are_same(part: Any, was: Any) -> bool:
    """Of two that are not one: what makes its tensors when it is asked gives another one each time."""
    return type(part) is type(was) and part.shape == was.shape and bool((part == was).all())


def _features_in(batch: Any, levels: int) -> Iterator[Any]:
    if isinstance(batch, KeyedJagged):
        yield batch
        return
    if levels == 0 or isinstance(batch, (Tensor, str, bytes)):
        return
    if isinstance(batch, Mapping) and any(_is_bag(value) for value in batch.values()):
        yield batch
    for part in _members_of(batch):
        if isinstance(batch, Mapping) and _is_bag(part):
            continue
        yield from _features_in(part, levels - 1)


def _is_bag(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dtype in (torch.int64, torch.int32)
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, Tensor) for part in value)


def _generators() -> tuple[Any, ...]:
    """Of the process, as each library has its own: every batch is looked at, and to write them down takes longer."""
    numpy_state = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state(), random.getstate(), numpy_state


def _differ(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    (torch_one, python_one, numpy_one), (torch_other, python_other, numpy_other) = one, other
    return (
        not torch.equal(torch_one, torch_other)
        or python_one != python_other
        or numpy_one[2:] != numpy_other[2:]
        or not np.array_equal(numpy_one[1], numpy_other[1])
    )


def _states(kept: Mapping[str, Any]) -> dict[str, tuple[bytes, list[Tensor]]]:
    """Of what a Checkpoint keeps, as flatten gives them. Of its loader it is how far that is, of other objects nothing:
    their state may be much."""
    states = {}
    for name, value in kept.items():
        if is_generator(value):
            states[name] = state_tree.flatten(as_stateful(value).state_dict())
        elif name == "loader" and hasattr(value, "samples"):
            states[name] = state_tree.flatten(int(value.samples))
        elif not hasattr(value, "state_dict"):
            states[name] = state_tree.flatten(value)
    return states


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Names of states that differ; of the tensors in a plain value, which are no copies, nothing is known."""
    return [
        name
        for name, (text, tensors) in before.items()
        if text != after[name][0]
        or any(
            one.data_ptr() != other.data_ptr() and not torch.equal(one, other)
            for one, other in zip(tensors, after[name][1], strict=True)
        )
    ]
