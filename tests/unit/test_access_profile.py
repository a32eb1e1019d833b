"""A pass over the ids counts what training asks for: exactly, or within a bound that it tells."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data import Loader, SyntheticConfig, SyntheticSource
from holdfast.data.block import FixedBags, SampleBlock
from holdfast.data.source import Feature
from holdfast.errors import ConfigError, IdError
from holdfast.train.options import TrainConfig
from holdfast_lab.placement.access_profile import (
    AccessProfile,
    ExactCounts,
    SketchedCounts,
    profile_accesses,
    read_profile,
    write_profile,
)
from holdfast_lab.placement.demand import expected_ladder

CONFIG = TrainConfig(batch_size=64, seed=5)
SYNTHETIC = SyntheticConfig(num_samples=1000, rows=(40, 3000, 1), lookups=(1, 7, 2), num_dense=1)


def packed_counts(counts):
    return (counts.hottest() >> np.uint64(24)).tolist()


def profile_of(source, num_batches=20, **options):
    return profile_accesses(source, CONFIG, num_batches=num_batches, **options)


def test_exact_counts_are_numpys_over_the_batches_that_training_sees():
    source = SyntheticSource(SYNTHETIC)
    profile = profile_of(source)
    with Loader(source, batch_size=CONFIG.batch_size, seed=CONFIG.seed) as loader:
        batches = [batch for batch, _ in zip(loader, range(20), strict=False)]
    for table, (found, rows) in enumerate(zip(profile.tables, SYNTHETIC.rows, strict=True)):
        ids = []
        for batch in batches:
            offsets = batch.features.offsets()
            size = batch.size
            ids.append(batch.features.values()[offsets[table * size] : offsets[(table + 1) * size]].numpy())
        counts = np.sort(np.bincount(np.concatenate(ids), minlength=rows))[::-1]
        assert (found.method, found.max_undercount_per_row) == ("exact", 0)
        assert found.accesses == counts.sum()
        assert found.unique_rows_per_batch * 20 == pytest.approx(sum(np.unique(part).size for part in ids))
        for rung in found.ladder:
            assert rung.access_share == pytest.approx(counts[: rung.rows].sum() / counts.sum())
        assert found.ladder[-1].rows == rows
        assert found.ladder[-1].unique_rows_per_batch == found.unique_rows_per_batch


def test_a_rung_counts_in_how_many_batches_its_rows_are_touched():
    counts = ExactCounts(4)
    counts.add(np.array([0, 2]), np.array([5, 1]))
    counts.add(np.array([2, 3]), np.array([3, 1]))
    packed = counts.hottest()
    assert (packed >> np.uint64(24)).tolist() == [5, 4, 1]
    assert (packed & np.uint64(2**24 - 1)).tolist() == [1, 2, 1]


@settings(max_examples=60)
@given(
    batches=st.lists(st.lists(st.integers(0, 30), max_size=20), min_size=1, max_size=20),
    num_counters=st.integers(1, 40),
)
def test_a_sketch_never_overstates_and_understates_by_no_more_than_its_bound(batches, num_counters):
    sketch = SketchedCounts(num_counters)
    truth = Counter()
    for batch in batches:
        rows, counts = np.unique(np.array(batch, np.int64), return_counts=True)
        sketch.add(rows, counts)
        truth.update(batch)
    found = packed_counts(sketch)
    assert len(found) <= num_counters
    assert sketch.max_undercount <= sum(truth.values()) / (num_counters + 1)
    exact = sorted(truth.values(), reverse=True)
    for held, true in zip(found, exact, strict=False):
        assert true - sketch.max_undercount <= held <= true
    assert all(count <= sketch.max_undercount for count in exact[len(found) :])


def test_a_sketch_that_has_a_counter_for_every_row_is_exact():
    rows = np.random.default_rng(0).zipf(1.3, 5000) % 200
    sketch, exact = SketchedCounts(200), ExactCounts(200)
    for part in np.split(rows, 10):
        sketch.add(*np.unique(part, return_counts=True))
        exact.add(*np.unique(part, return_counts=True))
    assert sketch.max_undercount == 0
    assert sketch.hottest().tolist() == exact.hottest().tolist()


def test_little_memory_makes_the_largest_table_a_sketch_whose_shares_are_within_the_bound():
    source = SyntheticSource(SyntheticConfig(num_samples=4000, rows=(40, 300_000), lookups=(1, 30), num_dense=1))
    exact = profile_of(source, 60).tables
    small, large = profile_of(source, 60, memory_bytes=1 << 16).tables
    assert small == exact[0]
    assert large.method == "sketch"
    assert 0 < large.max_undercount_per_row < large.accesses / 1000
    true_shares = {rung.rows: rung.access_share for rung in exact[1].ladder}
    for rung in large.ladder[:-1]:
        if rung.rows in true_shares:
            lost = rung.rows * large.max_undercount_per_row / large.accesses
            assert true_shares[rung.rows] - lost - 1e-9 <= rung.access_share <= true_shares[rung.rows] + 1e-9
    assert large.ladder[-1] == exact[1].ladder[-1]


def test_the_law_of_generated_data_predicts_what_a_profile_finds():
    config = SyntheticConfig(num_samples=40_000, rows=(100_000,), lookups=4, num_dense=1)
    found = profile_accesses(SyntheticSource(config), TrainConfig(batch_size=1000), num_batches=40).tables[0]
    expected = {rung.rows: rung for rung in expected_ladder(100_000, config.zipf_exponent, 4000)}
    for rung in found.ladder:
        if rung.rows in expected and rung.rows <= 1024:
            assert rung.access_share == pytest.approx(expected[rung.rows].access_share, rel=0.05)
            assert rung.unique_rows_per_batch == pytest.approx(expected[rung.rows].unique_rows_per_batch, rel=0.05)
    assert found.unique_rows_per_batch == pytest.approx(expected[100_000].unique_rows_per_batch, rel=0.03)


@pytest.mark.parametrize(("rows", "accesses"), [(1, 5.0), (7, 0.0), (1 << 16, 3.0), (10**12 + 3, 1e6)])
def test_uniform_accesses_touch_rows_in_proportion(rows, accesses):
    ladder = expected_ladder(rows, 0.0, accesses)
    assert ladder[-1].rows == rows
    for rung in ladder:
        assert rung.access_share == pytest.approx(rung.rows / rows)
    assert ladder[-1].unique_rows_per_batch == pytest.approx(min(accesses, rows * -np.expm1(-accesses / rows)), rel=0.5)


class OneBlock:
    """A source of one block with the ids it is given."""

    def __init__(self, ids):
        self._ids = np.array(ids, np.int64).reshape(-1, 1)
        self.features = (Feature(name="city", num_embeddings=10),)
        self.num_dense = 1
        self.num_samples = len(ids)
        self.block_sizes = np.array([len(ids)])
        self.sample_bytes = 16

    def read_block(self, index):
        labels = np.zeros(self.num_samples, np.float32)
        return SampleBlock(labels=labels, dense=labels.reshape(-1, 1), bags=(FixedBags(self._ids),))

    def fingerprint(self):
        return {"kind": "one block"}


@pytest.mark.parametrize("wrong", [-1, 10])
def test_an_id_outside_of_its_table_is_named(wrong):
    with pytest.raises(IdError, match=f"'city'.*id {wrong} lies outside of \\[0, 10\\)"):
        profile_of(OneBlock([1, 2, wrong, 3]), 1)


def test_more_batches_than_can_be_counted_are_refused_before_anything_is_read():
    with pytest.raises(ConfigError, match="--steps"):
        profile_of(OneBlock([1]), 1 << 24)


def test_a_profile_reads_back_as_it_was_written(tmp_path: Path):
    profile = profile_of(SyntheticSource(SYNTHETIC))
    path = tmp_path / "profile.json"
    write_profile(profile, path, overwrite=False)
    assert read_profile(path) == profile
    assert isinstance(profile, AccessProfile)
    with pytest.raises(ConfigError, match="is there already"):
        write_profile(profile, path, overwrite=False)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"version": 2', '"version": 1', r"version: it is 1, and this build reads version 2"),
        ('"version": 2,', "", r"version: it is missing"),
        ('"batch_size": 64', '"batch_size": 0', r"batch_size = 0; it must be at least 1"),
        ('"batch_size": 64', '"batch_size": "64"', r"batch_size: found .* expected an integer"),
        ('"batches"', '"batchs"', r"batchs: unknown key; did you mean batches\?"),
        ('"access_share": 1.0', '"access_share": 1.5', r"tables\[0\].ladder\[\d+\]: access_share = 1.5"),
        ('"access_share": 1.0', '"access_share": NaN', r"not JSON: NaN"),
        ('"touches"', '"touch"', r"touch: unknown key; did you mean touches\?"),
        ('"batches": 0,', '"batches": -1,', r"tables\[0\].reuse\[0\]: batches = -1"),
        ('"num_embeddings": 40', '"num_embeddings": 41', r"tables\[0\]: ladder: its last rung must hold all 41 rows"),
        ('"method": "exact"', '"method": "guess"', r'tables\[0\].method: found "guess"'),
        ('"name": "C1"', '"name": "C1", "name": "C2"', r"not JSON: a key is there twice"),
        ("{", "", r"not JSON"),
    ],
)
def test_a_profile_is_read_strictly(tmp_path: Path, old: str, new: str, named: str):
    path = tmp_path / "profile.json"
    write_profile(profile_of(SyntheticSource(SYNTHETIC)), path, overwrite=False)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=named) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_no_object_is_named(tmp_path: Path):
    path = tmp_path / "profile.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_profile(path)
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="expected an object"):
        read_profile(path)
