"""Generated samples: the law of the ids, the planted model, and sample i as a pure function of (config, i)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.data.counter import random_bits, stream_key, uniforms
from holdfast.data.loader import Loader
from holdfast.data.planted import expected_auc
from holdfast.data.scatter import Scatter
from holdfast.data.synthetic import SyntheticConfig, SyntheticSource, bayes_auc, criteo_shape, uniform_shape
from holdfast.data.zipf import ZipfLaw
from holdfast.errors import ConfigError


def auc(labels, scores):
    ranks = np.argsort(np.argsort(scores)) + 1
    num_clicks = labels.sum()
    return (ranks[labels].sum() - num_clicks * (num_clicks + 1) / 2) / (num_clicks * (~labels).sum())


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_scatter_is_a_permutation(size, key):
    rows = Scatter(size=size, key=key)(np.arange(size))
    assert sorted(rows.tolist()) == list(range(size))


def test_scatter_reaches_large_tables_and_parts_neighbours():
    rows = Scatter(size=10**12 + 7, key=3)(np.arange(100_000))
    assert len(set(rows.tolist())) == 100_000
    assert 0 <= rows.min() < rows.max() < 10**12 + 7
    assert (np.abs(np.diff(rows)) < 1000).sum() == 0


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0, 8.0])
@pytest.mark.parametrize("num_ranks", [1, 2, 100, 256, 257, 1_000_000])
def test_ranks_follow_zipfs_law(num_ranks, exponent):
    num_draws = 400_000
    law = ZipfLaw(num_ranks=num_ranks, exponent=exponent)
    ranks = law.ranks(uniforms(stream_key(1), 0, num_draws))
    assert ranks.min() >= 1
    assert ranks.max() <= num_ranks
    masses = np.arange(1, num_ranks + 1, dtype=np.float64) ** -exponent
    masses /= masses.sum()
    assert np.allclose(law.probability(np.arange(1, num_ranks + 1)), masses, rtol=1e-4)
    # every rank up to 300 alone, then ever wider ranges
    edges = np.unique(np.concatenate([np.arange(1, 301), np.geomspace(301, 1e7, 60).astype(int)]))
    edges = np.append(edges[edges <= num_ranks], num_ranks + 1)
    cumulative = np.concatenate([[0.0], np.cumsum(masses)])
    expected = num_draws * np.diff(cumulative[edges - 1])
    found = np.histogram(ranks, bins=edges)[0]
    is_frequent = expected > 20
    chi_square = (np.square(found - expected)[is_frequent] / expected[is_frequent]).sum()
    num_free = max(1, is_frequent.sum() - 1)
    # mean num_free, variance 2 num_free: five standard deviations
    assert chi_square < num_free + 5 * np.sqrt(2 * num_free) + 1


@given(st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=1), st.sampled_from([1, 3, 256, 300, 10**9]))
def test_ranks_rise_with_the_number_and_stay_in_range(numbers, num_ranks):
    ranks = ZipfLaw(num_ranks=num_ranks, exponent=1.05).ranks(np.sort(np.array(numbers)))
    assert (np.diff(ranks) >= 0).all()
    assert ranks[0] >= 1
    assert ranks[-1] <= num_ranks


def test_the_largest_uniform_gives_a_rank_in_the_table():
    largest = np.array([1.0 - 2.0**-53])
    for exponent in (0.0, 1.0, 1.05, 8.0):
        for num_ranks in (1, 2, 256, 257, 10**6, 2**60):
            assert 1 <= ZipfLaw(num_ranks=num_ranks, exponent=exponent).ranks(largest)[0] <= num_ranks


def test_random_bits_are_addressed_by_counter():
    key = stream_key(7, 1, 2)
    whole = random_bits(key, 0, 1000)
    assert np.array_equal(whole[300:500], random_bits(key, 300, 200))
    assert np.array_equal(random_bits(key, 2**63, 3)[1:], random_bits(key, 2**63 + 1, 2))
    assert stream_key(7, 1, 2) != stream_key(7, 2, 1)


def config_of(**more):
    return uniform_shape(num_samples=3000, num_tables=4, rows_per_table=500, **more)


def same_samples(left, right):
    return (
        all(np.array_equal(ours, theirs) for ours, theirs in zip(left.ids, right.ids, strict=True))
        and np.array_equal(left.counts, right.counts)
        and np.array_equal(left.labels, right.labels)
        and np.array_equal(left.probabilities, right.probabilities)
    )


@pytest.mark.parametrize("lookups", [1, 5, (1, 2, 3, 4)])
def test_sample_is_a_function_of_its_index_alone(lookups):
    config = replace(config_of(), lookups=lookups)
    source = SyntheticSource(config)
    later = SyntheticSource(replace(config, first_sample=700))
    assert same_samples(source.draw(700, 100), later.draw(0, 100))
    singles = [source.draw(700 + index, 1) for index in range(100)]
    assert np.array_equal(np.concatenate([single.ids[3] for single in singles]), source.draw(700, 100).ids[3])
    assert not same_samples(source.draw(0, 100), SyntheticSource(replace(config, sample_seed=1)).draw(0, 100))


def test_first_samples_are_pinned():
    # benchmarks and kept runs name their data by its config alone
    drawn = SyntheticSource(config_of(lookups_per_bag=2)).draw(0, 4)
    assert drawn.ids[2].tolist() == [[380, 204], [259, 410], [344, 159], [210, 338]]
    assert drawn.counts[:2, :5].tolist() == [[1, 0, 1, 13, 259], [2, 0, 2, 0, 5]]
    assert drawn.labels.tolist() == [False, False, False, False]


def test_blocks_and_loader_give_what_is_drawn():
    source = SyntheticSource(config_of(lookups_per_bag=3))
    drawn = source.draw(0, 3000)
    with Loader(source, batch_size=1000, seed=0, shuffle=False) as loader:
        for batch in loader.once():
            rows = slice(batch.first_sample, batch.first_sample + 1000)
            assert np.array_equal(batch.labels.numpy(), drawn.labels[rows].astype(np.float32))
            expected = np.concatenate([ids[rows].ravel() for ids in drawn.ids])
            assert np.array_equal(batch.features.values().numpy(), expected)
            assert np.array_equal(batch.features.offsets().numpy(), np.arange(0, 4 * 1000 * 3 + 1, 3))
            expected = np.log1p(drawn.counts[rows].astype(np.float64)).astype(np.float32)
            assert np.array_equal(batch.dense.numpy(), expected)


def test_ids_follow_the_law_and_hot_rows_are_apart():
    source = SyntheticSource(uniform_shape(num_samples=200_000, num_tables=2, rows_per_table=100_000))
    drawn = source.draw(0, 200_000)
    for ids in drawn.ids:
        counts = np.bincount(ids[:, 0], minlength=100_000)
        hottest = np.argsort(counts)[::-1][:20]
        expected = 200_000 * ZipfLaw(num_ranks=100_000, exponent=1.05).probability(np.arange(1, 21))
        assert np.allclose(counts[hottest], expected, rtol=0.1)
        assert np.abs(np.subtract.outer(hottest, hottest))[~np.eye(20, dtype=bool)].min() > 1
    assert np.bincount(drawn.ids[0][:, 0]).argmax() != np.bincount(drawn.ids[1][:, 0]).argmax()


@pytest.mark.parametrize(
    "config",
    [
        criteo_shape(num_samples=1, scale=0.1),
        criteo_shape(num_samples=1, scale=1e-4, model_seed=5),
        uniform_shape(num_samples=1, num_tables=8, rows_per_table=100_000, lookups_per_bag=10, model_seed=2),
        uniform_shape(num_samples=1, num_tables=3, rows_per_table=1000, num_dense=0),
    ],
    ids=["criteo", "criteo-small", "multi-hot", "no-dense"],
)
def test_planted_auc_is_as_claimed(config):
    best = bayes_auc(config, num_samples=40_000)
    assert 0.80 < best < 0.86
    drawn = SyntheticSource(config).draw(10**9, 40_000)
    # the labels bear it out, and the click rate is the asked one
    assert abs(auc(drawn.labels, drawn.probabilities) - best) < 0.012
    assert abs(drawn.labels.mean() - config.click_rate) < 0.02


def test_stronger_signal_is_easier_and_none_is_chance():
    config = config_of()
    aucs = [bayes_auc(replace(config, signal=signal), num_samples=10_000) for signal in (0.0, 0.5, 1.65, 4.0)]
    assert abs(aucs[0] - 0.5) < 1e-6
    assert aucs == sorted(aucs)


def test_validation_data_shares_the_planted_model():
    """Hot ids' click rates, learned on one seed's samples, rank another seed's."""
    config = uniform_shape(num_samples=60_000, num_tables=6, rows_per_table=200, num_dense=0)
    train, valid = SyntheticSource(config), SyntheticSource(replace(config, sample_seed=1))
    learned, seen = train.draw(0, 60_000), valid.draw(0, 20_000)
    scores = np.zeros(20_000)
    for ids, valid_ids in zip(learned.ids, seen.ids, strict=True):
        clicks = np.bincount(ids[:, 0], learned.labels, minlength=200) + 2.5
        shown = np.bincount(ids[:, 0], minlength=200) + 10
        scores += np.log(clicks / (shown - clicks))[valid_ids[:, 0]]
    assert auc(seen.labels, scores) > 0.7


