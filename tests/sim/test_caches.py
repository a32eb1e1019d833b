"""What a simulated cache misses is what a plain one misses."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest

from holdfast.data.synthetic import SyntheticConfig, SyntheticSource
from holdfast.data.zipf import ZipfLaw
from holdfast.errors import ConfigError
from holdfast_lab.sim import caches
from holdfast_lab.sim.caches import missed_rows_per_batch
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import Model, TableGroup, workload_of
from holdfast_lab.sim.system import Cache

TABLES = ((3000, 2), (800, 5), (5, 1))  # rows, lookups
BATCH_SIZE = 50
WARM_UP, COUNTED = 300, 800


def model(tables=TABLES, **options):
    groups = tuple(TableGroup(rows=rows, lookups=lookups, dim=8) for rows, lookups in tables)
    return Model(**{"batch_size": BATCH_SIZE, "tables": groups, "bottom": (8,), "top": (1,), **options})


def drawn_batches(count):
    """Of another seed than the simulation's; a row is a pair of table and rank."""
    rows, lookups = zip(*TABLES, strict=True)
    source = SyntheticSource(SyntheticConfig(num_samples=1, rows=rows, lookups=lookups, sample_seed=5))
    samples = source.draw(0, count * BATCH_SIZE)
    return [
        [
            (table, rank)
            for table, ranks in enumerate(samples.ranks)
            for rank in ranks[number * BATCH_SIZE : (number + 1) * BATCH_SIZE].ravel().tolist()
        ]
        for number in range(count)
    ]


def capacity_of(share):
    return round(share * sum(rows for rows, _ in TABLES))


@pytest.mark.parametrize("share", [0.1, 0.4])
def test_lru_misses_what_an_ordered_dictionary_misses(share):
    held, missed = OrderedDict(), []
    for batch in drawn_batches(WARM_UP + COUNTED):
        missed.append(len(set(batch) - held.keys()))
        for row in batch:
            held[row] = None
            held.move_to_end(row)
        while len(held) > capacity_of(share):
            held.popitem(last=False)
    plain = np.mean(missed[WARM_UP:])
    assert missed_rows_per_batch(Cache(policy="lru", share=share), model()) == pytest.approx(plain, rel=0.04)


def test_look_forward_fetches_what_a_plain_scratchpad_fetches_that_never_drops_a_row_of_its_window():
    share = 0.3
    batches = [list(dict.fromkeys(reversed(batch)))[::-1] for batch in drawn_batches(WARM_UP + COUNTED + 2)]
    held, fetched = OrderedDict(), []
    for number in range(len(batches) - 2):
        window = set().union(*batches[max(0, number - 3) : number + 3])
        fetched.append(len(set(batches[number]) - held.keys()))
        for row in [*(row for row in batches[number + 2] if row in held), *batches[number]]:
            held[row] = None
            held.move_to_end(row)
        for row in [row for row in held if row not in window][: max(0, len(held) - capacity_of(share))]:
            del held[row]
    plain = np.mean(fetched[WARM_UP:])
    assert missed_rows_per_batch(Cache(policy="look_forward", share=share), model()) == pytest.approx(plain, rel=0.04)


