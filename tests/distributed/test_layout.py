"""Where rows lie and who has them; the manifest that says so; and the step that all can go back to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import _core
from holdfast.data.synthetic import SyntheticConfig, SyntheticSource
from holdfast.errors import ConfigError, Corrupted, FormatMismatch, HoldfastError
from holdfast.group import manifest as manifests
from holdfast.group.layout import TableShards, assign, check_num_shards, lay_out, measure_load, stride_bits
from holdfast.group.manifest import Manifest, TableEntry
from holdfast.group.opening import newest_common_step
from holdfast.group.roles import Roles, slice_of
from holdfast.pools.opening_options import Mark

# Layout.


def test_large_tables_are_cut_over_all_shards_and_small_ones_take_turns() -> None:
    whole = [TableShards(shard, 1) for shard in (0, 1, 2, 3, 0)]
    layout = lay_out([10, 1001, 1000, 5, 7, 8], num_shards=4, split_rows=1000)
    assert layout == [whole[0], TableShards(0, 4), *whole[1:]]


def test_one_shard_holds_all_tables_whole() -> None:
    assert lay_out([10, 10**6], num_shards=1, split_rows=0) == [TableShards(0, 1)] * 2


@given(
    load=st.integers(0, 7).flatmap(lambda bits: st.lists(st.integers(0, 1000), min_size=2**bits, max_size=2**bits)),
    data=st.data(),
)
@settings(max_examples=200)
def test_every_owner_has_a_shard_and_none_much_more_than_its_share(load: list[int], data: st.DataObject) -> None:
    num_owners = data.draw(st.integers(1, len(load)))
    owner_of = assign(load, num_owners)
    assert len(owner_of) == len(load)
    assert set(owner_of) == set(range(num_owners))
    of_owner = np.bincount(owner_of, weights=load, minlength=num_owners)
    # Greedy from the largest on: nobody has more than an even share and one shard beyond it.
    assert of_owner.max() <= sum(load) / num_owners + max(load)
    assert assign(load, num_owners) == owner_of


def test_shards_that_nobody_asks_for_are_dealt_out_evenly() -> None:
    assert np.bincount(assign([0] * 64, 4)).tolist() == [16] * 4
    assert np.bincount(assign([1000] + [0] * 15, 2)).min() >= 1


def test_one_shard_that_outweighs_all_others_leaves_no_owner_empty() -> None:
    owner_of = assign([10**9, 1, 1, 1], 4)
    assert sorted(owner_of) == [0, 1, 2, 3]


@pytest.mark.parametrize(("num_shards", "num_owners"), [(0, 1), (3, 1), (8192, 1), (2, 3)])
def test_shards_that_cannot_be_are_refused_by_name(num_shards: int, num_owners: int) -> None:
    with pytest.raises(ConfigError, match=f"group.shards = {num_shards}"):
        check_num_shards(num_shards, num_owners)


def test_load_is_what_the_first_batches_ask_for() -> None:
    rows, lookups, batch_size, num_shards = [5000, 9], (3, 2), 16, 4
    source = SyntheticSource(SyntheticConfig(num_samples=640, rows=tuple(rows), lookups=lookups, num_dense=1))
    layout = lay_out(rows, num_shards=num_shards, split_rows=100)
    common: dict[str, Any] = {"num_shards": num_shards, "batch_size": batch_size, "seed": 3, "shuffle": True}
    load = measure_load(source, [0, 1], rows, layout, **common)
    assert sum(load) == 8 * batch_size * sum(lookups)
    assert load[0] >= 8 * batch_size * lookups[1]  # the whole table's, all in shard 0
    assert measure_load(source, [0, 1], rows, layout, **common) == load
    assert measure_load(source, [0, 1], rows, layout, **common, first_sample=160) != load


@given(num_rows=st.integers(2, 10**6), bits=st.integers(1, 8), data=st.data())
@settings(max_examples=100)
def test_places_are_rows_of_shards_and_lead_back(num_rows: int, bits: int, data: st.DataObject) -> None:
    num_shards = 2**bits
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), min_size=1, max_size=50, unique=True)), np.int64)
    turned_by = data.draw(st.integers(0, num_shards - 1))
    places = _core.places_of(num_rows, num_shards, turned_by, rows)
    assert len(set(places.tolist())) == len(rows)
    assert ((places >> stride_bits(num_rows, num_shards)) < num_shards).all()
    np.testing.assert_array_equal(_core.rows_of_places(num_rows, num_shards, turned_by, places), rows)


# Roles.


def test_every_rank_trains_and_owns_unless_some_are_memory_ranks() -> None:
    all_alike = Roles(world_size=3)
    assert (all_alike.trainers, all_alike.owners) == (range(3), range(3))
    apart = Roles(world_size=5, memory_ranks=2)
    assert (apart.trainers, apart.owners) == (range(3), range(3, 5))
    assert (apart.describe(2), apart.describe(3), all_alike.describe(0)) == (
        "trains",
        "owns rows",
        "trains and owns rows",
    )


@pytest.mark.parametrize("memory_ranks", [-1, 3, 4])
def test_a_group_without_a_trainer_is_refused(memory_ranks: int) -> None:
    with pytest.raises(ConfigError, match=f"--memory-ranks {memory_ranks}"):
        Roles(world_size=3, memory_ranks=memory_ranks)


@given(size=st.integers(0, 1000), parts=st.integers(1, 40))
def test_slices_of_a_batch_are_its_parts_in_order(size: int, parts: int) -> None:
    slices = [slice_of(size, part, parts) for part in range(parts)]
    assert slices[0][0] == 0 and slices[-1][1] == size
    assert all(before[1] == after[0] for before, after in pairwise(slices))
    lengths = [end - begin for begin, end in slices]
    assert max(lengths) - min(lengths) <= 1


# Manifest.


def manifest_of(num_shards: int = 4) -> Manifest:
    table = TableEntry(
        name="täble",
        num_embeddings=100,
        embedding_dim=4,
        dtype=0,
        optimizer=1,
        pooling=0,
        init_low=-0.1,
        init_high=0.1,
        first_shard=0,
        table_shards=num_shards,
    )
    return Manifest(
        uuid=manifests.new_uuid(),
        seed=3,
        store="in_place",
        log_bytes=1 << 20,
        row_checksums=False,
        tables=(table, replace(table, name="other", first_shard=2, table_shards=1)),
        generation=1,
        owner_of=(0, 1, 0, 1)[:num_shards],
        load=(5, 4, 3, 2)[:num_shards],
    )


def test_a_manifest_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    manifest = manifest_of()
    assert not manifests.exists(tmp_path)
    manifests.write(tmp_path, manifest)
    assert manifests.exists(tmp_path)
    assert manifests.read(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [manifests.MANIFEST]
    later = manifest.next_generation([0, 1, 2, 0], [1, 1, 1, 1])
    manifests.write(tmp_path, later)
    assert manifests.read(tmp_path) == later
    assert (later.generation, later.num_writers, later.owned(0)) == (2, 3, [0, 3])


def test_each_changed_byte_of_a_manifest_is_refused_with_a_typed_error_or_says_the_same() -> None:
    """The same: the case of a digit in an escaped letter."""
    manifest = manifest_of()
    text = manifest.to_json().encode()
    for position in range(len(text)):
        for change in (0x01, 0x20, 0x80):
            damaged = bytearray(text)
            damaged[position] ^= change
            changed = damaged.decode("utf-8", "surrogateescape")
            if "\\u00E4" in changed:
                assert Manifest.from_json(changed, "group.json") == manifest
                continue
            with pytest.raises((Corrupted, FormatMismatch), match=r"group\.json"):
                Manifest.from_json(changed, "group.json")


def test_each_cut_manifest_is_refused() -> None:
    text = manifest_of().to_json()
    for length in range(len(text)):
        with pytest.raises((Corrupted, FormatMismatch)):
            Manifest.from_json(text[:length], "group.json")


@pytest.mark.parametrize("text", ["", "[]", "null", "3", '"holdfast group"', "{}", '{"format": "holdfast group"}'])
def test_json_that_is_no_manifest_is_refused(text: str) -> None:
    with pytest.raises((Corrupted, FormatMismatch)):
        Manifest.from_json(text, "group.json")


def test_a_manifest_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / manifests.MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HoldfastError, match=r"group\.json"):
        manifests.read(tmp_path)


# With the first, whoever looked for a shard's rows looked for ever.
IMPOSSIBLE_FIELDS: tuple[dict[str, Any], ...] = (
    {"num_embeddings": 2**64 - 1},
    {"num_embeddings": 0},
    {"num_embeddings": "100"},
    {"embedding_dim": 4097},
    {"dtype": 3},
    {"optimizer": 5},
    {"pooling": 2},
    {"keys": -1},
    {"init_low": float("nan")},
    {"name": ["täble"]},
    {"stay": (1 << 70,)},
)


@pytest.mark.parametrize(
    "changes",
    [
        {"owner_of": (0, 1, 0)},
        {"owner_of": (0, 2, 0, 2)},
        {"owner_of": ()},
        {"load": (1,)},
        {"uuid": "12"},
        {"store": "elsewhere"},
        {"generation": 0},
        {"tables": (replace(manifest_of().tables[0], table_shards=2),)},
        {"tables": (replace(manifest_of().tables[1], first_shard=4),)},
        *({"tables": (replace(manifest_of().tables[0], **field),)} for field in IMPOSSIBLE_FIELDS),
        {"seed": -1},
        {"log_bytes": 1 << 64},
        {"load": (5, 4, 3, "2")},
    ],
)
def test_what_cannot_be_is_refused_though_its_checksum_holds(changes: dict[str, Any]) -> None:
    text = replace(manifest_of(), **changes).to_json()
    with pytest.raises(Corrupted, match=r"group\.json"):
        Manifest.from_json(text, "group.json")


def test_a_manifest_of_a_later_version_is_named() -> None:
    said = {**json.loads(manifest_of().to_json()), "version": 4}
    with pytest.raises(FormatMismatch, match="version 4"):
        Manifest.from_json(json.dumps(said), "group.json")


# The step that all can go back to.


def survey(*rows: int, dense: Sequence[int] | None = None) -> dict[str, Any]:
    def mark(step: int) -> Mark:
        return step, 10 * step, step + 1

    return {"rows": [mark(step) for step in rows], "dense": None if dense is None else [mark(step) for step in dense]}


@pytest.mark.parametrize(
    ("surveys", "step"),
    [
        ([survey(7, dense=[7, 6])], 7),
        ([survey(7, dense=[7, 6]), survey(6)], 6),
        ([survey(9, dense=[3, 6]), survey(8)], 6),
        ([survey(dense=[4, 5]), survey(5), survey(7)], 5),
        ([survey(0, dense=[0]), survey(0)], 0),
    ],
)
def test_all_go_back_to_the_newest_step_that_all_have(surveys: list[dict[str, Any]], step: int) -> None:
    assert newest_common_step(surveys) == (step, 10 * step, step + 1)


def test_a_new_pool_begins_at_the_beginning() -> None:
    assert newest_common_step([survey(0, dense=[]), survey(0)]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("surveys", "words"),
    [
        ([survey(7, dense=[7, 6]), survey(5)], "steps 7 and 6, .* step 5: it is an older copy"),
        ([survey(7, dense=[]), survey(5)], "rows of step 7, and there is no dense state"),
    ],
)
def test_no_common_step_is_named(surveys: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(Corrupted, match=words):
        newest_common_step(surveys)