def test_with_drift_items_come_and_go_and_the_youngest_are_the_most_popular():
    config = SyntheticConfig(num_samples=10, rows=(1000, 50), num_dense=2, drift=0.25)
    early, late = (SyntheticSource(config).draw(begin, 4000) for begin in (0, 100_000))
    assert not set(early.ids[0].ravel()) & set(late.ids[0].ravel()), "25,000 items later all are others"
    assert (np.unique(early.ids[0]) < 0).any(), "keys are of all 64 bits"
    last_seen = {key: i for i, key in enumerate(early.ids[1][:, 0].tolist())}
    first_seen = {key: i for i, key in reversed(list(enumerate(early.ids[1][:, 0].tolist())))}
    assert max(last_seen[key] - first_seen[key] for key in last_seen) <= 50 / 0.25, "an item lives for 50 births"
    assert len(last_seen) > 900, "a thousand are born"
    ages = (np.arange(4000) * 0.25).astype(int) + 1000 - early.ranks[0][:, 0]  # an item's number
    assert len(set(zip(ages.tolist(), early.ids[0][:, 0].tolist(), strict=True))) == len(set(ages.tolist()))


def test_drift_is_no_part_of_data_that_do_not_drift():
    config = SyntheticConfig(num_samples=10, rows=(5,))
    assert SyntheticSource(config).fingerprint() == SyntheticSource(replace(config, drift=0.0)).fingerprint()
    assert SyntheticSource(config).fingerprint() != SyntheticSource(replace(config, drift=0.5)).fingerprint()
    assert [feature.keys for feature in SyntheticSource(replace(config, drift=0.5)).features] == [True]


