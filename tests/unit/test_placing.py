"""`holdfast profile`, `tiers probe` and `plan` as a user meets them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cli_runs import Commands
from holdfast_lab.placement import network_time, row_probe
from holdfast_lab.placement import probe as probing
from holdfast_lab.placement.host import StoreKind
from holdfast_lab.placement.tiers import read_tiers

pytestmark = pytest.mark.dear

EXAMPLES = Path(__file__).parents[2] / "examples"

SMALL_TIERS = """
[[tiers]]
name = "dram"
kind = "dram"
capacity_bytes = 4096
read_bandwidth_bytes_per_s = 10e9
write_bandwidth_bytes_per_s = 10e9
read_latency_ns = 100
access_granularity_bytes = 64
price_usd_per_gb = 4

[[tiers]]
name = "ssd"
kind = "block"
capacity_bytes = 1_000_000
read_bandwidth_bytes_per_s = 2e9
write_bandwidth_bytes_per_s = 1e9
read_latency_ns = 80_000
access_granularity_bytes = 512
random_reads_per_s = 100_000
endurance_drive_writes_per_day = 1
endurance_years = 5
"""


def _small(shape):
    """A probe's run in milliseconds, that has misses and merges all the same where it is to have any."""
    return replace(
        shape,
        rows=shape.rows // 50,
        bags=max(4, shape.bags // 50),
        batches=min(shape.batches, 4) if shape.quiet else shape.batches,
        steps=5 if shape.quiet else 20,
        log_bytes=shape.log_bytes // 32,
        dense_bytes=min(shape.dense_bytes, 1 << 18),
    )


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    monkeypatch.setattr(probing, "_SECONDS", 0.02)
    monkeypatch.setattr(probing, "_MEMORY_BYTES", 16 << 20)
    shapes = {"_QUIET": row_probe._QUIET, "_LARGE_STATE": row_probe._LARGE_STATE}
    shapes |= {name: getattr(row_probe, name) for name in ("_COLD", "_SPARSE", "_DENSE")}
    for name, shape in shapes.items():
        small = tuple(map(_small, shape)) if isinstance(shape, tuple) else _small(shape)
        monkeypatch.setattr(row_probe, name, small)
    monkeypatch.setattr(network_time, "_ROUND_S", 0.01)
    (pool_root / "tiers.toml").write_text(SMALL_TIERS)
    return Commands(pool_root, monkeypatch, capfd)


def plan(holdfast: Commands, *arguments: object) -> dict:
    result = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml", "--json", *arguments)
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_profile_probe_and_plan_one_after_the_other(holdfast: Commands) -> None:
    counted, tiers = holdfast.root / "profile.json", holdfast.root / "probed.toml"
    result = holdfast("profile", holdfast.config, "-o", counted)
    assert result.code == 0, result.err
    assert "1,920 accesses in 20 batches of 32" in result.out
    result = holdfast("tiers", "probe", holdfast.root, "-o", tiers)
    assert result.code == 0, result.err
    probed = read_tiers(tiers)
    assert len(probed.tiers) == 2
    assert probed.host is not None
    assert (probed.host.store == "log") == (probed.tiers[1].kind == "block")
    result = holdfast("plan", holdfast.config, "--tiers", tiers, "--profile", counted)
    assert result.code == 0, result.err
    for words in ("a profile of 20 batches, counted exactly", "It fits.", "ms per batch, limited by", "C3", "1 node"):
        assert words in result.out
    assert "Log on" in result.out
    assert "A step takes" in result.out
    found = json.loads(holdfast("plan", holdfast.config, "--tiers", tiers, "--profile", counted, "--json").out)
    step = found["step"]
    assert step["ms"] == max(step[f"{stage}_ms"] for stage in ("compute", "loader", "disk", "log"))
    assert step["ms"] == step[f"{step['limited_by']}_ms"]
    assert found["batch_ms"] == step["ms"]
    assert not (holdfast.root / "pool").exists()


@pytest.mark.parametrize("store", ["in_place", "log"])
@pytest.mark.usefixtures("holdfast")
def test_what_rows_cost_is_measured_for_both_stores_and_nothing_stays(tmp_path: Path, store: StoreKind) -> None:
    medium = tmp_path / "medium"
    medium.mkdir()
    steps = []
    host = row_probe.probe_rows(medium, store, on_step=lambda done, total=None, /: steps.append(done))
    assert host.store == store
    assert host.step_us > 0
    assert (host.fetch_row_ns is not None) == (store == "log")
    assert sum(steps) == row_probe.NUM_STEPS
    assert list(medium.iterdir()) == []


def test_a_pool_of_another_kind_than_the_probed_one_is_not_predicted(holdfast: Commands) -> None:
    tiers = holdfast.root / "probed.toml"
    assert holdfast("tiers", "probe", holdfast.root, "-o", tiers).code == 0
    host = read_tiers(tiers).host
    assert host is not None
    other = "memory" if host.store == "log" else "block"
    result = holdfast("plan", holdfast.config, "--tiers", tiers, "--set", f"pool.medium={other}")
    assert result.code == 1
    assert f"pool.medium = '{other}', but the tiers' [host] was measured" in result.err


def test_without_costs_only_what_memory_alone_sets_is_told(holdfast: Commands) -> None:
    assert plan(holdfast)["step"] is None
    result = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml")
    assert "compute not counted" in result.out
    assert "A step takes" not in result.out


def test_a_probe_without_a_file_prints_the_toml(holdfast: Commands) -> None:
    text = holdfast("tiers", "probe", holdfast.root).out
    path = holdfast.root / "printed.toml"
    path.write_text(text)
    assert read_tiers(path).tiers[0].name == "dram"


def test_hot_rows_of_a_small_run_are_placed_in_dram_and_the_rest_on_the_drive(holdfast: Commands) -> None:
    found = plan(holdfast)
    assert "Zipf with exponent 1.05" in found["basis"]
    dram, ssd = found["tiers"]
    assert dram["bytes"] <= 4096
    assert dram["rows"] + ssd["rows"] == 457
    assert dram["access_share"] > ssd["access_share"] > 0
    assert ssd["reserved_bytes"] > 0
    assert ssd["lifetime_years"] > 0
    assert dram["cost_usd"] > 0
    assert found["nodes"][0]["nodes"] > 1


def test_the_plan_says_for_people_what_it_says_for_programs(holdfast: Commands) -> None:
    found = plan(holdfast, "--step-ms", 5)
    text = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml", "--step-ms", 5).out
    assert f"{found['ms_per_batch']:.3f} ms per batch, limited by {found['limiting_stage']}" in text
    assert "at measured pace" in text
    assert "tiers without a price not counted" in text
    assert f"With tiers down to dram: {found['nodes'][0]['nodes']} nodes." in text


def test_the_log_that_a_plan_predicts_is_the_log_that_a_run_writes(holdfast: Commands) -> None:
    counted = holdfast.root / "profile.json"
    holdfast("profile", holdfast.config, "-o", counted)
    found = plan(holdfast, "--profile", counted)
    assert holdfast.train().code == 0
    from holdfast import _core

    reader = _core.Reader(str(holdfast.root / "pool"))
    state = json.loads(holdfast("inspect", holdfast.root / "pool", "--json").out)
    # Positions of the log also count what is left over at the ring's end, and every array is rounded up to 64 bytes.
    written = reader.commit["log_head"] / state["step"]
    assert found["log_bytes_per_batch"] < written < 1.25 * found["log_bytes_per_batch"] + 3 * 3 * 64
    # A dense slot also holds random numbers, the configuration and names.
    assert found["dense_bytes_per_batch"] < state["dense"]["bytes"]


def test_data_without_a_law_and_a_profile_is_taken_as_uniform_and_that_is_said(holdfast: Commands) -> None:
    holdfast("data", "synth", holdfast.root / "clicks.tsv", "--samples", 200)
    holdfast.config.write_text(
        '[data.criteo]\npaths = ["clicks.tsv"]\nnum_embeddings = 100\n[embedding]\ndim = 4\n'
        "[model]\nbottom = [4]\ntop = [1]\n[train]\nbatch_size = 50\n"
    )
    found = plan(holdfast)
    assert "assumed that all rows are alike" in found["basis"]
    assert sum(tier["rows"] for tier in found["tiers"]) == 2600


def test_a_trillion_rows_are_planned_without_allocating_them(holdfast: Commands) -> None:
    big = ("--set", "data.synthetic.rows=[1_000_000_000_000, 50]")
    result = holdfast("plan", holdfast.config, "--tiers", EXAMPLES / "tiers.toml", *big)
    assert result.code == 1
    assert "bytes are missing" in result.err
    assert "embedding.dtype" in result.err
    fitting = ("--set", "data.synthetic.rows=[100_000_000_000, 50]")
    result = holdfast("plan", holdfast.config, "--tiers", EXAMPLES / "tiers.toml", *fitting)
    assert result.code == 0, result.err
    assert "With tiers down to nvme: 1 node." in result.out


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("train.batch_size=64", "taken with train.batch_size = 32"),
        ("data.synthetic.rows=[50, 7, 401]", "table 'C3' had 400 rows"),
        ("data.synthetic.rows=[50, 7]", "it has the tables C1, C2, C3"),
    ],
)
def test_a_profile_of_another_run_is_refused_by_name(holdfast: Commands, override: str, named: str) -> None:
    counted = holdfast.root / "profile.json"
    holdfast("profile", holdfast.config, "-o", counted, "--steps", 2)
    tiers = ("--tiers", holdfast.root / "tiers.toml")
    result = holdfast("plan", holdfast.config, *tiers, "--profile", counted, "--set", override)
    assert result.code == 1
    assert named in result.err


