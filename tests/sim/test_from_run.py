"""A run's configuration becomes the model that the run trains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from holdfast.errors import ConfigError
from holdfast.files.config import read_config
from holdfast.run.assembly import make_network
from holdfast.run.sections import RunConfig
from holdfast.run.sources import open_source
from holdfast_lab.placement.access_profile import profile_accesses
from holdfast_lab.sim.caches import missed_rows_per_batch
from holdfast_lab.sim.from_run import model_of_run
from holdfast_lab.sim.library import read_library
from holdfast_lab.sim.model import Model, TableGroup, workload_of
from holdfast_lab.sim.scenario import read_scenario
from holdfast_lab.sim.system import Cache

EXAMPLE = Path(__file__).parents[2] / "examples" / "criteo_synthetic.toml"


def config_of(*overrides):
    return read_config(RunConfig, EXAMPLE, overrides)


def test_tables_and_batches_are_those_of_the_run():
    config = config_of()
    model = model_of_run(config)
    features = open_source(config.data).features
    rows = [group.rows for group in model.tables for _ in range(group.count)]
    assert rows == [feature.num_embeddings for feature in features]
    assert model.batch_size == 2048
    assert workload_of(model).accesses == 2048 * 26
    assert model.zipf_exponent == 1.05


def test_the_network_has_as_many_parameters_as_the_real_one():
    config = config_of()
    model = model_of_run(config)
    with torch.device("meta"):
        real = make_network(config, open_source(config.data))
    assert model.bottom_parameters + model.top_parameters == sum(each.numel() for each in real.parameters())


@pytest.mark.parametrize(("optimizer", "copies"), [("sgd", 1), ("adagrad", 2), ("adam", 3)])
def test_a_checkpoint_keeps_parameters_and_their_optimizers_state(optimizer, copies):
    model = model_of_run(config_of(f"optimizer.name={optimizer}"))
    parameters = model.bottom_parameters + model.top_parameters
    assert workload_of(model).network_bytes == pytest.approx(4 * copies * parameters, rel=1e-12)


def test_a_longer_dense_interval_spreads_the_checkpoint():
    every, tenth = (model_of_run(config_of(f"pool.dense_interval={interval}")) for interval in (1, 10))
    assert workload_of(tenth).network_bytes == pytest.approx(workload_of(every).network_bytes / 10, rel=1e-12)


@pytest.mark.parametrize(
    ("dtype", "optimizer", "row_bytes"),
    [("fp32", "sgd", 64), ("fp16", "sgd", 32), ("fp32", "rowwise_adagrad", 68), ("fp32", "adam", 192)],
)
def test_a_row_has_the_bytes_of_its_weights_and_state(dtype, optimizer, row_bytes):
    model = model_of_run(config_of(f"embedding.dtype={dtype}", f"embedding.optimizer={optimizer}"))
    assert workload_of(model).row_bytes == row_bytes


def test_lookups_and_skew_of_generated_data_are_taken_over():
    data = ("data={synthetic={num_samples=100, rows=[50, 50, 9], lookups=[3, 3, 1], zipf_exponent=0.7}}",)
    model = model_of_run(config_of(*data))
    assert [(group.count, group.rows, group.lookups) for group in model.tables] == [(2, 50, 3.0), (1, 9, 1.0)]
    assert model.zipf_exponent == 0.7


def test_of_files_the_skew_is_what_the_caller_says_and_else_none(tmp_path):
    line = "\t".join(["1", *["5"] * 13, *["68fd1e64"] * 26])
    (tmp_path / "train.tsv").write_text(f"{line}\n" * 4)
    config = config_of(f"data={{criteo={{paths=['{tmp_path}/train.tsv'], num_embeddings=500}}}}")
    config = replace(config, validation=None)
    assert model_of_run(config).zipf_exponent == 0.0
    assert "all rows are alike" in model_of_run(config).source
    assert model_of_run(config, zipf_exponent=1.2).zipf_exponent == 1.2


def test_a_run_can_be_simulated_on_any_system():
    run = read_library().run("cxl", model_of_run(config_of()))
    assert run.batch_s > 0.0


def test_a_profile_gives_the_skew_of_the_ids_that_it_counted():
    config = config_of(
        "data={synthetic={num_samples=40000, rows=[2000, 2000], lookups=[4, 1], zipf_exponent=1.1}}",
        "train.batch_size=1024",
    )
    config = replace(config, validation=None)
    profile = profile_accesses(open_source(config.data), config.train, num_batches=39)
    counted, drawn = model_of_run(config, profile), model_of_run(config)
    assert all(group.hottest for group in counted.tables) and "profile" in counted.source
    unique = sum(table.unique_rows_per_batch for table in profile.tables)
    assert workload_of(counted).unique_rows == pytest.approx(unique, rel=0.03)
    for policy in ("static", "lru"):
        cache = Cache(policy=policy, share=0.2)
        missed = [missed_rows_per_batch(cache, model) for model in (counted, drawn)]
        assert missed[0] == pytest.approx(missed[1], rel=0.1)


def test_rows_that_are_all_alike_are_so_by_either_law():
    groups = TableGroup(rows=1000, dim=16, hottest=((1000, 1.0),)), TableGroup(rows=1000, dim=16)
    counted, law = (
        workload_of(Model(batch_size=700, tables=(group,), bottom=(16,), top=(1,), zipf_exponent=0.0))
        for group in groups
    )
    assert counted.unique_rows == pytest.approx(law.unique_rows, rel=1e-6)
    assert counted.overlap == pytest.approx(law.overlap, rel=1e-6)


@pytest.mark.parametrize("hottest", [((10, 0.5),), ((10, 0.5), (1000, 0.9)), ((10, 0.5), (5, 0.6), (1000, 1.0))])
def test_parts_of_accesses_ascend_to_all_rows(hottest):
    with pytest.raises(ValueError, match=r"^hottest = "):
        TableGroup(rows=1000, dim=16, hottest=hottest)


def test_a_profile_of_a_model_that_is_no_run_is_refused():
    with pytest.raises(ConfigError, match=r"--profile: it is of a run's ids; .*not 'rm1'"):
        read_scenario("cxl", "rm1", profile=Path("p.json"))


def test_missing_data_are_told(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.tsv"):
        model_of_run(config_of(f"data={{criteo={{paths=['{tmp_path}/absent.tsv']}}}}"))