def test_expected_auc_of_certain_and_of_equal_probabilities():
    assert expected_auc(np.array([0.0, 0.0, 1.0, 1.0])) == 1.0
    assert abs(expected_auc(np.full(5000, 0.3)) - 0.5) < 1e-9


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_samples", 0),
        ("rows", ()),
        ("rows", (5, 0)),
        ("lookups", 0),
        ("lookups", (1, 2, 3)),
        ("num_dense", -1),
        ("zipf_exponent", -0.5),
        ("signal", -1.0),
        ("click_rate", 1.0),
        ("sample_seed", -1),
        ("first_sample", 2**63),
    ],
)
def test_bad_config_names_the_field(field, value):
    with pytest.raises(ConfigError, match=field):
        SyntheticConfig(**{"num_samples": 5, "rows": (3, 4), field: value})


def test_fingerprint_is_of_the_config():
    prints = {
        SyntheticSource(config).fingerprint()["config"]
        for config in (config_of(), config_of(model_seed=1), config_of(sample_seed=1), replace(config_of(), signal=2))
    }
    assert len(prints) == 4
    same = SyntheticConfig(num_samples=3000, rows=[500] * 4, zipf_exponent=1.05)  # type: ignore[arg-type]
    assert SyntheticSource(same).fingerprint() == SyntheticSource(config_of()).fingerprint()