def test_files_that_are_wrong_are_named_and_an_output_that_is_there_is_kept(holdfast: Commands) -> None:
    counted = holdfast.root / "profile.json"
    counted.write_text("precious")
    result = holdfast("profile", holdfast.config, "-o", counted)
    assert (result.code, counted.read_text()) == (1, "precious")
    result = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml", "--profile", counted)
    assert (result.code, f"{counted}: not JSON" in result.err) == (1, True)
    result = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "nowhere.toml")
    assert (result.code, "nowhere.toml: cannot be read" in result.err) == (1, True)
    assert holdfast("profile", holdfast.config, "-o", counted, "--overwrite", "--steps", 3).code == 0
    assert json.loads(counted.read_text())["batches"] == 3


def test_neither_a_profile_nor_a_plan_takes_the_place_of_what_it_reads(holdfast: Commands) -> None:
    tiers, before = holdfast.root / "tiers.toml", holdfast.config.read_text()
    tiers.write_text("precious")
    for out, command in (
        (holdfast.config, ("profile", holdfast.config, "-o")),
        (holdfast.config, ("plan", holdfast.config, "--tiers", tiers, "--apply")),
        (tiers, ("plan", holdfast.config, "--tiers", tiers, "--apply")),
    ):
        result = holdfast(*command, out, "--overwrite")
        assert result.code == 1
        assert f"output: {out} is one of the files that are read; name another" in result.err
    assert (holdfast.config.read_text(), tiers.read_text()) == (before, "precious")


