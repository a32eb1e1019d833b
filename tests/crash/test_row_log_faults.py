"""What a pool with a row log says when something is too small, missing or damaged; and that nothing is lost by it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import BatchTooLarge, ConfigError, Corrupted, PoolFailed, PoolFull
from holdfast.pools.dial import MediumDial
from holdfast.pools.log_medium import LogMedium
from holdfast.pools.optim import Adam
from holdfast.pools.pool import Pool
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.rows.embedding import EmbeddingBagCollection
from holdfast_lab.placement.thread_time import thread_seconds

ROWS = 5000
LOG_BYTES = 512 << 10
TABLES = [
    EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=16, name="wide", feature_names=["f"]),
    EmbeddingBagConfig(num_embeddings=60, embedding_dim=4, name="narrow", feature_names=["g"]),
]


class Rows:
    """A pool of two tables in training. Each step's ids are a function of its number. Context manager: closes it."""

    def __init__(
        self, directory: Path, *, medium: str = "block", rows: int = ROWS, log_bytes: int = LOG_BYTES, **options: Any
    ) -> None:
        self.rows = rows
        self.pool = Pool(directory, seed=1, medium=medium, log_bytes=log_bytes, **options)
        wide = EmbeddingBagConfig(num_embeddings=rows, embedding_dim=16, name="wide", feature_names=["f"])
        self.emb = EmbeddingBagCollection(self.pool, [wide, TABLES[1]], optimizer=Adam(lr=0.1))

    def plan(self, number: int, samples: int = 64):
        generator = torch.Generator().manual_seed(number)
        bags = torch.arange(samples)
        return self.emb.plan(
            {
                "f": (torch.randint(0, self.rows, (samples,), generator=generator), bags),
                "g": (torch.randint(0, 60, (samples,), generator=generator), bags),
            }
        )

    def update(self, planned) -> None:
        (self.emb(planned).values() ** 2).sum().backward()
        self.emb.optimizer.step()

    def step(self, samples: int = 64) -> None:
        number = self.pool.step + 1
        self.update(self.plan(number, samples))
        self.pool.commit(number * samples)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.pool.__exit__(*error)  # type: ignore[arg-type]


def digest(directory: Path) -> str:
    return digest_pool(_core.Reader(str(directory))).whole


def trained(directory: Path, steps: int, **options: int) -> Path:
    with Rows(directory, **options) as rows:
        rows.steps(steps)
    return directory


def number_before(words: str, message: str) -> int:
    found = re.search(words, message)
    assert found is not None, message
    return int(found[1])


# Too small.


def test_a_log_that_is_too_small_for_a_batch_says_how_large_it_must_be(pool_root: Path) -> None:
    with Rows(pool_root / "small", log_bytes=64 << 10) as rows:
        with pytest.raises(BatchTooLarge) as raised:
            rows.step(samples=512)
        assert rows.pool.step == 0
        rows.step(samples=8)
    assert _core.Reader(str(pool_root / "small")).commit["step"] == 1
    needed = number_before(r"log_bytes of (\d+) or more", str(raised.value))
    with Rows(pool_root / "enough", log_bytes=needed) as rows:
        for number in range(1, 13):
            rows.update(rows.plan(1, 512))
            rows.pool.commit(number)
    with Rows(pool_root / "less", log_bytes=needed - 4096) as rows, pytest.raises(BatchTooLarge):
        rows.step(samples=512)


def test_waiting_for_room_in_the_log_is_counted(pool_root: Path) -> None:
    def has_waited(rows: Rows) -> bool:
        traffic = rows.pool.core.traffic()
        assert traffic is not None
        return traffic["log_stall_seconds"] > 0

    with Rows(pool_root / "roomy") as rows:
        rows.steps(3)
        assert not has_waited(rows)
    with Rows(pool_root / "small", log_bytes=64 << 10) as rows, pytest.raises(BatchTooLarge) as raised:
        rows.step(samples=1024)
    # A merge takes longer than the steps that such a log has room for: home is slower than the log by far.
    needed = number_before(r"log_bytes of (\d+) or more", str(raised.value))
    slow = MediumDial(like="ssd", read_bandwidth_bytes_per_s=2e6, write_bandwidth_bytes_per_s=2e6)
    log = LogMedium(dial=MediumDial(like="ssd"))
    with Rows(pool_root / "tight", log_bytes=2 * needed, dial=slow, log=log) as rows:
        while not has_waited(rows):
            assert rows.pool.step < 100
            rows.step(samples=1024)  # other rows in each: what a later step writes, a merge leaves to it


