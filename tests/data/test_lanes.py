"""Lanes: batches do not depend on how many trainers there are, though each decodes its share of the blocks."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.criteo import CriteoTsvConfig, CriteoTsvSource
from holdfast.data.cut import StreamCut
from holdfast.data.groups import survey
from holdfast.data.lanes import Lanes
from holdfast.data.loader import Loader
from holdfast.data.parquet import ParquetSource
from holdfast.data.shuffle import SampleOrder
from holdfast.data.synthetic import SyntheticSource, uniform_shape
from holdfast.data.write import write_synthetic, written_config
from holdfast.errors import ConfigError

sizes = st.lists(st.integers(1, 12) | st.integers(30, 90), min_size=1, max_size=14)
seeds = st.integers(0, 2**63 - 1)


def samples_of(batch):
    return batch.dense[:, 0].to(int).tolist()


def flat(lists):
    return list(chain.from_iterable(lists))


def stream_of(order, begin, end):
    """Sample numbers at the stream's positions, one by one, straight from what an order says of its groups."""
    block_begins = np.cumsum(order.block_sizes) - order.block_sizes
    found = {}
    for lane in range(order.lanes.num_lanes):
        if order.lanes.position(lane, order.lanes.batch_size) == 0:
            continue  # more lanes than a batch has samples
        for span in order.groups_from(order.lanes.position(lane, begin), lane):
            lined_up = np.concatenate([block_begins[p.block] + np.arange(p.begin, p.end) for p in span.pieces])
            permutation = order.permutation(span)
            samples = lined_up if permutation is None else lined_up[permutation]
            found.update(zip(order.positions(span).tolist(), samples.tolist(), strict=True))
            if order.positions(span)[-1] >= end:
                break
    return [found[position] for position in range(begin, end)]


@given(
    num_lanes=st.integers(1, 12), batch_size=st.integers(1, 40), begin=st.integers(0, 200), length=st.integers(0, 90)
)
def test_every_position_is_in_one_lane_and_lanes_count_their_own(num_lanes, batch_size, begin, length):
    lanes = Lanes(num_lanes, batch_size)
    counts = Counter()
    lane_of = {}
    for position in range(begin + length):
        offset = position % batch_size
        lane = next(
            lane
            for lane in range(num_lanes)
            if lane * batch_size // num_lanes <= offset < (lane + 1) * batch_size // num_lanes
        )
        assert lanes.position(lane, position) == counts[lane]
        assert lanes.stream_positions(lane, counts[lane], counts[lane] + 1).tolist() == [position]
        lane_of[position] = (lane, counts[lane])
        counts[lane] += 1
    flat = [(run.lane, at) for run in lanes.runs(begin, begin + length) for at in range(run.begin, run.end)]
    assert flat == [lane_of[position] for position in range(begin, begin + length)]
    reached = {}
    for lane, at in flat:
        reached[lane] = at + 1
    assert lanes.ends(begin, begin + length) == reached


@given(
    sizes=sizes,
    seed=seeds,
    window=st.integers(1, 60),
    num_lanes=st.integers(1, 9),
    batch_size=st.integers(1, 50),
    epoch=st.integers(0, 3),
)
def test_every_epoch_holds_every_sample_once(sizes, seed, window, num_lanes, batch_size, epoch):
    order = SampleOrder(np.array(sizes), seed=seed, window_samples=window, lanes=Lanes(num_lanes, batch_size))
    samples = stream_of(order, epoch * sum(sizes), (epoch + 1) * sum(sizes))
    assert sorted(samples) == list(range(sum(sizes)))


def test_laned_order_is_pinned():
    # a run's cursor means a position in this order: it may never change
    order = SampleOrder(np.array([3, 4, 2, 3, 8]), seed=7, window_samples=6, lanes=Lanes(3, 7))
    assert stream_of(order, 0, 20) == [12, 17, 3, 5, 11, 9, 10, 15, 13, 4, 6, 7, 8, 2, 16, 14, 18, 19, 1, 0]
    assert stream_of(order, 20, 40) == [16, 11, 10, 14, 12, 18, 15, 17, 9, 5, 13, 8, 19, 0, 1, 4, 3, 7, 6, 2]