def test_a_profile_in_little_memory_says_what_was_counted_by_a_sketch(holdfast: Commands) -> None:
    out = holdfast.root / "profile.json"
    rows = ("--set", "data.synthetic.rows=[50, 7, 400_000]")
    result = holdfast("profile", holdfast.config, "-o", out, "--memory-bytes", 1 << 20, *rows)
    assert result.code == 0, result.err
    assert "C3: counted by a sketch" in result.out
    assert [table["method"] for table in json.loads(out.read_text())["tables"]] == ["exact", "exact", "sketch"]
    tiers = ("--tiers", EXAMPLES / "tiers.toml")
    result = holdfast("plan", holdfast.config, *tiers, "--profile", out, *rows)
    assert "1 of 3 tables by a sketch" in result.out


HOST_OF_A_DISK = """
[host]
store = "log"
step_us = 500
row_ns = 20
row_byte_ns = 0.5
id_ns = 2
id_byte_ns = 0.01
dense_byte_ns = 0.1
plan_id_ns = 6
plan_row_ns = 8
commit_step_us = 20
commit_row_ns = 1
commit_dense_byte_ns = 0.2
collect_row_ns = 30
fetch_row_ns = 1000
merge_row_ns = 250
merge_request_ns = 1500
fetches_per_s = 100_000
merge_requests_per_s = 50_000
"""

CXL_TIER = """
[[tiers]]
name = "cxl"
kind = "byte"
capacity_bytes = 200_000_000
read_bandwidth_bytes_per_s = 17e9
write_bandwidth_bytes_per_s = 14e9
read_latency_ns = 400
access_granularity_bytes = 64
random_reads_per_s = 5_000_000
directory = "{}"
"""


