"""The scale-out cost model: its bytes are those that arithmetic.py counts in batches; its times go the right way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast import _core
from holdfast.group.layout import assign, measure_load
from holdfast.group.manifest import Manifest, TableEntry
from peers.batches import make_batches
from peers.shapes import Shape
from scaleout.arithmetic import least_bytes
from scaleout.batches import PreparedSource
from scaleout.model import (
    Cluster,
    Costs,
    Medium,
    Ranks,
    Workload,
    enough_shards,
    expected_maximum,
    least_total,
    memory,
    owner_shares,
    rendezvous_s,
    skew,
    step,
    traffic,
    unique_rows,
    useful_part,
)
from scaleout.scaling import KAGGLE, RM1, scheme_of, write

COSTS = Costs(
    plan_s=10e-9, owner_s=40e-9, flop_s=1 / 180e9, float_s=20e-9, fixed_s=1e-3, byte_s=0.2e-9, message_s=50e-6
)
DRAM = Medium(name="DRAM", read_bytes_per_s=100e9, write_bytes_per_s=80e9, sync_s=0.0)
DISK = Medium(name="disk", read_bytes_per_s=2e9, write_bytes_per_s=2e9, sync_s=5e-3, is_block=True)
CLUSTER = Cluster(bytes_per_s=11e9, latency_s=20e-6, message_s=10e-6, medium=DRAM)


def random_case(seed: int) -> tuple[Shape, Workload, Ranks]:
    random = np.random.default_rng(seed)
    size = int(random.integers(2, 9))
    shape = Shape(
        name="random",
        num_tables=int(random.integers(2, 9)),
        num_embeddings=int(random.integers(20_000, 60_000)),
        embedding_dim=int(random.choice([8, 16, 32])),
        lookups_per_bag=int(random.choice([1, 2, 5, 12])),
        batch_size=int(random.integers(500, 900)),
        num_dense=4,
        bottom=(4,),
        top=(1,),
    )
    workload = Workload(
        name="random",
        tables=shape.num_tables,
        rows=shape.num_embeddings,
        dim=shape.embedding_dim,
        lookups=shape.lookups_per_bag,
        batch=shape.batch_size,
        dense_parameters=1000,
    )
    memory_ranks = int(random.integers(0, size))
    return shape, workload, Ranks(world_size=size, memory_ranks=memory_ranks, split=bool(random.integers(2)))


def manifest_of(shape: Shape, ranks: Ranks, source: PreparedSource) -> Manifest:
    """As a new pool would have it, load measured and all."""
    rows = [shape.num_embeddings] * shape.num_tables
    layout = ranks.layout(shape.num_tables)
    load = measure_load(
        source,
        range(len(rows)),
        rows,
        layout,
        num_shards=ranks.num_shards,
        batch_size=shape.batch_size,
        seed=1,
        shuffle=False,
    )
    spec = _core.TableSpec(
        name="t", num_embeddings=rows[0], embedding_dim=shape.embedding_dim, dtype=0, optimizer=0, pooling=0,
        init_low=0.0, init_high=0.0, first_shard=0, table_shards=1,
    )  # fmt: skip
    entries = [
        replace(TableEntry.of(spec), name=f"f{number}", first_shard=of.first_shard, table_shards=of.num_shards)
        for number, of in enumerate(layout)
    ]
    return Manifest(
        uuid="00" * 16,
        seed=1,
        store="in_place",
        log_bytes=1 << 20,
        row_checksums=False,
        tables=tuple(entries),
        generation=1,
        owner_of=tuple(assign(load, len(ranks.roles.owners))),
        load=tuple(load),
    )


@pytest.mark.parametrize("seed", range(10))
def test_the_models_least_bytes_are_those_counted_in_batches(seed: int) -> None:
    print("seed", seed)
    shape, workload, ranks = random_case(seed)
    batches = make_batches(shape, 8, seed=seed)
    manifest = manifest_of(shape, ranks, PreparedSource(shape, batches))
    counted = least_bytes(shape, batches, manifest, ranks.roles, 4 * workload.dense_parameters)
    # Shards as that pool dealt them out: owners of equal load may be told apart by what the batches happen to hold.
    shares = owner_shares(workload, ranks, owner_of=manifest.owner_of)
    predicted = least_total(workload, ranks, shares)
    for what in ("ids", "vectors", "gradients", "dense"):
        assert predicted[what] == pytest.approx(getattr(counted, what), rel=0.01), what


@pytest.mark.parametrize("seed", range(10))
def test_what_is_sent_is_the_least_and_lengths_and_counts(seed: int) -> None:
    print("seed", seed)
    _, workload, ranks = random_case(seed)
    shares = owner_shares(workload, ranks)
    moved, least = traffic(workload, ranks, shares), least_total(workload, ranks, shares)
    trainers = len(ranks.roles.trainers)
    assert moved.total("vectors") == pytest.approx(least["vectors"])
    assert moved.total("gradients") == pytest.approx(least["gradients"])
    assert moved.total("dense gradients") == pytest.approx(least["dense"] + 16 * (trainers - 1))
    pairs = sum(trainer != owner for trainer in ranks.roles.trainers for owner in ranks.roles.owners)
    assert moved.total("counts") == 40 * ranks.world_size * (ranks.world_size - 1) + 16 * workload.tables * pairs
    lengths = moved.total("ids") - least["ids"]
    if workload.lookups == 1:
        assert lengths == pytest.approx(0, abs=1e-6)
    else:
        assert 0 <= lengths <= least["vectors"] / workload.dim * (1 + 1e-9)
    for what in moved.sent:
        assert moved.sent[what].sum() == pytest.approx(moved.received[what].sum()), what


def test_one_rank_sends_nothing() -> None:
    ranks = Ranks(world_size=1)
    moved = traffic(RM1, ranks, owner_shares(RM1, ranks))
    assert all(moved.total(what) == 0 for what in moved.sent)
    assert moved.messages == 0


def test_the_shapes_have_the_dense_parameters_that_were_counted() -> None:
    assert (RM1.dense_parameters, KAGGLE.dense_parameters) == (14_817, 475_985)


def test_a_split_bag_reaches_as_many_owners_as_chance_has_it() -> None:
    ranks = Ranks(world_size=8, split=True)
    even = np.full((RM1.tables, 8), 1 / 8)
    vectors = traffic(RM1, ranks, even).total("vectors") / (4 * RM1.dim * RM1.tables * RM1.batch)
    assert vectors == pytest.approx(7 * (1 - (7 / 8) ** 80))  # of eight owners one is the trainer itself


def test_whole_tables_leave_owners_without_work_beyond_their_number() -> None:
    ranks = Ranks(world_size=16)
    assert skew(owner_shares(RM1, ranks)) == pytest.approx(2.0)  # eight tables, sixteen owners
    assert enough_shards(16) == 64
    assert enough_shards(1000) == 4096


def test_unique_rows_are_those_that_batches_have() -> None:
    shape, workload, _ = random_case(3)
    batch = make_batches(shape, 1)[0].ids.numpy().reshape(shape.num_tables, -1)
    found = sum(len(np.unique(ids)) for ids in batch)
    assert unique_rows(workload) == pytest.approx(found, rel=0.05)


def test_a_step_is_shorter_on_two_ranks_and_longer_again_where_messages_are_all() -> None:
    times = []
    for size in (1, 2, 1000):
        ranks = Ranks(world_size=size, split=True, num_shards=enough_shards(size))
        times.append(step(RM1, ranks, owner_shares(RM1, ranks), CLUSTER, COSTS).total)
    assert times[1] < times[0] < times[2]


def test_a_longer_dense_interval_hides_a_slow_sync() -> None:
    ranks = Ranks(world_size=4)
    cluster = replace(CLUSTER, medium=DISK)
    commits = [
        step(RM1, ranks, owner_shares(RM1, ranks), cluster, COSTS, dense_interval=interval).commit
        for interval in (1, 8)
    ]
    assert commits[0] > 5e-3
    assert commits[1] == pytest.approx(COSTS.fixed_s, rel=0.05)


def test_memory_is_dealt_out() -> None:
    shares = {size: owner_shares(RM1, Ranks(world_size=size, split=True)) for size in (1, 8)}
    one, eight = (memory(RM1, Ranks(world_size=size, split=True), shares[size]) for size in (1, 8))
    assert one.rows == RM1.table_bytes
    assert eight.rows == pytest.approx(one.rows / 8)
    assert eight.log == pytest.approx(one.log / 8, rel=0.1)


def test_the_maximum_of_many_draws_grows_slowly() -> None:
    assert expected_maximum(1) == 0.0
    assert expected_maximum(10) == pytest.approx(1.54, abs=0.02)
    assert expected_maximum(1000) == pytest.approx(3.24, abs=0.02)


def test_failures_and_the_rendezvous_grow_with_ranks() -> None:
    parts = [
        useful_part(size=size, step_s=0.1, dense_interval=1, restart_s=20 + rendezvous_s(size), node_mtbf_s=3.6e7)
        for size in (1, 1000)
    ]
    assert 1 > parts[0] > parts[1] > 0.9


def test_names_of_measured_schemes_are_understood() -> None:
    workload, ranks = scheme_of("split tables, 2 trainers, 2 memory ranks")
    assert (workload, ranks.world_size, ranks.memory_ranks, ranks.split) == (RM1, 4, 2, True)
    workload, ranks = scheme_of("kaggle, split tables, 2 ranks")
    assert (workload, ranks.world_size, ranks.memory_ranks, ranks.split) == (KAGGLE, 2, 0, True)
    assert scheme_of("whole tables, 1 trainer, 1 memory rank")[1].world_size == 2


def test_tables_are_written_between_their_markers_and_nowhere_else(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text("before\n<!-- table: a -->\nold\n<!-- end -->\nafter\n")
    write(path, {"a": ["| new |", ""]})
    assert path.read_text() == "before\n<!-- table: a -->\n| new |\n<!-- end -->\nafter\n"
    with pytest.raises(LookupError, match="'b'"):
        write(path, {"b": ["x"]})