def test_a_step_of_forwards_that_are_too_large_for_the_log_together_is_not_committed(pool_root: Path) -> None:
    directory = trained(pool_root / "pool", 3, log_bytes=120 << 10)
    before = digest(directory)
    rows = Rows(directory)
    for part in range(4):
        (rows.emb(rows.plan(100 + part)).values() ** 2).sum().backward()
    rows.emb.optimizer.step()
    with pytest.raises(BatchTooLarge, match="the step's rows"):
        rows.pool.commit(1)
    with pytest.raises(PoolFailed):
        rows.step()
    with pytest.raises(PoolFailed):
        rows.pool.close()
    with Rows(directory) as rows:
        assert rows.pool.step == 3
    assert digest(directory) == before


def test_a_scratchpad_that_is_too_small_for_a_batch_says_how_large_it_must_be(pool_root: Path) -> None:
    with Rows(pool_root / "pool", scratchpad_bytes=20_000) as rows:
        with pytest.raises(BatchTooLarge) as raised:
            rows.step(samples=256)
        assert rows.pool.step == 0
        rows.step(samples=8)
    needed = number_before(r"scratchpad_bytes of (\d+) or more", str(raised.value))
    with Rows(pool_root / "pool", scratchpad_bytes=needed - 1) as rows, pytest.raises(BatchTooLarge):
        rows.update(rows.plan(1, 256))
    with Rows(pool_root / "pool", scratchpad_bytes=needed) as rows:
        assert rows.pool.step == 1
        rows.update(rows.plan(1, 256))


def test_a_scratchpad_that_is_too_small_for_rows_of_one_size_says_of_which(pool_root: Path) -> None:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=1000, embedding_dim=dim, feature_names=[name])
        for name, dim in (("narrow", 4), ("wide", 64))
    ]
    with Pool(pool_root / "pool", medium="block", scratchpad_bytes=60_000) as pool:
        rows = EmbeddingBagCollection(pool, tables, optimizer=Adam(lr=0.1))
        ids = torch.arange(200)
        with pytest.raises(BatchTooLarge) as raised:
            rows({"narrow": ids, "wide": ids})
    found = re.search(r"one batch has 200 rows of 768 bytes, .* has room for (\d+) of that size", str(raised.value))
    assert found is not None
    assert int(found[1]) < 200


def test_a_scratchpad_without_room_for_a_row_is_a_config_error(pool_root: Path) -> None:
    with Rows(pool_root / "pool", scratchpad_bytes=100) as rows, pytest.raises(ConfigError, match="scratchpad_bytes"):
        rows.step()


def test_a_window_that_does_not_fit_shrinks_and_is_counted(pool_root: Path) -> None:
    def train(directory: Path, window: int, scratchpad_bytes: int) -> dict[str, float]:
        with Rows(directory, scratchpad_bytes=scratchpad_bytes) as rows:
            upcoming = []
            for number in range(1, 31):
                while len(upcoming) < window:
                    upcoming.append(rows.plan(number + len(upcoming)))
                    rows.emb.announce(upcoming[-1])
                rows.update(upcoming.pop(0) if upcoming else rows.plan(number))
                rows.pool.commit(number)
            traffic = rows.pool.core.traffic()
            assert traffic is not None
            return traffic

    shrunk = train(pool_root / "shrunk", 10, 60_000)
    roomy = train(pool_root / "roomy", 10, 4 << 20)
    train(pool_root / "none", 0, 60_000)
    assert shrunk["window_shrunk"] > 0
    assert roomy["window_shrunk"] == roomy["demand_fetches"] == 0
    assert digest(pool_root / "shrunk") == digest(pool_root / "roomy") == digest(pool_root / "none")


# Damaged.


def refuses(directory: Path, *words: str) -> None:
    """Opening and reading raise Corrupted with all of these words, and opening changes nothing."""
    files = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}
    for opening in (lambda: Rows(directory), lambda: _core.Reader(str(directory))):
        with pytest.raises(Corrupted) as raised:
            opening()
        assert all(word in str(raised.value) for word in words), raised.value
    assert files == {path: path.read_bytes() for path in files}


HOME = Path("shard-0000") / "table-0000.home"