@settings(max_examples=60)
@given(
    sizes=sizes,
    seed=seeds,
    window=st.integers(1, 60),
    num_lanes=st.integers(1, 9),
    batch_size=st.integers(1, 50),
    later_batch_size=st.integers(1, 50),
    parts=st.integers(1, 6),
    seek=st.integers(0, 300),
    workers=st.integers(1, 3),
)
def test_the_parts_of_a_batch_are_the_stream_from_anywhere_with_any_number_of_trainers_and_any_batch_size(
    numbered, sizes, seed, window, num_lanes, batch_size, later_batch_size, parts, seek, workers
):
    def options(size, part):
        return {
            "batch_size": size,
            "seed": seed,
            "shuffle_window_samples": window,
            "lanes": num_lanes,
            "part": part,
            "workers": workers,
        }

    order = SampleOrder(np.array(sizes), seed=seed, window_samples=window, lanes=Lanes(num_lanes, batch_size))
    stream = stream_of(order, seek, seek + 3 * later_batch_size)
    first = Loader(numbered(sizes), **options(batch_size, (0, 1)))
    first.seek(seek)
    state = json.loads(json.dumps(first.state_dict()))
    of_parts = []
    for part in range(parts):
        with Loader(numbered(sizes), **options(later_batch_size, (part, parts))) as loader:
            loader.load_state_dict(state)
            of_parts.append([samples_of(batch) for batch in islice(loader, 3)])
            assert loader.samples == seek + 3 * later_batch_size
            assert loader.state_dict() == {**state, "samples": loader.samples}
    together = [sample for batches in zip(*of_parts, strict=True) for part in batches for sample in part]
    assert together == stream


@pytest.mark.parametrize(("parts", "num_lanes"), [(3, 8), (5, 7), (2, 8), (4, 1)])
@pytest.mark.parametrize("giant", [0, 40, 79])
def test_blocks_of_any_sizes(numbered, parts, num_lanes, giant):
    sizes = [1] * 80
    sizes[giant] = 700

    def batches(part):
        source = numbered(sizes)
        with Loader(
            source, batch_size=50, seed=3, shuffle_window_samples=64, lanes=num_lanes, part=part, workers=2
        ) as loader:
            return [samples_of(batch) for batch in islice(loader, 32)]

    whole = batches((0, 1))
    of_parts = [batches((part, parts)) for part in range(parts)]
    assert [flat(of_batch) for of_batch in zip(*of_parts, strict=True)] == whole
    assert sorted(flat(whole)[: sum(sizes)]) == list(range(sum(sizes)))


def blocks_in_epoch(order, cut, epoch):
    """How many blocks a reader decodes of an epoch at most: those of every lane, though it needs some for two lanes."""
    begin, end = epoch * order.num_samples, (epoch + 1) * order.num_samples
    count = 0
    for lane in order.lanes.ends(*cut.part_of(0, cut.batch_size)):
        for span in order.groups_from(order.lanes.position(lane, begin), lane):
            if span.epoch > epoch:
                break
            if span.epoch == epoch:
                count += len(survey(order, span, cut).pieces)
    assert end > begin
    return count


