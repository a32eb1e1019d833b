"""A pool that is opened again fills its scratchpad beside the first steps, and nothing but time depends on it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import Corrupted

ROWS = 20_000
DIM = 16
SAMPLES = 256


class Life:
    """A pool of one table from one opening to the next."""

    def __init__(self, directory: Path, rows: int = ROWS, **options: Any) -> None:
        self.directory, self.num_rows = directory, rows
        options = {"log_bytes": 4 << 20} | options
        self.pool = holdfast.Pool(directory, seed=1, medium="block", **options)
        table = holdfast.EmbeddingBagConfig(num_embeddings=rows, embedding_dim=DIM, name="t", feature_names=["f"])
        self.rows = holdfast.EmbeddingBagCollection(self.pool, [table], optimizer=holdfast.Adam(lr=0.1))

    def fill(self) -> None:
        """Every row is written, at home."""
        values = np.random.default_rng(5).random((self.num_rows, DIM), np.float32)
        self.pool.core.import_rows(0, 0, values.view(np.uint8).reshape(-1), None)

    def steps(self, count: int, samples: int = SAMPLES) -> None:
        for _ in range(count):
            generator = torch.Generator().manual_seed(self.pool.step)
            ids = torch.randint(0, self.num_rows, (samples,), generator=generator)
            (self.rows({"f": (ids, torch.arange(samples))}).values() ** 2).sum().backward()
            self.rows.optimizer.step()
            self.pool.commit((self.pool.step + 1) * samples)

    def traffic(self) -> dict[str, float]:
        traffic = self.pool.traffic()
        assert traffic is not None
        return traffic

    def warm_up(self) -> dict[str, float]:
        """Waits until it is over."""
        end = time.monotonic() + 60
        while self.traffic()["is_warming"]:
            assert time.monotonic() < end, "it warms for ever"
            time.sleep(0.002)
        return self.traffic()

    def end(self) -> str:
        self.pool.close()
        return digest_pool(_core.Reader(str(self.directory))).whole


def filled(directory: Path, steps: int = 0, **options: Any) -> Path:
    life = Life(directory, **options)
    life.fill()
    life.steps(steps)
    life.pool.close()
    return directory


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    make_cold(monkeypatch)


def make_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that are opened do not warm."""
    opened = _core.Pool

    class Cold(opened):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, warm=False, **options)

    monkeypatch.setattr(_core, "Pool", Cold)


def test_tables_that_fit_are_in_the_scratchpad_soon_and_no_step_waits_for_their_rows(tmp_path: Path) -> None:
    life = Life(filled(tmp_path / "pool", steps=3))
    found = life.warm_up()
    assert found["rows_warmed"] == ROWS
    life.steps(20)
    assert life.traffic()["rows_missed"] == 0
    # Home was read in large pieces, not row by row.
    assert found["fetch_reads"] < ROWS / 100
    life.pool.close()


def test_home_is_read_in_the_order_in_which_its_rows_were_written(tmp_path: Path) -> None:
    life = Life(tmp_path / "pool")
    life.steps(300)
    assert life.traffic()["merges"] > 0
    life.pool.close()
    life = Life(tmp_path / "pool")
    found = life.warm_up()
    at_home = found["rows_warmed"] - found["index_entries"]
    assert at_home > ROWS / 4
    assert found["fetch_reads"] < ROWS / 100
    assert found["rows_initial"] == 0
    life.steps(5)
    life.pool.close()


def test_what_is_in_memory_a_merge_does_not_read_in_the_log(tmp_path: Path) -> None:
    life = Life(filled(tmp_path / "pool"))
    life.steps(20)
    life.pool.flush()
    life.pool.core.empty_log()
    found = life.traffic()
    assert found["merged_bytes"] > 0
    assert found["log_bytes_read"] == 0
    end = life.end()
    assert end == digest_pool(_core.Reader(str(filled(tmp_path / "whole", steps=20)))).whole


def test_rows_that_nobody_has_written_are_not_brought_in(tmp_path: Path) -> None:
    life = Life(tmp_path / "pool")
    life.steps(3)
    life.pool.flush()
    touched = int(life.traffic()["index_entries"])
    life.pool.close()
    life = Life(tmp_path / "pool")
    assert life.warm_up()["rows_warmed"] == touched < ROWS
    life.pool.close()


def test_of_tables_that_do_not_fit_the_rows_of_the_log_come_in(tmp_path: Path) -> None:
    filled(tmp_path / "pool", steps=6)
    life = Life(tmp_path / "pool", scratchpad_bytes=600_000)
    found = life.warm_up()
    assert 0 < found["index_entries"] == found["rows_warmed"] < found["scratchpad_rows"] < ROWS
    life.pool.close()
    life = Life(tmp_path / "pool", scratchpad_bytes=100_000)
    found = life.warm_up()
    assert found["rows_warmed"] == found["scratchpad_rows"] < found["index_entries"]
    life.steps(20)  # whatever came in gives way
    life.pool.close()


