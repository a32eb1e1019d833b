"""The stream of batches."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.loader import Loader, default_window_samples
from holdfast.data.pipeline import Pipeline
from holdfast.data.shuffle import SampleOrder
from holdfast.data.synthetic import SyntheticSource, uniform_shape
from holdfast.errors import ConfigError, DataError, StepError


def samples_of(batch):
    return batch.dense[:, 0].to(torch.int64).tolist()


def check_columns(batch):
    """All columns of a batch from NumberedSource belong to the samples that its dense column names."""
    samples = samples_of(batch)
    assert batch.labels.tolist() == [float(sample % 2) for sample in samples]
    bags = batch.features.values().split(batch.features.lengths().tolist())
    expected = [[sample] for sample in samples]
    expected += [[sample, sample + 1] for sample in samples]
    expected += [[sample] * (sample % 3) for sample in samples]
    assert [bag.tolist() for bag in bags] == expected
    assert batch.features.stride() == batch.size
    assert batch.dense.dtype == batch.labels.dtype == torch.float32
    assert batch.dense.is_contiguous()


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("holdfast-loader")]


def wait_until_gone():
    """Threads of loaders that were let go end on their own."""
    deadline = time.monotonic() + 5
    while loader_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    return not loader_threads()


def test_an_unshuffled_loader_decodes_no_more_than_a_few_groups_of_16_mib_ahead(numbered):
    source = numbered([1] * 400)
    source.sample_bytes = 1 << 20
    with Loader(source, batch_size=1, seed=0, shuffle=False, prefetch=1) as loader:
        next(loader)
        time.sleep(0.2)
        assert source.num_blocks_read <= 3 * 16
        for _ in range(99):
            next(loader)
    assert source.num_blocks_read >= 100


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    batch_size=st.integers(1, 40),
    window=st.integers(1, 40),
    workers=st.integers(1, 4),
    prefetch=st.integers(1, 5),
    seek=st.integers(0, 300),
    shuffle=st.booleans(),
)
def test_batches_are_the_stream_cut_in_order(numbered, sizes, batch_size, window, workers, prefetch, seek, shuffle):
    source = numbered(sizes)
    begins = np.cumsum(sizes) - sizes
    order = SampleOrder(source.block_sizes, seed=5, window_samples=window if shuffle else None)
    stream = []
    for span in order.groups_from(0):
        samples = np.concatenate(
            [np.arange(begins[block], begins[block] + sizes[block]) for block in [piece.block for piece in span.pieces]]
        )
        permutation = order.permutation(span)
        stream.extend((samples if permutation is None else samples[permutation]).tolist())
        if len(stream) >= seek + 4 * batch_size:
            break
    with Loader(
        source,
        batch_size=batch_size,
        seed=5,
        shuffle=shuffle,
        shuffle_window_samples=window,
        workers=workers,
        prefetch=prefetch,
    ) as loader:
        loader.seek(seek)
        assert loader.samples == seek
        for index in range(4):
            batch = next(loader)
            begin = seek + index * batch_size
            assert (batch.first_sample, batch.size) == (begin, batch_size)
            assert batch.number == begin // batch_size + 1
            assert samples_of(batch) == stream[begin : begin + batch_size]
            check_columns(batch)
            assert loader.samples == begin + batch_size


def test_batches_do_not_depend_on_workers_or_prefetch(numbered, assert_same_batch):
    source = numbered([7, 11, 3, 8] * 10)
    with Loader(source, batch_size=13, seed=1, shuffle_window_samples=60) as one:
        expected = list(islice(one, 60))
    assert [batch.number for batch in expected] == list(range(1, 61))
    for workers in (2, 4):
        with Loader(source, batch_size=13, seed=1, shuffle_window_samples=60, workers=workers, prefetch=7) as more:
            for left, right in zip(expected, more, strict=False):
                assert_same_batch(left, right)


def test_every_sample_comes_once_per_epoch_though_batches_straddle_epochs(numbered):
    source = numbered([5, 9, 4])
    with Loader(source, batch_size=7, seed=2) as loader:
        stream = [sample for batch in islice(loader, 36) for sample in samples_of(batch)]
    epochs = [stream[begin : begin + 18] for begin in range(0, 14 * 18, 18)]
    assert all(sorted(epoch) == list(range(18)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 14


def test_state_goes_through_json_and_resumes_exactly(numbered, assert_same_batch):
    def make(batch_size):
        return Loader(numbered([6] * 20), batch_size=batch_size, seed=9, shuffle_window_samples=30)

    with make(11) as first, make(11) as second:
        list(islice(first, 5))
        state = json.loads(json.dumps(first.state_dict()))
        assert state["samples"] == 55
        second.load_state_dict(state)
        for left, right in zip(islice(first, 20), second, strict=False):
            assert_same_batch(left, right)
    with make(5) as other_size:
        other_size.load_state_dict(state)
        assert next(other_size).first_sample == 55


def test_state_of_another_stream_names_the_field(numbered):
    state = Loader(numbered([6] * 20), batch_size=4, seed=9).state_dict()
    with pytest.raises(ConfigError, match=r"source\.sizes"):
        Loader(numbered([6] * 21), batch_size=4, seed=9).load_state_dict(state)
    with pytest.raises(ConfigError, match="seed"):
        Loader(numbered([6] * 20), batch_size=4, seed=8).load_state_dict(state)
    with pytest.raises(ConfigError, match="shuffle_window_samples"):
        Loader(numbered([6] * 20), batch_size=4, seed=9, shuffle=False).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"source\.extra"):
        Loader(numbered([6] * 20), batch_size=4, seed=9).load_state_dict({**state, "source.extra": 1})
    with pytest.raises(ConfigError, match="samples"):
        Loader(numbered([6] * 20), batch_size=4, seed=9).load_state_dict({**state, "samples": "4"})


@pytest.mark.parametrize("field", ["batch_size", "workers", "prefetch", "seed", "shuffle_window_samples"])
def test_bad_arguments_name_the_field(numbered, field):
    with pytest.raises(ConfigError, match=field):
        Loader(numbered([3]), **{"batch_size": 2, "seed": 0, field: -1})


@pytest.mark.parametrize("batch_size", [2**31, 10**30])
def test_a_batch_beyond_any_memory_is_refused(numbered, batch_size):
    with pytest.raises(ConfigError, match="loader batch_size: must be at most 2,147,483,647"):
        Loader(numbered([3]), batch_size=batch_size, seed=0)


def test_a_source_without_samples_is_refused(numbered):
    with pytest.raises(ConfigError, match="no samples"):
        Loader(numbered([]), batch_size=2, seed=0)


def test_window_shrinks_for_wide_samples(numbered):
    source = numbered([3])
    assert default_window_samples(source) == 131_072
    source.sample_bytes = 1 << 20
    assert default_window_samples(source) == 64


def test_once_is_one_pass_in_order_and_leaves_the_stream_alone(numbered):
    with Loader(numbered([5, 9, 4]), batch_size=7, seed=2, workers=2) as loader:
        first = samples_of(next(loader))
        batches = list(loader.once())
        assert [batch.size for batch in batches] == [7, 7, 4]
        assert [batch.number for batch in batches] == [1, 2, 3]
        assert [sample for batch in batches for sample in samples_of(batch)] == list(range(18))
        for batch in batches:
            check_columns(batch)
        assert loader.samples == 7
        loader.seek(0)
        assert samples_of(next(loader)) == first


def test_transform_runs_in_a_worker_thread_and_comes_beside_the_batch(numbered):
    def transform(batch):
        return threading.current_thread().name, samples_of(batch)

    with Loader(numbered([8] * 5), batch_size=6, seed=0, workers=2, transform=transform) as loader:
        for batch, (thread, samples) in islice(loader, 20):
            assert thread.startswith("holdfast-loader")
            assert samples == samples_of(batch)
        batch, (_, samples) = next(loader.once())
        assert samples == samples_of(batch) == list(range(6))


def test_with_one_worker_the_transform_sees_batches_in_order(numbered):
    seen = []
    with Loader(numbered([8] * 5), batch_size=6, seed=0, transform=lambda batch: seen.append(batch.number)) as loader:
        list(islice(loader, 30))
    assert seen == list(range(1, len(seen) + 1))


def test_in_order_the_transform_sees_one_batch_at_a_time_whatever_the_workers(numbered):
    seen, at_once = [], []

    def transform(batch):
        at_once.append(batch.number)
        assert at_once == [batch.number], "another batch is in the transform"
        seen.append(batch.number)
        at_once.pop()

    with Loader(
        numbered([7, 3, 5]), batch_size=4, seed=1, workers=4, prefetch=6, transform=transform, in_order=True
    ) as loader:
        for _ in range(40):
            next(loader)
    assert seen[:40] == list(range(1, 41))  # of those that nobody took, some end with the loader


def test_error_in_a_worker_surfaces_as_it_is_after_the_batches_before_it(numbered):
    source = numbered([10] * 30, bad_blocks=[17, 20])
    with Loader(source, batch_size=10, seed=0, shuffle=False, workers=3, prefetch=6) as loader:
        # without shuffle a group is many blocks: none of the group of the bad block can come
        with pytest.raises(FileNotFoundError, match="block 17"):
            list(loader)
        with pytest.raises(FileNotFoundError, match="block 17"):
            next(loader)
        source.bad_blocks.clear()
        loader.seek(loader.samples)
        assert next(loader).first_sample == 0


def test_batches_of_earlier_groups_come_before_the_error(numbered):
    source = numbered([10_000] * 4, bad_blocks=[3])
    with Loader(source, batch_size=4_000, seed=0, shuffle=False, workers=2) as loader:
        with pytest.raises(FileNotFoundError):
            list(loader)
        assert loader.samples == 20_000


def test_error_in_the_transform_surfaces_at_its_batch(numbered):
    def transform(batch):
        if batch.number == 4:
            raise ZeroDivisionError("fourth")
        return batch.number

    with Loader(numbered([9]), batch_size=3, seed=0, workers=2, prefetch=4, transform=transform) as loader:
        assert [number for _, number in islice(loader, 3)] == [1, 2, 3]
        with pytest.raises(ZeroDivisionError, match="fourth"):
            next(loader)
        assert loader.samples == 9


def test_threads_that_end_without_a_word_are_an_error(numbered, monkeypatch):
    """As of memory that runs out before a thread has come to what tells the consumer."""
    monkeypatch.setattr(Pipeline, "_work", lambda pipeline: None)
    with Loader(numbered([100]), batch_size=10, seed=0) as loader, pytest.raises(DataError, match="without a word"):
        next(loader)


def test_close_stops_the_threads_and_ends_iteration(numbered):
    loader = Loader(numbered([9] * 50), batch_size=3, seed=0, workers=3)
    next(loader)
    assert len(loader_threads()) == 3
    loader.close()
    loader.close()
    assert not loader_threads()
    with pytest.raises(StepError, match="closed"):
        next(loader)


def test_seek_stops_the_old_threads(numbered):
    with Loader(numbered([9] * 50), batch_size=3, seed=0, workers=2) as loader:
        for position in (0, 100, 7):
            loader.seek(position)
            next(loader)
            assert len(loader_threads()) == 2


def test_a_forgotten_loader_stops_its_threads(numbered):
    loader = Loader(numbered([9] * 50), batch_size=3, seed=0, workers=2, transform=lambda batch: batch)
    next(loader)
    iterator = loader.once()
    next(iterator)
    del loader, iterator
    assert wait_until_gone()


@pytest.mark.parametrize("interrupted", [1, 2])
def test_ctrl_c_while_the_threads_start_leaves_none_behind(numbered, monkeypatch, assert_same_batch, interrupted):
    start, started = threading.Thread.start, []

    def start_until_interrupted(thread):
        start(thread)
        started.append(thread)
        if len(started) == interrupted:
            raise KeyboardInterrupt

    with Loader(numbered([9] * 50), batch_size=3, seed=0, workers=2) as loader:
        monkeypatch.setattr(threading.Thread, "start", start_until_interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(loader)
        first = next(loader)
        assert len(loader_threads()) == 2
        loader.seek(0)
        assert_same_batch(next(loader), first)
        started.clear()
        with pytest.raises(KeyboardInterrupt):
            next(loader.once())
        assert len(loader_threads()) == 2
    assert not loader_threads()


def test_ctrl_c_as_soon_as_the_lock_is_held_leaves_it_to_the_threads(numbered, monkeypatch):
    """Where it comes between two lines of Condition.__enter__, nobody gave the lock back, and the loader hung."""
    enter = threading.Condition.__enter__

    def enter_interrupted(condition):
        entered = enter(condition)
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return entered

    loader = Loader(numbered([9] * 50), batch_size=3, seed=0)
    next(loader)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(threading.Condition, "__enter__", enter_interrupted)
        next(loader)
    closing = threading.Thread(target=loader.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()


def test_prefetch_and_groups_bound_what_is_read_ahead(numbered):
    source = numbered([10] * 100)
    made = []

    def transform(batch):
        made.append(batch.number)

    with Loader(
        source, batch_size=5, seed=0, shuffle_window_samples=20, prefetch=3, workers=2, transform=transform
    ) as loader:
        next(loader)
        time.sleep(0.2)
        assert sorted(made) == [1, 2, 3, 4]
        # batches 1 to 4 need the first group of two blocks, batch 5 the second; one more is decoded ahead
        assert source.num_blocks_read <= 6


def test_ctrl_c_while_waiting_loses_no_batch(numbered, assert_same_batch):
    release = threading.Event()
    source = numbered([9] * 5)
    with Loader(source, batch_size=4, seed=0) as undisturbed:
        expected = list(islice(undisturbed, 2))
    # A process that was started in the background ignores the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Loader(source, batch_size=4, seed=0, transform=lambda _: release.wait()) as loader:
        timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                next(loader)
            timer.join()
        finally:
            release.set()  # or closing waits for the transform for ever
            signal.signal(signal.SIGINT, before)
        for left, (right, _) in zip(expected, loader, strict=False):
            assert_same_batch(left, right)


def test_interpreter_exits_though_nobody_closed_the_loader():
    program = (
        "from holdfast.data.loader import Loader\n"
        "from holdfast.data.synthetic import SyntheticSource, uniform_shape\n"
        "source = SyntheticSource(uniform_shape(num_samples=10**6, num_tables=4, rows_per_table=1000))\n"
        "loader = Loader(source, batch_size=64, seed=0, workers=3)\n"
        "next(loader)\n"
        "print('last line')\n"
    )
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "last line\n", "")


def test_no_global_random_state_is_touched():
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global state is the point
    torch.manual_seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    source = SyntheticSource(uniform_shape(num_samples=5000, num_tables=3, rows_per_table=100, lookups_per_bag=2))
    with Loader(source, batch_size=700, seed=3, workers=2) as loader:
        list(islice(loader, 20))
        list(loader.once())
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # noqa: NPY002
    assert before == after


@settings(max_examples=30)
@given(
    batch_size=st.integers(1, 40),
    num_parts=st.integers(1, 6),
    workers=st.integers(1, 3),
    seek=st.integers(0, 100),
    shuffle=st.booleans(),
)
def test_the_parts_of_a_batch_are_the_batch(numbered, batch_size, num_parts, workers, seek, shuffle):
    source = numbered([7, 11, 3, 8] * 3)

    def first_batches(part):
        with Loader(source, batch_size=batch_size, seed=4, shuffle=shuffle, workers=workers, part=part) as loader:
            loader.seek(seek)
            return list(islice(loader, 4)), loader.samples

    whole, samples = first_batches((0, 1))
    parts = [first_batches((part, num_parts)) for part in range(num_parts)]
    assert {position for _, position in parts} == {samples}
    for number, batch in enumerate(whole):
        of_batch = [batches[number] for batches, _ in parts]
        assert {(part.number, part.first_sample) for part in of_batch} == {(batch.number, batch.first_sample)}
        assert [sample for part in of_batch for sample in samples_of(part)] == samples_of(batch)
        sizes = [part.size for part in of_batch]
        assert max(sizes) - min(sizes) <= 1
        for part in of_batch:
            check_columns(part)


def test_parts_of_one_pass_end_with_the_smaller_last_batch(numbered):
    parts = []
    for part in range(3):
        with Loader(numbered([5, 9, 3]), batch_size=8, seed=0, part=(part, 3)) as loader:
            parts.append([samples_of(batch) for batch in loader.once()])
    assert [[len(samples) for samples in part] for part in parts] == [[2, 2, 0], [3, 3, 0], [3, 3, 1]]
    together = [sample for batches in zip(*parts, strict=True) for samples in batches for sample in samples]
    assert together == list(range(17))


def test_state_of_one_part_is_that_of_any_other(numbered):
    with (
        Loader(numbered([6] * 20), batch_size=11, seed=9, part=(0, 3)) as first,
        Loader(numbered([6] * 20), batch_size=11, seed=9, part=(2, 3)) as last,
        Loader(numbered([6] * 20), batch_size=11, seed=9) as whole,
    ):
        list(islice(first, 5))
        state = json.loads(json.dumps(first.state_dict()))
        last.load_state_dict(state)
        whole.load_state_dict(state)
        assert samples_of(next(whole))[7:] == samples_of(next(last))


@pytest.mark.parametrize("part", [(-1, 2), (2, 2), (0, 0)])
def test_a_part_that_is_not_there_is_refused(numbered, part):
    with pytest.raises(ConfigError, match="part"):
        Loader(numbered([3]), batch_size=2, seed=0, part=part)