@settings(max_examples=60)
@given(
    num_blocks=st.integers(1, 60),
    block_size=st.integers(1, 40),
    seed=seeds,
    window=st.integers(1, 400),
    parts=st.integers(1, 5),
    lanes_of_part=st.integers(1, 4),
    batch_of_lane=st.integers(1, 6),
    more=st.integers(0, 3),
)
def test_where_the_parts_divide_the_lanes_a_part_decodes_its_share_of_an_epoch_and_a_block_for_each_end(
    num_blocks, block_size, seed, window, parts, lanes_of_part, batch_of_lane, more
):
    num_lanes = parts * lanes_of_part
    batch_size = num_lanes * batch_of_lane + more  # so that lanes may differ by a sample a batch
    order = SampleOrder(
        np.full(num_blocks, block_size), seed=seed, window_samples=window, lanes=Lanes(num_lanes, batch_size)
    )
    for part in range(parts):
        cut = StreamCut(start=0, end=None, batch_size=batch_size, part=part, of=parts)
        first, last = cut.part_of(0, batch_size)
        for epoch in range(3):
            begin, end = epoch * order.num_samples, (epoch + 1) * order.num_samples
            samples = sum(
                order.lanes.position(lane, end) - order.lanes.position(lane, begin)
                for lane in order.lanes.ends(first, last)
            )
            assert abs(samples - order.num_samples * (last - first) / batch_size) <= batch_size
            assert blocks_in_epoch(order, cut, epoch) <= samples / block_size + 2 * lanes_of_part


def test_a_part_reads_its_share_of_the_blocks(numbered):
    def blocks_read(part, lanes):
        source = numbered([64] * 200)
        with Loader(source, batch_size=128, seed=1, shuffle_window_samples=1024, lanes=lanes, part=part) as loader:
            list(islice(loader, 3 * 100))
        return source.num_blocks_read

    alone = blocks_read((0, 1), 1)
    assert alone >= 590
    assert blocks_read((1, 2), 1) >= 590  # all, too, and what is read ahead
    assert blocks_read((0, 1), 8) <= 1.1 * alone
    for part in range(2):
        assert blocks_read((part, 2), 8) <= 0.56 * alone
    for part in range(8):
        assert blocks_read((part, 8), 8) <= 0.17 * alone
    for part in range(3):
        assert blocks_read((part, 3), 8) <= 0.57 * alone  # four lanes of eight, of two of them a part


def test_a_block_that_neighbouring_lanes_begin_with_is_read_once(numbered):
    source = numbered([1000, 1, 1])
    with Loader(source, batch_size=8, seed=1, shuffle_window_samples=80, lanes=8) as loader:
        list(islice(loader, 20))
        assert source.num_blocks_read <= 6  # eight lanes have samples of the first one


def test_a_part_that_is_empty_reads_nothing(numbered):
    source = numbered([5, 9, 4])
    with Loader(source, batch_size=1, seed=0, part=(0, 2), lanes=4) as loader:
        assert [batch.size for batch in islice(loader, 5)] == [0] * 5
    assert source.num_blocks_read == 0


def test_in_one_lane_a_part_does_not_read_tiny_blocks_that_others_have_all_of(numbered):
    source = numbered([1] * 400)
    with Loader(source, batch_size=40, seed=2, shuffle_window_samples=400, part=(1, 4)) as loader:
        list(islice(loader, 5))
    assert source.num_blocks_read <= 2 * 100


def test_one_pass_in_file_order_reads_the_blocks_of_the_part(numbered):
    source = numbered([5] * 40)
    with Loader(source, batch_size=100, seed=2, lanes=4, part=(1, 2)) as loader:
        assert [samples_of(batch) for batch in loader.once()] == [list(range(50, 100)), list(range(150, 200))]
    assert source.num_blocks_read == 20


def test_without_shuffle_there_are_no_lanes(numbered):
    with Loader(numbered([5] * 40), batch_size=20, seed=2, shuffle=False, lanes=4) as loader:
        assert samples_of(next(loader)) == list(range(20))
        state = loader.state_dict()
    Loader(numbered([5] * 40), batch_size=20, seed=2, shuffle=False).load_state_dict(state)


def test_one_lane_leaves_no_trace_in_a_state_and_other_lanes_are_refused(numbered):
    one = Loader(numbered([6] * 20), batch_size=4, seed=9)
    eight = Loader(numbered([6] * 20), batch_size=4, seed=9, lanes=8)
    assert set(one.state_dict()) == {"samples", "shuffle_window_samples", "seed", "source.kind", "source.sizes"}
    assert set(eight.state_dict()) - set(one.state_dict()) == {"lanes", "lane_batch_size"}
    with pytest.raises(ConfigError, match="lanes: it was saved with 1, but this loader has 8"):
        eight.load_state_dict(one.state_dict())
    with pytest.raises(ConfigError, match="lanes: it was saved with 8, but this loader has 1"):
        one.load_state_dict(eight.state_dict())
    with pytest.raises(ConfigError, match="lane_batch_size: must be a count, not 0"):
        eight.load_state_dict({**eight.state_dict(), "lane_batch_size": 0})
    with pytest.raises(ConfigError, match="loader lanes"):
        Loader(numbered([6]), batch_size=4, seed=9, lanes=0)