def test_what_a_plan_comes_to_is_what_is_trained(holdfast: Commands) -> None:
    """Scratchpad, log, and the log's own medium, written down by --apply and read by train after the run's own file."""
    fast, placed = holdfast.root / "fast", holdfast.root / "placed.toml"
    fast.mkdir()
    tiers = SMALL_TIERS.replace("capacity_bytes = 4096", "capacity_bytes = 30_000_000").replace(
        "1_000_000", "100_000_000"
    )
    (holdfast.root / "tiers.toml").write_text(tiers + CXL_TIER.format(fast) + HOST_OF_A_DISK)
    found = plan(holdfast, "--apply", placed)
    pool = found["pool"]
    assert (pool["log_tier"], pool["log_directory"]) == ("cxl", str(fast))
    assert 16 << 20 <= pool["log_bytes"] <= 200_000_000
    assert pool["scratchpad_bytes"] + pool["index_bytes"] <= 30_000_000
    assert pool["step"]["disk_ms"] <= found["step"]["disk_ms"]
    trained = holdfast("train", holdfast.config, placed, "--pool", holdfast.root / "pool", "--set", "train.steps=3")
    assert trained.code == 0, trained.err
    inspected = json.loads(holdfast("inspect", holdfast.root / "pool", "--json").out)
    assert inspected["store"] == "log"
    assert inspected["log"]["directories"] == [str(fast.resolve())]
    assert inspected["log"]["bytes"] >= pool["log_bytes"]
    shown = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml")
    assert f"on cxl in {fast}" in shown.out
    # A directory is relative to the file that names it, wherever the plan is written.
    elsewhere = holdfast.root / "elsewhere" / "placed.toml"
    elsewhere.parent.mkdir()
    (holdfast.root / "tiers.toml").write_text(tiers + CXL_TIER.format("fast") + HOST_OF_A_DISK)
    assert plan(holdfast, "--apply", elsewhere)["pool"]["log_directory"] == str(fast)
    assert f'directory = "{fast}"' in elsewhere.read_text()
    again = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml", "--apply", placed)
    assert again.code == 1
    assert "placed.toml is there already" in again.err


def test_where_a_plan_has_victims_a_run_has_them(holdfast: Commands) -> None:
    """Of a drive that answers so slowly that a step waits for its reads, beside a device too small for a log."""
    near, placed = "/dev/shm", holdfast.root / "placed.toml"
    tiers = SMALL_TIERS.replace("1_000_000", "100_000_000").replace("4096", "1_200_000")
    device = CXL_TIER.format(near).replace("200_000_000", "10_000_000")
    host = HOST_OF_A_DISK.replace("fetches_per_s = 100_000", "fetches_per_s = 5")
    (holdfast.root / "tiers.toml").write_text(tiers + device + host)
    rows = ("--set", "data.synthetic.rows=[500, 70, 30000]")
    pool = plan(holdfast, "--apply", placed, *rows)["pool"]
    assert (pool["log_tier"], pool["log_directory"]) == ("ssd", None)
    assert (pool["victim_tier"], pool["victim_directory"]) == ("cxl", near)
    shown = holdfast("plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml", *rows)
    assert "a victim cache of" in shown.out
    trained = holdfast(
        "train", holdfast.config, placed, "--pool", holdfast.root / "pool", "--set", "train.steps=3", *rows
    )
    assert trained.code == 0, trained.err


def test_a_plan_without_costs_of_a_disk_cannot_be_applied(holdfast: Commands) -> None:
    refused = holdfast(
        "plan", holdfast.config, "--tiers", holdfast.root / "tiers.toml", "--apply", holdfast.root / "placed.toml"
    )
    assert refused.code == 1
    assert "--apply needs" in refused.err
    assert not (holdfast.root / "placed.toml").exists()


def test_a_probe_measures_the_log_s_own_medium_beside_the_rows(holdfast: Commands, tmp_path: Path) -> None:
    rows, fast = tmp_path / "rows", holdfast.root / "fast"
    for directory in (rows, fast):
        directory.mkdir()
    for name, dial in (("real", ()), ("dialled", ("--log-dial", "cxl-pmem"))):
        out = holdfast.root / f"{name}.toml"
        result = holdfast("tiers", "probe", rows, "--log", fast, *dial, "-o", out)
        assert result.code == 0, result.err
        *_, tier = read_tiers(out).tiers
        assert tier.directory == fast
        assert tier.name.startswith("log-")
        assert list(fast.iterdir()) == []
