"""A signal ends `holdfast train` without waiting for a merge, however much of the row log is still to be merged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crash_runs import HERE, SRC
from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.pools.read_only import at_rest

CONFIG = """
[data.synthetic]
num_samples = 400000
rows = [20000, 20000, 20000, 20000, 20000, 20000, 20000, 20000, 20000, 20000, 20000, 20000]
num_dense = 3

[embedding]
dim = 32
optimizer = "rowwise_adagrad"
lr = 0.05

[model]
bottom = [8, 32]
top = [8, 1]

[train]
batch_size = 256

[pool]
medium = "block"
log_bytes = 8000000
scratchpad_bytes = 20000000
"""

# As the command does, on a disk that takes a second for each write home, but for those that make twelve tables: a merge
# writes to each of them.
COMMAND = """
import ctypes, sys
shim = ctypes.CDLL(None)
shim.holdfast_limit_rings(ctypes.c_long(0))
long = ctypes.c_long
shim.holdfast_fault(b"pwrite", b".home", long(13), long(1 << 40), 0, long(0), long(1000), long(-1))
from holdfast.cli import main
sys.argv = ["holdfast", *sys.argv[1:]]
main()
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = HERE / "fault_shim.cpp"
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-O1", source, "-o", library, "-ldl"], check=True)
    return library


def merged_home_bytes(pool: Path) -> int:
    return sum(512 * home.stat().st_blocks for home in pool.rglob("*.home"))


def test_sigterm_ends_a_run_after_a_few_writes_of_a_merge_that_is_slow(shim: Path, tmp_path: Path) -> None:
    config, pool = tmp_path / "run.toml", tmp_path / "pool"
    config.write_text(CONFIG)
    arguments = ["train", str(config), "--pool", str(pool)]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "LD_PRELOAD": str(shim)},
    )
    deadline = time.monotonic() + 120
    while merged_home_bytes(pool) < 50 * 4096:  # of hundreds that the merge writes
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no merge began"
        time.sleep(0.01)
    written = merged_home_bytes(pool)
    process.terminate()
    out, err = process.communicate(timeout=60)
    written_since = merged_home_bytes(pool) - written
    assert process.returncode == 128 + signal.SIGTERM, err
    # The merge's first table or two were written, a second each; ten more were to come, whatever else the machine does.
    assert written_since < 3 * written, f"{written_since} bytes home since the signal, {written} before\n{out}{err}"
    step = int(out.split(" is finished and durable")[0].rsplit(" ", 1)[1])
    with at_rest(pool) as (reader, _):
        assert _core.Reader(str(pool)).log_bytes_used > 2_000_000  # most of what was to be merged
        stopped = digest_pool(reader)
    whole = tmp_path / "whole"
    subprocess.run(
        [sys.executable, "-m", "holdfast", "train", str(config), "--pool", str(whole), "--steps", str(step)],
        env=environment,
        check=True,
        capture_output=True,
    )
    with at_rest(whole) as (reader, _):
        assert digest_pool(reader) == stopped
