"""A process that was started without its standard streams keeps them out of a pool's files, and one whose output is
refused says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_runs import CONFIG
from holdfast.admin.digest import digest_pool
from holdfast.pools.read_only import at_rest

pytestmark = pytest.mark.dear

LOOP = """
import os, sys
from pathlib import Path
import torch
import holdfast
with holdfast.Pool(sys.argv[1], seed=1, medium=sys.argv[2]) as pool:
    tables = [holdfast.EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=4, feature_names=["f"])]
    rows = holdfast.EmbeddingBagCollection(pool, tables, optimizer=holdfast.SGD(lr=0.1))
    while pool.step < 3:
        rows({"f": torch.arange(9)}).values().sum().backward()
        rows.optimizer.step()
        pool.commit(pool.step + 1)
        for said in range(3):
            try:
                os.write(said, b"libgomp: Thread creation failed" * 9)
            except OSError:
                pass
"""


def run_without_streams(command: list[str | Path]) -> None:
    subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], check=True, timeout=120)


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_what_is_said_to_a_stream_that_is_closed_is_written_into_no_pool(medium: str, pool_root: Path) -> None:
    run_without_streams([sys.executable, "-c", LOOP, pool_root / "pool", medium])
    with at_rest(pool_root / "pool") as (reader, _):
        assert digest_pool(reader).step == 3


def test_holdfast_train_runs_without_any_stream(pool_root: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "holdfast",
        "train",
        config,
        "--pool",
        pool_root / "pool",
        "--set",
        "train.steps=3",
    ]
    run_without_streams(command)
    with at_rest(pool_root / "pool") as (reader, _):
        assert digest_pool(reader).step == 3


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_a_full_disk_refuses_is_an_error_that_names_it(unbuffered: str) -> None:
    """It was exit status 120, or a disk that nothing named."""
    with Path("/dev/full").open("w") as full:
        ended = holdfast_version(full.fileno(), unbuffered)
    assert (ended.returncode, ended.stderr.partition(";")[0]) == (
        1,
        "holdfast: standard output: No space left on device",
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_any_more_ends_a_command_without_a_word(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = holdfast_version(writing, unbuffered)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (1, "")


def holdfast_version(output: int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast", "--version"],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