def test_a_bad_block_fails_the_part_that_needs_it_and_the_others_give_their_batches(numbered):
    sizes = [50] * 16
    order = SampleOrder(np.array(sizes), seed=5, window_samples=100, lanes=Lanes(2, 40))
    bad = next(order.groups_from(250, 1))
    ends = []
    for part in range(2):
        source = numbered(sizes, bad_blocks=[bad.pieces[0].block])
        with Loader(
            source, batch_size=40, seed=5, shuffle_window_samples=100, lanes=2, part=(part, 2), workers=2
        ) as loader:
            with pytest.raises(FileNotFoundError) if part == 1 else nullcontext():
                list(islice(loader, 20))
            ends.append(loader.samples)
    # part 1 has 20 positions of each batch: its batches up to the one that reaches the bad block's group come
    assert ends == [800, bad.start // 20 * 40]


def test_of_several_bad_blocks_of_a_group_the_first_is_told_whoever_came_first(numbered):
    order = SampleOrder(np.full(12, 50), seed=5, window_samples=1200, lanes=Lanes(2, 40))
    blocks = [piece.block for piece in next(order.groups_from(0, 0)).pieces]
    for _ in range(10):
        source = numbered([50] * 12, bad_blocks=blocks[2:5])
        with (
            Loader(source, batch_size=40, seed=5, shuffle_window_samples=1200, lanes=2, workers=4) as loader,
            pytest.raises(FileNotFoundError, match=f"block {blocks[2]}$"),
        ):
            next(loader)


def parquet_source(tmp_path):
    config = uniform_shape(num_samples=3000, num_tables=3, rows_per_table=100, lookups_per_bag=2)
    write_synthetic(config, tmp_path / "data.parquet", row_group_samples=100)
    return ParquetSource(written_config(config, [tmp_path / "data.parquet"]))


def text_source(tmp_path):
    config = uniform_shape(num_samples=900, num_tables=26, rows_per_table=100)
    write_synthetic(config, tmp_path / "data.tsv")
    return CriteoTsvSource(CriteoTsvConfig(paths=[tmp_path / "data.tsv"], num_embeddings=100, block_lines=50))


def synthetic_source(tmp_path):
    return SyntheticSource(uniform_shape(num_samples=40_000, num_tables=3, rows_per_table=100))


def bags_of(batch):
    """By feature, every sample's ids."""
    bags = batch.features.values().split(batch.features.lengths().tolist())
    ids = [bag.tolist() for bag in bags]
    return [ids[begin : begin + batch.size] for begin in range(0, len(ids), batch.size)]


@pytest.mark.parametrize("make", [parquet_source, text_source, synthetic_source])
def test_parts_of_every_source_are_the_batches_of_one_trainer(make, tmp_path):
    source = make(tmp_path)

    def batches(part, begin, lanes=8):
        with Loader(source, batch_size=60, seed=1, shuffle_window_samples=500, lanes=lanes, part=part) as loader:
            loader.seek(begin)
            return list(islice(loader, 6))

    for parts, begin in ((2, 0), (3, 77)):
        of_parts = [batches((part, parts), begin) for part in range(parts)]
        for whole, *some in zip(batches((0, 1), begin), *of_parts, strict=True):
            assert whole.labels.tolist() == flat(part.labels.tolist() for part in some)
            assert whole.dense.tolist() == flat(part.dense.tolist() for part in some)
            assert bags_of(whole) == [flat(of_feature) for of_feature in zip(*map(bags_of, some), strict=True)]
