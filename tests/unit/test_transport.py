"""Ranks of one machine hand each other through memory what they would over a network, whatever sizes it has."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from holdfast import _core
from holdfast.group import neighbours
from holdfast.group.neighbours import Neighbours, meet_neighbours
from holdfast.group.notices import NOT_YET
from holdfast.group.transport import Transport, Waitable

_Result = TypeVar("_Result")
LONG = timedelta(seconds=30)
DTYPES = (torch.float32, torch.int32, torch.int64, torch.bfloat16, torch.float64)
SIZES = st.sampled_from([0, 0, 1, 2, 7, 63, 64, 1000, 20_000])


class Ranks:
    """Threads that are ranks: what each says is gathered from all."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=60.0)
        self._said: list[Any] = [None] * count

    def gather(self, rank: int) -> Callable[[Any, str], list[Any]]:
        def gather(value: Any, what: str) -> list[Any]:
            self._said[rank] = value
            self._barrier.wait()
            everyones = list(self._said)
            self._barrier.wait()
            return everyones

        return gather

    def run(self, work: Callable[[int], _Result]) -> list[_Result]:
        with ThreadPoolExecutor(self.count) as threads:
            return list(threads.map(work, range(self.count)))

    def meet(self, wanted: Sequence[bool] = ()) -> list[Neighbours]:
        return self.run(lambda rank: meet_neighbours(rank, self.gather(rank), wanted=wanted[rank] if wanted else True))

    def transports(self) -> list[Transport]:
        met = self.meet()
        return [Transport(None, range(self.count), rank, of_rank) for rank, of_rank in enumerate(met)]


def numbers(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn * 100).to(dtype)


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, list[Any]]:
    """Of how many ranks, and what all of them begin: kind, dtype, sizes, and how many calls later it is waited for."""
    count = draw(st.integers(2, 4))
    sizes = {
        "all_to_all": st.lists(st.lists(SIZES, min_size=count, max_size=count), min_size=count, max_size=count),
        "all_gather": st.lists(SIZES, min_size=count, max_size=count),
        "sum": SIZES,
    }
    drawn = []
    for _ in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(sorted(sizes)))
        drawn.append((kind, draw(st.sampled_from(DTYPES)), draw(sizes[kind]), draw(st.integers(0, 3))))
    return count, drawn


def begin(on: Transport, rank: int, seed: int, call: Any) -> tuple[Waitable, Tensor, Tensor, Tensor]:
    """The work, what it fills, what that has to be, and what is read until then."""
    kind, dtype, sizes, _ = call
    count = len(on.ranks)
    if kind == "all_to_all":  # sizes[source][target]
        sent = [numbers(sum(of_rank), dtype, seed + source) for source, of_rank in enumerate(sizes)]
        received = torch.zeros(sum(of_rank[rank] for of_rank in sizes), dtype=dtype)
        expected = torch.cat([part.split(of_rank)[rank] for part, of_rank in zip(sent, sizes, strict=True)])
        work = on.all_to_all(received, [of_rank[rank] for of_rank in sizes], sent[rank], sizes[rank])
        return work, received, expected, sent[rank]
    if kind == "all_gather":
        said = [numbers(size, dtype, seed + source) for source, size in enumerate(sizes)]
        received = torch.zeros(sum(sizes), dtype=dtype)
        return on.all_gather(received, sizes, said[rank]), received, torch.cat(said), said[rank]
    added = [numbers(sizes, dtype, seed + source) for source in range(count)]
    total = added[0].clone()
    for other in added[1:]:
        total += other  # the order of the ranks, whose bits count
    values = added[rank]
    return on.sum(values), values, total, values


@settings(max_examples=60)
@given(calls(), st.integers(0, 2**20))
def test_whatever_is_begun_ends_with_what_was_sent(drawn: tuple[int, list[Any]], seed: int) -> None:
    """Several at once, of which later ones are waited for while earlier ones are on their way."""
    count, everything = drawn
    ranks = Ranks(count)
    transports = ranks.transports()

    def work(rank: int) -> list[str]:
        on_their_way: list[tuple[int, Any]] = []
        wrong = []
        for number, call in enumerate([*everything, *[None] * 4]):
            if call is not None:
                begun = begin(transports[rank], rank, seed + 100 * number, call)
                on_their_way.append((number + call[3], begun))
            for waited in [item for item in on_their_way if item[0] <= number]:
                on_their_way.remove(waited)
                pending, found, expected, _ = waited[1]
                pending.wait(LONG)
                if not pending.is_completed() or not torch.equal(found, expected):
                    wrong.append(f"{call}: {found} instead of {expected}")
        return wrong

    assert ranks.run(work) == [[]] * count


def test_a_wait_for_a_rank_that_is_slow_can_be_taken_up_again() -> None:
    first, second = Ranks(2).transports()
    received = torch.zeros(3)
    work = first.all_gather(received, [1, 2], torch.tensor([1.0]))
    for _ in range(2):
        assert not work.is_completed()
        with pytest.raises(RuntimeError, match=NOT_YET):
            work.wait(timedelta(milliseconds=20))
    second.all_gather(torch.zeros(3), [1, 2], torch.tensor([2.0, 3.0])).wait(LONG)
    assert work.is_completed()
    work.wait(LONG)
    assert received.tolist() == [1.0, 2.0, 3.0]


