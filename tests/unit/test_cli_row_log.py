"""The commands say of a pool with a row log what they say of one that keeps its rows in place."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from left_behind import left_behind

from cli_runs import Commands, start
from holdfast.files.config import read_config
from holdfast.run.assembly import open_trainer
from holdfast.run.sections import RunConfig

pytestmark = pytest.mark.dear

ROW_LOG = ["pool.medium=block", "pool.log_bytes=65536", "pool.scratchpad_bytes=60000"]
SETTINGS = [part for item in ROW_LOG for part in ("--set", item)]


@pytest.fixture(params=["memory", "disk"])
def holdfast(
    request: pytest.FixtureRequest,
    pool_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Commands:
    return Commands(pool_root if request.param == "memory" else tmp_path, monkeypatch, capfd)


def inspected(holdfast: Commands, pool: str = "pool") -> dict[str, dict[str, object]]:
    result = holdfast("inspect", holdfast.root / pool, "--json")
    assert result.code == 0, result.err
    found: dict[str, dict[str, object]] = json.loads(result.out)
    return found


def test_both_stores_train_to_the_same_digest_evaluation_and_export(holdfast: Commands) -> None:
    assert holdfast.train("pool", *SETTINGS, "--steps", 7).code == 0
    trained = holdfast.train("pool", "--set", "train.window=6")
    assert trained.code == 0, trained.err
    in_place = holdfast.train("in-place", "--set", "pool.medium=memory")
    assert trained.out.splitlines()[-1] == in_place.out.splitlines()[-1]
    outputs = []
    for pool in ("pool", "in-place"):
        digest = holdfast("digest", holdfast.root / pool)
        evaluation = holdfast("eval", holdfast.config, "--pool", holdfast.root / pool)
        exported = holdfast("export", holdfast.root / pool, holdfast.root / f"{pool}.safetensors")
        assert (digest.code, evaluation.code, exported.code) == (0, 0, 0)
        outputs.append((digest.out, evaluation.out, (holdfast.root / f"{pool}.safetensors").read_bytes()))
    assert outputs[0] == outputs[1]


def test_a_window_that_does_not_fit_the_scratchpad_is_told_of_once(holdfast: Commands) -> None:
    fits = holdfast.train("wide", *SETTINGS, "--set", "pool.scratchpad_bytes=10000000")
    tight = holdfast.train("tight", *SETTINGS, "--set", "pool.scratchpad_bytes=6000", "--set", "train.window=6")
    assert (fits.code, tight.code) == (0, 0)
    assert fits.out.count("raise pool.scratchpad_bytes") == 0
    assert tight.out.count("raise pool.scratchpad_bytes") == 1


def test_metrics_say_how_long_the_stages_took_that_ran_beside_training(holdfast: Commands) -> None:
    path = holdfast.root / "metrics.jsonl"
    tight = ("--set", "pool.scratchpad_bytes=10000")
    assert holdfast.train("pool", *SETTINGS, *tight, "--metrics", path).code == 0
    *steps, _ = [json.loads(line) for line in path.read_text().splitlines()]
    background = [line["background_ms"] for line in steps]
    assert set().union(*background) == {
        "collect", "exchange", "insert", "merge", "persist", "append", "sync", "dense"
    }  # fmt: skip
    assert all(ms >= 0.0 for line in background for ms in line.values())
    fetched = sum(line["traffic"]["rows_fetched"] for line in steps)
    assert fetched > 0
    assert sum(line.get("exchange", 0.0) for line in background) > 0.0


def test_metrics_say_what_share_was_found_in_the_scratchpad_and_how_much_more_was_written_than_updated(
    holdfast: Commands,
) -> None:
    path = holdfast.root / "metrics.jsonl"
    tight = ("--set", "pool.scratchpad_bytes=10000")
    assert holdfast.train("pool", *SETTINGS, *tight, "--metrics", path).code == 0
    *steps, _ = [json.loads(line) for line in path.read_text().splitlines()]

    def total(*names: str) -> float:
        return sum(line["traffic"][name] for line in steps for name in names)

    for line in steps:
        looked_for = line["traffic"]["rows_hit"] + line["traffic"]["rows_missed"]
        assert ("scratchpad_hit_rate" in line["rates"]) == (looked_for > 0)
        if looked_for:
            assert line["rates"]["scratchpad_hit_rate"] == pytest.approx(
                line["traffic"]["rows_hit"] / looked_for, abs=1e-6
            )
    assert total("rows_hit") > 0 and total("rows_missed") > 0
    # A log of 16 blocks, of which each step takes one: none is left out, and a merge has to end before the last.
    assert total("appended_bytes") >= 17 * 4096
    assert total("home_bytes_written") > 0
    assert steps[-1]["rates"]["write_amplification"] == pytest.approx(
        total("appended_bytes", "home_bytes_written") / total("updated_row_bytes"), abs=1e-4
    )


def test_what_was_exported_is_imported_into_a_row_log_and_trained_on_like_in_place(holdfast: Commands) -> None:
    holdfast.train("pool", *SETTINGS, "--steps", 6)
    holdfast("export", holdfast.root / "pool", holdfast.root / "out.safetensors")
    for name, settings in (("again", SETTINGS), ("in-place", ["--set", "pool.medium=memory"])):
        into = ("import", holdfast.root / "out.safetensors", holdfast.config, "--pool", holdfast.root / name)
        result = holdfast(*into, *settings)
        assert result.code == 0, result.err
        assert holdfast.digest(name).tables == holdfast.digest("pool").tables
        assert holdfast.train(name, "--steps", 9).code == 0
    assert holdfast.digest("again") == holdfast.digest("in-place")
    assert holdfast("verify", holdfast.root / "again").code == 0


def test_inspect_shows_what_of_the_row_log_is_used_and_merged(holdfast: Commands) -> None:
    holdfast.train("pool", *SETTINGS)
    found = inspected(holdfast)
    assert (found["store"], found["format_version"], found["step"], found["clean"]) == ("log", 5, 20, True)
    assert found["log"]["bytes"] == 8192 + 65536 + 4096  # checkpoints, ring, label
    used, merged = found["log"]["bytes_used"], found["log"]["merged_step"]
    assert isinstance(used, int) and isinstance(merged, int)
    assert 0 <= used <= 65536
    assert 0 < merged <= 20
    # Whether the last merge came after the last step is a matter of time; steps that it met may be left to the log.
    assert used > 0 or merged == 20
    text = holdfast("inspect", holdfast.root / "pool").out
    assert f"merged up to step {merged}" in text
    assert "row log 76.0 KiB" in text
    holdfast.train("in-place", "--set", "pool.medium=memory")
    tables = [(table["name"], table["touched_rows"]) for table in inspected(holdfast, "in-place")["tables"]]  # type: ignore[index]
    assert [(table["name"], table["touched_rows"]) for table in found["tables"]] == tables  # type: ignore[index]


def test_a_pool_in_use_is_inspected_and_evaluated(holdfast: Commands) -> None:
    config = read_config(RunConfig, holdfast.config, ROW_LOG)
    pool = holdfast.root / "pool"
    with open_trainer(config, pool) as trainer:
        for _ in trainer.steps():
            pass
        trainer.checkpoint.flush()
        found = inspected(holdfast)
        assert (found["in_use"], found["clean"], found["step"], found["dense_step"]) == (True, False, 20, 20)
        out = holdfast("eval", holdfast.config, "--pool", pool).out
        assert holdfast("digest", pool).code == 1
    assert holdfast("eval", holdfast.config, "--pool", pool).out == out


def test_a_crashed_pool_is_described_verified_and_recovered(holdfast: Commands) -> None:
    config = read_config(RunConfig, holdfast.config, [*ROW_LOG, "pool.log_bytes=1048576", "pool.dense_interval=100"])
    with open_trainer(config, holdfast.root / "alive") as trainer:
        for _, _ in zip(range(10), trainer.steps(), strict=False):
            pass
        trainer.pool.flush()
        left_behind(holdfast.root / "alive", holdfast.root / "pool")
    found = inspected(holdfast)
    assert (found["clean"], found["in_use"], found["step"], found["dense_step"]) == (False, False, 10, 0)
    assert found["recovery"]["exact_step"] == 0
    assert holdfast("verify", holdfast.root / "pool").code == 0
    shutil.copytree(holdfast.root / "pool", holdfast.root / "relaxed")
    first = holdfast.train("pool").out.splitlines()[0]
    assert "rolled back 10 steps" in first
    first = holdfast.train("relaxed", "--recovery", "relaxed").out.splitlines()[0]
    assert "kept the rows of step 10 beside the dense state of step 0 (relaxed)" in first
    holdfast.train("whole", "--set", "pool.medium=memory")
    assert holdfast.digest("pool") == holdfast.digest("whole")
    assert holdfast.digest("relaxed") != holdfast.digest("whole")


def test_a_signal_stops_a_run_with_a_window_at_a_digest_that_shows_no_window(holdfast: Commands) -> None:
    metrics = holdfast.root / "metrics.jsonl"
    process = start(
        *("train", holdfast.config, "--pool", holdfast.root / "pool", "--metrics", metrics, *SETTINGS),
        *("--set", "train.epochs=2000", "--set", "train.window=5"),
    )
    deadline = time.monotonic() + 60
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 10:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    step = inspected(holdfast)["step"]
    same = ("--set", "train.epochs=2000", "--set", "pool.medium=memory", "--set", "validation.num_samples=50")
    holdfast.train("whole", *same, "--steps", step)
    assert holdfast.digest("pool") == holdfast.digest("whole")


def test_verify_and_digest_name_the_home_that_is_damaged(holdfast: Commands) -> None:
    holdfast.train("pool", *SETTINGS)
    home = holdfast.root / "pool" / "shard-0000" / "table-0002.home"
    data = bytearray(home.read_bytes())
    for at in range(0, len(data), 512):
        data[at] ^= any(data[at : at + 512])
    home.write_bytes(data)
    for command in ("verify", "digest"):
        result = holdfast(command, holdfast.root / "pool")
        assert result.code == 1
        assert home.name in result.err
        assert "Traceback" not in result.err
