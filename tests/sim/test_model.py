"""What a batch asks for, against sums over every row, ids as the generator draws them, and a network of torch."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.counter import stream_key, uniforms
from holdfast.data.synthetic import SyntheticConfig, SyntheticSource
from holdfast.data.zipf import ZipfLaw
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import Model, TableGroup, workload_of

EXPONENTS = [0.0, 0.8, 1.05, 1.2]
NUM_BATCHES = 150


def one_table(*, rows: float, batch_size: float, lookups: float = 1.0, exponent: float = 1.05) -> Model:
    table = TableGroup(rows=rows, dim=4, lookups=lookups)
    return Model(batch_size=batch_size, tables=(table,), bottom=(4,), top=(1,), zipf_exponent=exponent)


def summed_over_every_row(*, rows: int, draws: float, exponent: float) -> tuple[float, float, float]:
    probabilities = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    probabilities /= probabilities.sum()
    there = 1.0 - (1.0 - probabilities) ** draws
    return there.sum(), (there**2).sum(), (draws * probabilities * there).sum()


def counted_in(batches: np.ndarray) -> np.ndarray:
    """[batches - 1, 3]: unique rows, repeated rows and repeated accesses of each batch but the first."""
    found = []
    for before, ids in pairwise(batches):
        unique = np.unique(ids)
        found.append((len(unique), np.isin(unique, before).sum(), np.isin(ids, before).sum()))
    return np.array(found, dtype=np.float64)


def assert_means_agree(batches: np.ndarray, model: Model) -> None:
    found = counted_in(batches)
    workload = workload_of(model)
    expected = np.array([workload.unique_rows, workload.repeated_rows, workload.repeated_accesses])
    standard_errors = found.std(axis=0, ddof=1) / math.sqrt(len(found))
    assert np.all(np.abs(found.mean(axis=0) - expected) <= 4 * standard_errors + 1e-6 * expected)
    assert np.all(standard_errors < 0.1 * expected)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize(
    ("rows", "batch_size", "lookups"),
    [(1, 7, 1), (200, 512, 2), (256, 100, 1), (3000, 64, 8), (100_000, 256, 20), (2_000_000, 2048, 1)],
)
def test_rows_of_batches_are_as_many_as_the_generator_draws(rows, batch_size, lookups, exponent):
    law = ZipfLaw(num_ranks=rows, exponent=exponent)
    numbers = uniforms(stream_key(5, rows), 0, NUM_BATCHES * batch_size * lookups)
    drawn = law.ranks(numbers).reshape(NUM_BATCHES, -1)
    assert_means_agree(drawn, one_table(rows=rows, batch_size=batch_size, lookups=lookups, exponent=exponent))


@pytest.mark.parametrize("exponent", [0.0, 1.05])
def test_rows_of_batches_are_as_many_as_the_made_up_samples_have(exponent):
    config = SyntheticConfig(num_samples=1, rows=(5000, 700), lookups=(3, 10), zipf_exponent=exponent, sample_seed=9)
    samples = SyntheticSource(config).draw(0, NUM_BATCHES * 128)
    for ids, rows, lookups in zip(samples.ids, config.rows, config.lookups_per_table, strict=True):
        model = one_table(rows=rows, batch_size=128, lookups=lookups, exponent=exponent)
        assert_means_agree(ids.reshape(NUM_BATCHES, -1), model)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("rows", [2, 256, 257, 300, 10_000, 100_000])
@pytest.mark.parametrize("draws", [1, 20_000, 3_000_000])
def test_rows_that_stand_for_their_neighbours_give_the_sum_over_every_row(rows, draws, exponent):
    found = workload_of(one_table(rows=rows, batch_size=draws, exponent=exponent))
    expected = summed_over_every_row(rows=rows, draws=draws, exponent=exponent)
    tolerance = 1e-9 if rows <= 256 else 3e-4
    assert (found.unique_rows, found.repeated_rows, found.repeated_accesses) == pytest.approx(expected, rel=tolerance)


@settings(max_examples=60)
@given(
    rows=st.floats(1.0, 1e9),
    batch_size=st.floats(1.0, 1e6),
    lookups=st.floats(1.0, 100.0),
    exponent=st.floats(0.0, 1.5),
)
def test_a_batch_has_no_more_rows_than_the_table_nor_than_accesses_and_repeats_no_more_than_it_has(
    rows, batch_size, lookups, exponent
):
    found = workload_of(one_table(rows=rows, batch_size=batch_size, lookups=lookups, exponent=exponent))
    most = 1 + 1e-6
    assert 0 < found.unique_rows <= min(rows, found.accesses) * most
    assert 0 < found.repeated_rows <= found.unique_rows * most
    assert 0 < found.repeated_accesses <= found.accesses * most
    assert 0 < found.overlap <= most
    assert found.accesses == pytest.approx(batch_size * lookups)


def test_a_table_of_one_row_has_it_in_every_batch():
    found = workload_of(one_table(rows=1, batch_size=64, lookups=5))
    assert (found.unique_rows, found.repeated_rows) == pytest.approx((1, 1))
    assert found.repeated_accesses == pytest.approx(64 * 5)
    assert found.overlap == pytest.approx(1)


def test_a_batch_far_larger_than_the_table_has_all_of_it_again_and_again():
    found = workload_of(one_table(rows=500, batch_size=1e9))
    assert (found.unique_rows, found.repeated_rows, found.repeated_accesses) == pytest.approx((500, 500, 1e9))


def test_a_table_far_larger_than_the_batch_repeats_nothing_where_all_rows_are_alike():
    found = workload_of(one_table(rows=1e12, batch_size=1000, exponent=0.0))
    assert found.unique_rows == pytest.approx(1000, rel=1e-6)
    assert found.overlap == pytest.approx(1000 / 1e12, rel=1e-3)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("whole", [1, 9, 255, 256, 300, 4096])
def test_a_part_of_a_row_counts_as_that_part(whole, exponent):
    rows = np.linspace(whole, whole + 1, 11)
    unique = [workload_of(one_table(rows=each, batch_size=1e7, exponent=exponent)).unique_rows for each in rows]
    assert unique == pytest.approx(rows.tolist(), rel=1e-6)


def test_tables_add_up_and_rows_have_the_mean_size_over_accesses():
    groups = (TableGroup(count=3, rows=1000, dim=8, lookups=2), TableGroup(count=2, rows=50, dim=32, lookups=10))
    model = Model(batch_size=16, tables=groups, bottom=(8,), top=(1,), weight_bytes=2, state_bytes=4)
    alone = [workload_of(replace(model, tables=(replace(group, count=1),))) for group in groups]
    found = workload_of(model)
    for name in ("accesses", "unique_rows", "repeated_accesses", "repeated_rows", "table_bytes", "pooled_bytes"):
        expected = 3 * getattr(alone[0], name) + 2 * getattr(alone[1], name)
        assert getattr(found, name) == pytest.approx(expected, rel=1e-12), name
    small_bytes, large_bytes = 8 * 2 + 4, 32 * 2 + 4
    assert found.num_tables == 5
    assert found.row_bytes == pytest.approx((3 * 2 * small_bytes + 2 * 10 * large_bytes) / (3 * 2 + 2 * 10))
    assert found.tables_row_bytes == 3 * small_bytes + 2 * large_bytes
    assert found.table_bytes == 3 * 1000 * small_bytes + 2 * 50 * large_bytes
    assert found.pooled_bytes == 16 * 4 * (3 * 8 + 2 * 32)
    assert found.index_bytes == 8 * 16 * (3 * 2 + 2 * 10)


SMALL = Model(
    batch_size=6,
    tables=(TableGroup(count=3, rows=10, dim=8), TableGroup(count=2, rows=20, dim=8, lookups=4)),
    bottom=(32, 8),
    top=(16, 5, 1),
    num_dense=13,
)


def network_of(model: Model):
    import torch

    from holdfast.models import DLRM

    return DLRM(
        embeddings=torch.nn.Identity(),
        num_dense=model.num_dense,
        embedding_dim=model.bottom[-1],
        num_features=model.num_tables,
        bottom=model.bottom,
        top=model.top,
        interaction=model.interaction,
    )


@pytest.mark.parametrize("name", ["small", "concat", "rm1", "rm4"])
def test_the_mlps_have_as_many_parameters_as_those_of_the_network(name):
    own = {"small": SMALL, "concat": replace(SMALL, interaction="concat")}
    model = own[name] if name in own else read_library().model(name)
    network = network_of(model)
    assert model.bottom_parameters == sum(each.numel() for each in network.bottom.parameters())
    assert model.top_parameters == sum(each.numel() for each in network.top.parameters())
    checkpointed = (model.bottom_parameters + model.top_parameters) * model.parameter_bytes
    assert workload_of(model).network_bytes == checkpointed


@pytest.mark.parametrize("interaction", ["dot", "concat"])
def test_a_forward_pass_does_the_operations_that_torch_counts_and_two_for_every_bias(interaction):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    model = replace(SMALL, interaction=interaction)
    network = network_of(model).double()
    dense = torch.rand(6, 13, dtype=torch.float64)
    pooled = torch.rand(6, 5 * 8, dtype=torch.float64)
    with FlopCounterMode(display=False) as whole:
        network.from_pooled(dense, pooled)
    with FlopCounterMode(display=False) as bottom:
        network.bottom(dense)
    workload = workload_of(model)
    assert workload.bottom_flops == bottom.get_total_flops() + 2 * 6 * sum(model.bottom)
    rest = whole.get_total_flops() - bottom.get_total_flops()
    assert workload.top_flops + workload.interaction_flops == rest + 2 * 6 * sum(model.top)
    assert (workload.interaction_flops > 0) == (interaction == "dot")


@pytest.mark.parametrize("name", ["count", "rows", "dim", "lookups"])
@pytest.mark.parametrize("wrong", [0, -1, math.nan, math.inf])
def test_a_table_without_rows_ids_or_elements_is_refused(name, wrong):
    with pytest.raises(ValueError, match=rf"^{name} = {wrong}; it must be more than 0"):
        replace(TableGroup(rows=10, dim=4), **{name: wrong})


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("tables", (), "tables is empty"),
        ("bottom", (), "bottom and top need one layer"),
        ("top", (), "bottom and top need one layer"),
        ("batch_size", 0, "batch_size = 0; it must be more than 0"),
    ],
)
def test_a_model_that_cannot_be_is_refused(field, value, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        replace(SMALL, **{field: value})