def test_what_was_sent_comes_though_the_sender_has_closed_and_then_nothing() -> None:
    first, second = Ranks(2).meet()
    ours = [Transport(None, range(2), rank, met) for rank, met in enumerate((first, second))]
    ours[1].all_gather(torch.zeros(2), [1, 1], torch.tensor([2.0]))
    second.close()
    received = torch.zeros(2)
    ours[0].all_gather(received, [1, 1], torch.tensor([1.0])).wait(LONG)
    assert received.tolist() == [1.0, 2.0]
    lost = ours[0].sum(torch.ones(2))
    with pytest.raises(RuntimeError, match="rank 1 has closed its channel"):
        lost.wait(LONG)


def test_what_is_closed_leaves_no_memory_behind() -> None:
    def num_channels() -> int:
        maps = Path("/proc/self/maps").read_text()
        return maps.count("holdfast-channel")

    gc.collect()
    before = num_channels()
    met = Ranks(3).meet()
    assert num_channels() == before + 12  # both ends of each
    for of_rank in met:
        of_rank.close()
    assert num_channels() == before


def test_ranks_that_make_different_calls_are_told() -> None:
    first, second = Ranks(2).transports()
    first.all_gather(torch.zeros(3), [1, 2], torch.zeros(1))
    with pytest.raises(RuntimeError, match="4 bytes where 8 were to come"):
        second.all_gather(torch.zeros(4), [2, 2], torch.zeros(2)).wait(LONG)


def test_a_message_of_nothing_is_sent_whatever_its_stride() -> None:
    """What the core says of a batch without ids has none."""
    first, second = Ranks(2).transports()
    received = torch.zeros(2, dtype=torch.int32)
    nothing = torch.empty(0, dtype=torch.int32).as_strided((0,), (0,))
    second.all_to_all(torch.empty(0, dtype=torch.int32), [0, 0], torch.tensor([5, 6], dtype=torch.int32), [2, 0])
    first.all_to_all(received, [0, 2], nothing, [0, 0]).wait(LONG)
    assert received.tolist() == [5, 6]


def ways(met: Sequence[Neighbours], ranks: Sequence[int]) -> set[bool]:
    """Whether these ranks' transports go through memory, as each of them has it."""
    return {Transport(None, ranks, rank, met[rank]).is_through_memory for rank in ranks}


@pytest.mark.parametrize("count", [2, 3])
def test_one_that_wants_no_memory_has_none_with_anybody(count: int) -> None:
    met = Ranks(count).meet(wanted=[rank != 1 for rank in range(count)])
    assert ways(met, range(count)) == {False}
    if count == 3:
        assert ways(met, (0, 2)) == {True}


def test_ranks_of_several_machines_go_on_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one machine alone go through memory."""
    machines = {0: "left", 1: "left", 2: "right", 3: "right"}
    ranks = Ranks(4)
    of_thread = threading.local()
    monkeypatch.setattr(neighbours, "_home", lambda: [machines[of_thread.rank]])

    def meet(rank: int) -> Neighbours:
        of_thread.rank = rank
        return meet_neighbours(rank, ranks.gather(rank), wanted=True)

    met = ranks.run(meet)
    assert ways(met, range(4)) == ways(met, (1, 2)) == {False}
    assert ways(met, (0, 1)) == ways(met, (2, 3)) == {True}


def test_a_rank_that_another_cannot_reach_sends_all_of_them_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third as well, which reaches both and is reached: if it went another way, all would wait for ever."""
    ranks = Ranks(3)
    of_thread = threading.local()

    def reader(address: Any) -> _core.ChannelReader:
        of_thread.made = getattr(of_thread, "made", 0) + 1
        if of_thread.rank == 0 and of_thread.made == 1:  # its channel from rank 1
            raise RuntimeError("Permission denied")
        return _core.ChannelReader(address)

    class Core:
        ChannelWriter, ChannelReader = _core.ChannelWriter, staticmethod(reader)

    monkeypatch.setattr(neighbours, "_core", Core)

    def meet(rank: int) -> Neighbours:
        of_thread.rank, of_thread.made = rank, 0
        return meet_neighbours(rank, ranks.gather(rank), wanted=True)

    met = ranks.run(meet)
    assert ways(met, range(3)) == ways(met, (0, 1)) == {False}
    assert ways(met, (0, 2)) == ways(met, (1, 2)) == {True}


def test_a_process_that_has_ended_is_not_met() -> None:
    writer = _core.ChannelWriter(1 << 16)
    process, descriptor, token = writer.address
    for address in ((2**22 + 1, descriptor, token), (process, descriptor, token + 1), (process, 0, token)):
        with pytest.raises(RuntimeError):
            _core.ChannelReader(address)