@pytest.mark.usefixtures("cold")
def test_a_pool_can_be_opened_without(tmp_path: Path) -> None:
    life = Life(filled(tmp_path / "pool", steps=3))
    life.steps(3)
    assert life.traffic()["rows_warmed"] == 0
    life.pool.close()


@pytest.mark.dear
@pytest.mark.parametrize("scratchpad_bytes", [100_000, 600_000, 100_000_000])
def test_lives_that_warm_end_with_the_bits_of_one_that_does_not(tmp_path: Path, scratchpad_bytes: int) -> None:
    """Each opening warms beside steps that change the very rows, with merges underneath: the log holds some ten."""
    draws = random.Random(scratchpad_bytes)
    filled(tmp_path / "lives", scratchpad_bytes=scratchpad_bytes)
    done = 0
    while done < 120:
        life = Life(tmp_path / "lives", scratchpad_bytes=scratchpad_bytes)
        steps = min(draws.randint(1, 30), 120 - done)
        time.sleep(draws.choice([0, 0, 0.001, 0.01]))
        life.steps(steps)
        done += steps
        end = life.end()
    whole = Life(tmp_path / "whole", scratchpad_bytes=scratchpad_bytes)
    whole.fill()
    whole.steps(120)
    assert end == whole.end()


def test_a_batch_that_leaves_its_rows_to_the_sweep_has_the_bits_of_one_that_fetches_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(directory: Path, rows: int) -> tuple[str, float]:
        """The digest of four steps, and the rows that they lacked: more than are fetched beside a sweep."""
        options = {"rows": rows, "log_bytes": 64 << 20}
        life = Life(filled(directory, **options), **options)
        life.steps(4, samples=20_000)
        missed = life.traffic()["rows_missed"]
        return life.end(), missed

    # Of few rows a fast machine's sweep is over before the first step.
    for rows in (150_000, 600_000, 2_400_000):
        left, missed = end(tmp_path / f"left {rows}", rows)
        if missed > 0:
            break
    assert missed > 0
    make_cold(monkeypatch)
    fetched, missed = end(tmp_path / "fetched", rows)
    assert missed > 0
    assert left == fetched


def test_a_batch_that_leaves_its_rows_to_the_sweep_does_not_wait_for_one_that_has_failed(tmp_path: Path) -> None:
    options = {"rows": 150_000, "log_bytes": 64 << 20}
    home = next((filled(tmp_path / "pool", steps=1, **options) / "shard-0000").glob("*.home"))
    with home.open("r+b") as file:
        file.write(b"\0\1\2\3")  # of the first row that was imported
    life = Life(tmp_path / "pool", **options)
    with pytest.raises(Corrupted):
        life.steps(200, samples=20_000)
    life.pool.__exit__(Corrupted, None, None)


KILLED = """
import os, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_warming import Life
directory, seconds = Path(sys.argv[2]), float(sys.argv[3])
life = Life(directory)
threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
life.steps(60 - life.pool.step)
life.pool.close()
os._exit(0)
"""


@pytest.mark.thorough
def test_a_kill_in_the_warming_changes_no_bit(tmp_path: Path) -> None:
    draws = random.Random(7)
    filled(tmp_path / "killed")
    for _ in range(4):
        seconds = str(draws.uniform(0.0, 0.05))
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path / "killed"), seconds],
            env=os.environ | {"MKL_CBWR": "AUTO,STRICT"},
            timeout=100,
            check=False,
        )
        assert done.returncode in (0, -signal.SIGKILL)
    life = Life(tmp_path / "killed")
    life.steps(60 - life.pool.step)
    filled(tmp_path / "whole", steps=60)
    assert life.end() == digest_pool(_core.Reader(str(tmp_path / "whole"))).whole


def test_closing_does_not_wait_until_everything_is_warm(tmp_path: Path) -> None:
    filled(tmp_path / "pool", rows=3_000_000)
    life = Life(tmp_path / "pool", rows=3_000_000)
    began = time.monotonic()
    life.pool.close()
    assert time.monotonic() - began < 1.0


def test_a_damaged_row_ends_the_warming_and_is_found_by_the_step_that_needs_it(tmp_path: Path) -> None:
    home = next((filled(tmp_path / "pool", steps=1) / "shard-0000").glob("*.home"))
    with home.open("r+b") as file:
        file.seek(home.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    life = Life(tmp_path / "pool")
    assert life.warm_up()["rows_warmed"] < ROWS
    with pytest.raises(Corrupted):
        life.steps(200)
    life.pool.__exit__(Corrupted, None, None)
