"""A row log on a medium of its own: rows, resumes and verbs are those of a pool that has it beside them."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_digests import digest_of_tables

import holdfast
from cli_runs import Commands
from holdfast.errors import ConfigError, Corrupted

ROWS, SAMPLES = 3000, 64


@pytest.fixture
def fast(pool_root: Path) -> Path:
    """The directory on the medium that syncs fastest."""
    directory = pool_root / "fast"
    directory.mkdir()
    return directory


@pytest.fixture
def commands(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(pool_root, monkeypatch, capfd)


def open_pool(directory: Path, fast: Path | None, **options: Any) -> holdfast.Pool:
    options = {"log_bytes": 256 << 10, "scratchpad_bytes": 100_000, "medium": "block"} | options
    log = None if fast is None else holdfast.LogMedium(directory=fast)
    return holdfast.Pool(directory, seed=3, log=log, **options)


def train(directory: Path, fast: Path | None, steps: int, **options: Any) -> dict[str, float]:
    """Up to so many steps; returns what moved."""
    with open_pool(directory, fast, **options) as pool:
        table = holdfast.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=16, name="t", feature_names=["f"])
        rows = holdfast.EmbeddingBagCollection(pool, [table], optimizer=holdfast.Adam(lr=0.1))
        while pool.step < steps:
            draws = torch.Generator().manual_seed(pool.step)
            ids = torch.randint(0, ROWS, (SAMPLES,), generator=draws)
            (rows({"f": (ids, torch.arange(SAMPLES))}).values() ** 2).sum().backward()
            rows.optimizer.step()
            pool.commit((pool.step + 1) * SAMPLES)
        pool.flush()
        traffic = pool.traffic()
    assert traffic is not None
    return traffic


def test_rows_are_those_of_a_pool_with_its_log_beside_them_and_the_log_is_a_tier(pool_root: Path, fast: Path) -> None:
    train(pool_root / "beside", None, 120)
    traffic = train(pool_root / "apart", fast, 120)
    assert digest_of_tables(pool_root / "apart") == digest_of_tables(pool_root / "beside")
    assert traffic["merges"] > 0
    # Of rows that the scratchpad had lost, some come from the log, some from home, some nobody had.
    assert 0 < traffic["rows_from_log"] < traffic["rows_fetched"]
    [log] = fast.glob("*.row-log")
    assert (pool_root / "apart" / "row-log-0000").readlink() == log.resolve()


def test_several_pools_have_their_logs_in_one_directory(pool_root: Path, fast: Path) -> None:
    for name in ("one", "two", "elsewhere/one"):
        (pool_root / name).parent.mkdir(exist_ok=True)
        train(pool_root / name, fast, 4)
    assert len(list(fast.glob("*.row-log"))) == 3
    assert digest_of_tables(pool_root / "one") == digest_of_tables(pool_root / "elsewhere" / "one")


def test_a_pool_that_is_there_finds_its_log_and_refuses_another_place(pool_root: Path, fast: Path) -> None:
    directory, other = pool_root / "pool", pool_root / "other"
    other.mkdir()
    train(directory, fast, 3)
    train(directory, None, 5)
    train(directory, fast, 6)
    before = digest_of_tables(directory)
    with pytest.raises(ConfigError, match=r"log.directory = .*other.*lies in .*fast"):
        open_pool(directory, other)
    train(pool_root / "beside", None, 3)
    with pytest.raises(ConfigError, match="leave it out"):
        open_pool(pool_root / "beside", fast)
    # As the message says: the log is moved, and the link put right.
    [log] = fast.glob("*.row-log")
    shutil.move(log, other / log.name)
    with pytest.raises(Corrupted, match="mount the medium"):
        open_pool(directory, None)
    (directory / "row-log-0000").unlink()
    (directory / "row-log-0000").symlink_to(other / log.name)
    assert digest_of_tables(directory) == before
    train(directory, other, 8)


def test_what_cannot_have_one_is_refused_before_anything_is_made(pool_root: Path, fast: Path) -> None:
    with pytest.raises(ConfigError, match="overwrites its rows in place"):
        train(pool_root / "pool", fast, 1, medium="memory")
    with pytest.raises(ConfigError, match="no such directory; make it"):
        train(pool_root / "pool", fast / "absent", 1)
    assert not list(fast.iterdir())
    train(pool_root / "pool", fast, 1)


def test_a_further_collection_makes_the_pool_anew_and_leaves_one_log(pool_root: Path, fast: Path) -> None:
    with open_pool(pool_root / "pool", fast) as pool:
        for name in ("a", "b"):
            table = holdfast.EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name=name, feature_names=[name])
            holdfast.EmbeddingBagCollection(pool, [table], optimizer=holdfast.SGD(lr=0.1))
    assert len(list(fast.glob("*.row-log"))) == 1


LIFE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
from test_log_medium import train
train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
"""