@pytest.mark.parametrize("name", [HOME, Path("shard-0000") / "table-0001.addresses", Path("row-log-0000")], ids=str)
def test_a_file_that_is_missing_or_has_another_size_is_named(pool_root: Path, name: Path) -> None:
    directory = trained(pool_root / "pool", 20)
    whole = (directory / name).read_bytes()
    (directory / name).unlink()
    refuses(directory, name.name)
    for cut in (
        whole[: len(whole) // 2 // 4096 * 4096],
        whole[:-4096],
        whole[:-1],
        whole[:100],
        b"",
        whole + bytes(4096),
    ):
        (directory / name).write_bytes(cut)
        refuses(directory, name.name)
    (directory / name).write_bytes(whole)
    trained(directory, 1)
    assert digest(directory) == digest(trained(pool_root / "whole", 21))


def test_a_row_that_does_not_hold_at_home_is_named_when_it_is_read_and_by_verify(pool_root: Path) -> None:
    directory = trained(pool_root / "pool", 60)
    home = directory / HOME
    data = bytearray(home.read_bytes())
    rows_end = len(data) - 4096  # behind them is the file's label
    written = [at for at in range(0, rows_end, 512) if any(data[at : at + 512])]
    for at in written:
        data[at + 5] ^= 1
    home.write_bytes(data)
    problems = _core.Reader(str(directory)).verify()
    assert problems
    assert all(home.name in problem and "offset" in problem for problem in problems)
    with pytest.raises(Corrupted, match=home.name):
        digest(directory)
    with Rows(directory) as rows, pytest.raises(Corrupted, match=home.name), torch.no_grad():
        rows.emb(rows.plan(1, 4000))


def test_a_row_log_without_a_checkpoint_that_holds_is_named(pool_root: Path) -> None:
    directory = trained(pool_root / "pool", 5)
    log = directory / "row-log-0000"
    data = bytearray(log.read_bytes())
    for offset in (0, 4096):
        data[offset + 20] ^= 1
    log.write_bytes(data)
    refuses(directory, log.name, "neither checkpoint")


def test_a_record_that_was_durable_and_does_not_hold_is_named(pool_root: Path) -> None:
    directory = trained(pool_root / "pool", 5)
    log = directory / "row-log-0000"
    data = bytearray(log.read_bytes())
    data[8192 + 3 * 4096 : 8192 + 4 * 4096] = bytes(4096)  # in the second record
    log.write_bytes(data)
    refuses(directory, log.name)


def test_a_pool_is_not_opened_as_what_it_was_not_made_as(pool_root: Path) -> None:
    trained(pool_root / "block", 1)
    trained(pool_root / "memory", 1, medium="memory")
    with pytest.raises(ConfigError, match=r"medium = 'memory'.*was made as 'block'"):
        Rows(pool_root / "block", medium="memory")
    with pytest.raises(ConfigError, match=r"medium = 'block'.*was made as 'memory'"):
        Rows(pool_root / "memory", medium="block")
    for name in ("block", "memory"):
        with Rows(pool_root / name, medium="auto") as rows:
            assert rows.pool.step == 1


def test_what_a_creation_that_did_not_end_left_is_not_in_the_way(pool_root: Path) -> None:
    directory = trained(pool_root / "pool", 3)
    _core.mark_unpublished(str(directory))
    (directory / "pool.holdfast").unlink()
    expected = digest(trained(pool_root / "whole", 5))
    assert digest(trained(directory, 5)) == expected


# Full.


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 24 MiB. Needs the right to mount a loop device, as root may have."""
    image, directory = tmp_path / "image", tmp_path / "disk"
    directory.mkdir()
    with image.open("wb") as file:
        file.truncate(24 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(image)], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("no mkfs.ext4")
    if subprocess.run(["mount", "-o", "loop", image, directory], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a loop device")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "tmpfs"
    directory.mkdir()
    options = ["-t", "tmpfs", "-o", "size=9m", "none", str(directory)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a tmpfs")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@pytest.mark.parametrize("medium", [pytest.param("small_disk", marks=pytest.mark.thorough), "small_tmpfs"])
def test_a_full_medium_ends_training_and_with_space_the_same_run_goes_on(
    medium: str, pool_root: Path, request: pytest.FixtureRequest
) -> None:
    root: Path = request.getfixturevalue(medium)
    many = 200_000  # × more bytes than the medium has
    ballast = root / "ballast"
    ballast.write_bytes(bytes(6 << 20))  # more than a merge writes: half the log, a block for every row
    rows = Rows(root / "pool", rows=many)
    with pytest.raises(PoolFull, match=r"space.*opened again"):
        rows.steps(5000)
    reached = rows.pool.step
    with pytest.raises(PoolFull):
        rows.pool.close()
    threads = {name for _, name in thread_seconds()}
    assert not threads & {"hf-merge", "hf-commit"}, "whoever opens the pool next is the only one that writes"
    assert reached > 10
    ballast.unlink()
    with Rows(root / "pool", rows=many) as rows:
        assert reached - 4 <= rows.pool.step <= reached, "no more than what was on its way"
        rows.steps(reached + 5 - rows.pool.step)
    with Rows(pool_root / "whole", medium="memory", rows=many) as rows:
        rows.steps(reached + 5)
    assert digest(root / "pool") == digest(pool_root / "whole")
