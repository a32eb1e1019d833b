from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.errors import ConfigError

TIERS = Path(__file__).parents[2] / "examples/tiers.toml"


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["sim", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_expanders_saturate_as_trainers_are_added(tmp_path: Path) -> None:
    few, many = json.loads(
        said("scale", "--model", "rm1", "--trainers", "1,128", "--expanders", "8", "-o", str(tmp_path), "--json")
    )
    assert (few["saturates"], many["saturates"]) == ("trainers", "expander")
    assert many["batches_per_s"] <= 1.03 * many["bound_batches_per_s"]
    assert many["p99_latency_ms"] > 10 * few["p99_latency_ms"]
    assert {path.name for path in tmp_path.iterdir()} == {"scale.png", "scale.csv", "latency.png", "latency.csv"}


def test_a_trainer_has_to_be_a_processor() -> None:
    with pytest.raises(ConfigError, match="--gpu pmem-module has to be a processor"):
        said("scale", "--model", "rm1", "--gpu", "pmem-module")


def test_tiers_that_hold_more_take_fewer_nodes() -> None:
    found = json.loads(said("nodes", "--model", "mlperf", "--tiers", str(TIERS), "--set", "model.rows=4e9", "--json"))
    assert found["all tiers"]["nodes"] < found["HBM and DRAM"]["nodes"]
    assert found["times_fewer"] == found["HBM and DRAM"]["nodes"] / found["all tiers"]["nodes"]


def test_a_bound_on_the_batch_takes_more_nodes() -> None:
    bounded = ("nodes", "--model", "mlperf", "--tiers", str(TIERS), "--json", "--set", "model.rows=4e9")
    free = json.loads(said(*bounded))["all tiers"]
    quick = json.loads(said(*bounded, "--most-batch-ms", "0.1"))["all tiers"]
    assert quick["batch_ms"] <= 0.1 < free["batch_ms"]
    assert quick["nodes"] > free["nodes"]


def test_frequent_failures_take_more_from_periodic_checkpoints_than_from_durable_batches(tmp_path: Path) -> None:
    rows = json.loads(said("failures", "--per-day", "1,50", "--days", "30", "-o", str(tmp_path), "--json"))
    shares = {(row["scheme"], row["failures_per_day"]): row for row in rows}
    assert shares["every batch", 50]["useful_share"] > shares["periodic", 50]["useful_share"] + 0.1
    for row in rows:
        assert abs(row["simulated_share"] - row["useful_share"]) < 3 * row["half_width"] + 1e-3
    assert (tmp_path / "failures.png").exists()


@pytest.mark.parametrize(
    ("option", "value", "most"),
    [
        ("--trainers", "0", "whole number above 0 and up to 100,000"),
        ("--trainers", "two", "whole number above 0 and up to 100,000"),
        ("--per-day", "0", "number above 0 and up to 10,000"),
        ("--per-day", "nan", "number above 0 and up to 10,000"),
        ("--per-day", "1,1e9", "number above 0 and up to 10,000"),
    ],
)
def test_a_number_that_cannot_be_simulated_is_named(option: str, value: str, most: str) -> None:
    command = ("scale", "--model", "rm1") if option == "--trainers" else ("failures",)
    with pytest.raises(ConfigError, match=f"{option} {value}: .* is no {most}"):
        said(*command, option, value)


@pytest.mark.parametrize(("option", "value"), [("--days", "inf"), ("--batch-ms", "inf"), ("--checkpoint-s", "0")])
def test_what_no_simulation_ends_with_is_refused(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["sim", "failures", option, value])
    assert (result.exit_code, option in result.output) == (2, True)