def test_a_kill_at_any_time_leaves_no_trace(pool_root: Path, fast: Path, is_sample: bool) -> None:
    draw = random.Random(8)
    expected = pool_root / "expected"
    train(expected, None, 60)
    directory, here = pool_root / "killed", str(Path(__file__).parent)
    command = [sys.executable, "-c", LIFE, str(directory), str(fast), "60", here, str(Path(here).parent)]
    for _ in range(2 if is_sample else 6):
        process = subprocess.Popen([*command], stderr=subprocess.PIPE)
        try:
            process.wait(timeout=2.0 + draw.random() * 2.0)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
    train(directory, fast, 60)
    assert digest_of_tables(directory) == digest_of_tables(expected)
    assert len(list(fast.glob("*.row-log"))) == 1


def test_the_command_line_says_where_it_is(commands: Commands, fast: Path) -> None:
    pool = commands.root / "pool"
    options = ["--set", "pool.medium=block", "--set", f"pool.log.directory={fast}"]
    assert commands("train", commands.config, "--pool", pool, *options, "--set", "train.steps=4").code == 0
    trained = commands("train", commands.config, "--pool", pool, "--set", "pool.medium=block")
    assert trained.code == 0, trained.err  # it finds its log
    inspected = commands("inspect", pool)
    assert f"(in {fast.resolve()})" in inspected.out
    found = json.loads(commands("inspect", pool, "--json").out)
    assert found["log"]["directories"] == [str(fast.resolve())]
    assert found["bytes"] > found["log"]["bytes"] > 0
    assert commands("verify", pool).code == 0
    # A snapshot does not care, and what is restored of it has its log beside its rows.
    assert commands("snapshot", pool, commands.root / "kept").code == 0
    assert commands("restore", commands.root / "kept", commands.root / "restored").code == 0
    assert digest_of_tables(commands.root / "restored") == digest_of_tables(pool)
    wrong = commands("train", commands.config, "--pool", commands.root / "new", "--set", "pool.log.directory=/absent")
    assert wrong.code != 0 and "Traceback" not in wrong.err
    typo = commands("train", commands.config, "--pool", commands.root / "new", "--set", "pool.log.directry=/absent")
    assert "directory" in typo.err


def test_a_damaged_log_is_named_by_where_it_lies(pool_root: Path, fast: Path) -> None:
    directory = pool_root / "pool"
    train(directory, fast, 3)  # of which nothing is merged
    [log] = fast.glob("*.row-log")
    with log.open("r+b") as file:
        file.seek(8192 + 100)
        file.write(os.urandom(64))
    with pytest.raises(Corrupted, match=log.name):
        open_pool(directory, None)


PROVEN = """
import sys
import torch
import holdfast
holdfast.prepare_environment()
torch.manual_seed(1)
with holdfast.Pool("pool", medium="block", log_bytes=256 << 10, log=holdfast.LogMedium(directory=sys.argv[1])) as pool:
    table = holdfast.EmbeddingBagConfig(num_embeddings=500, embedding_dim=8, name="t", feature_names=["f"])
    rows = holdfast.EmbeddingBagCollection(pool, [table], optimizer=holdfast.SGD(lr=0.1))
    net = torch.nn.Linear(8, 1)
    dense = torch.optim.Adam(net.parameters())
    checkpoint = holdfast.Checkpoint(pool, model=net, optimizer=dense)
    checkpoint.resume()
    while pool.step < 20:
        ids = torch.randint(0, 500, (32,), generator=torch.Generator().manual_seed(pool.step))
        dense.zero_grad()
        (net(rows({"f": (ids, torch.arange(32))}).values()) ** 2).mean().backward()
        dense.step()
        rows.optimizer.step()
        checkpoint.commit((pool.step + 1) * 32)
"""


@pytest.mark.thorough
def test_proving_a_script_leaves_no_logs_behind(commands: Commands, fast: Path, is_sample: bool) -> None:
    script = commands.root / "script.py"
    script.write_text(PROVEN)
    times = 1 if is_sample else 2
    proven = commands("prove", "--steps", 15, "--runs", times, "--kills", times, "--", sys.executable, script, fast)
    assert proven.code == 0, proven.err
    assert not list(fast.iterdir())