def test_static_misses_what_the_law_says():
    expected = 0.0
    rates = []
    for rows, lookups in TABLES:
        probability = ZipfLaw(num_ranks=rows, exponent=1.05).probability(np.arange(1, rows + 1))
        rates += [(lookups * BATCH_SIZE * p, 1 - (1 - p) ** (lookups * BATCH_SIZE)) for p in probability]
    expected = sum(there for _, there in sorted(rates, reverse=True)[capacity_of(0.1) :])
    assert missed_rows_per_batch(Cache(policy="static", share=0.1), model()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("policy", ["static", "lru", "look_forward"])
def test_one_row_in_many_and_one_table_of_many_miss_as_all_of_them_do(policy, monkeypatch):
    cache = Cache(policy=policy, share=0.2)
    tables = ((40_000, 4), (40_000, 4), (9000, 1))
    exact = missed_rows_per_batch(cache, model(tables, batch_size=200))
    caches._missed_rows.cache_clear()
    monkeypatch.setattr(caches, "_MOST_ROWS", 8000)
    alike = (TableGroup(count=2, rows=40_000, lookups=4, dim=8), TableGroup(rows=9000, lookups=1, dim=8))
    sampled = missed_rows_per_batch(cache, replace(model(tables, batch_size=200), tables=alike))
    caches._missed_rows.cache_clear()
    assert sampled == pytest.approx(exact, rel=0.04)


@pytest.mark.parametrize("policy", ["lru", "look_forward"])
def test_a_short_stream_finds_a_cache_that_has_been_in_use_for_long(policy, monkeypatch):
    cache = Cache(policy=policy, share=0.3)
    long = missed_rows_per_batch(cache, model())
    caches._missed_rows.cache_clear()
    monkeypatch.setattr(caches, "_MOST_BATCHES", 20)
    short = missed_rows_per_batch(cache, model())
    caches._missed_rows.cache_clear()
    assert short == pytest.approx(long, rel=0.1)


@pytest.mark.parametrize("policy", ["static", "lru"])
def test_a_cache_of_nothing_misses_every_row_of_a_batch(policy):
    missed = missed_rows_per_batch(Cache(policy=policy, share=0.0), model())
    assert missed == pytest.approx(workload_of(model()).unique_rows, rel=0.01)


@pytest.mark.parametrize("policy", ["static", "lru", "look_forward"])
def test_a_cache_of_everything_misses_nothing(policy):
    assert missed_rows_per_batch(Cache(policy=policy, share=1.0), model()) == 0.0


def test_looking_forward_saves_fetches_and_a_larger_cache_does_too():
    shares = (0.2, 0.5)
    lru = [missed_rows_per_batch(Cache(policy="lru", share=share), model()) for share in shares]
    forward = [missed_rows_per_batch(Cache(policy="look_forward", share=share), model()) for share in shares]
    assert lru[0] > lru[1]
    assert all(ours < theirs for ours, theirs in zip(forward, lru, strict=True))


def test_the_stream_is_that_of_the_made_up_data():
    rows, lookups = zip(*TABLES, strict=True)
    samples = SyntheticSource(SyntheticConfig(num_samples=1, rows=rows, lookups=lookups)).draw(0, 3 * BATCH_SIZE)
    sample = caches._Sample([caches._Tables(count=1, rows=r, draws=BATCH_SIZE * n) for r, n in TABLES], exponent=1.05)
    firsts = np.cumsum([0, *rows[:-1]])
    for number, batch in enumerate(sample.batches(3)):
        part = slice(number * BATCH_SIZE, (number + 1) * BATCH_SIZE)
        wanted = np.concatenate(
            [first + ranks[part].ravel() - 1 for first, ranks in zip(firsts, samples.ranks, strict=True)]
        )
        assert np.array_equal(np.sort(batch), np.unique(wanted))


def test_a_scratchpad_too_small_for_its_window_is_refused():
    with pytest.raises(ConfigError, match="rows of 6 batches"):
        missed_rows_per_batch(Cache(policy="look_forward", share=0.01), model())


def test_a_share_beyond_all_rows_is_refused():
    with pytest.raises(ConfigError, match=r"cache.share = 1\.5"):
        missed_rows_per_batch(Cache(policy="lru", share=1.5), model())


def library_of_quick_copies():
    """In which software is no bottleneck, so that links are by their bytes."""
    return read_library().changed({"devices.pcie.start_s": 100e-6, "devices.pcie.bandwidth_bytes_per_s": 25e9})


@pytest.mark.parametrize("name", ["rm1", "deeprecsys-rm1", "kaggle"])
def test_scratchpipe_takes_as_long_as_its_busiest_device_or_what_training_waits_for_and_lru_waits_for_its_misses(name):
    library = library_of_quick_copies()
    forward, lru = (library.run(system, name) for system in ("scratchpipe", "scratchpipe-lru"))
    loop_s = sum(forward.stage_s[stage] for stage in ("lookup", "interaction_top", "update"))
    assert forward.batch_s == pytest.approx(max(loop_s, *forward.busy_s.values()), rel=0.015)
    assert lru.batch_s >= forward.batch_s


def test_a_slower_link_costs_scratchpipe_nothing_until_it_is_the_busiest():
    library = library_of_quick_copies()
    before = library.run("scratchpipe", "rm1")
    spare = before.batch_s / before.busy_s["link"]
    link = library.device("pcie")
    times = [
        library.changed({"devices.pcie.bandwidth_bytes_per_s": link.bandwidth_bytes_per_s / slower}).run(
            "scratchpipe", "rm1"
        )
        for slower in (0.5 * spare, 4 * spare)
    ]
    assert times[0].batch_s == pytest.approx(before.batch_s, rel=0.01)
    assert times[1].batch_s == pytest.approx(times[1].busy_s["link"], rel=0.01) and times[1].batch_s > before.batch_s


def test_a_static_cache_of_all_rows_spares_the_host_its_rows():
    library = read_library()
    system = library.system("scratchpipe-static")
    everything = replace(system, cache=Cache(policy="static", share=1.0))
    run = library.run(everything, "rm1")
    host = library.device("host-cpu")
    assert [run.stage_s[name] for name in ("collect", "update_missed")] == pytest.approx([host.start_s] * 2)
