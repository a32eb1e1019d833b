"""Rows that leave the scratchpad wait in a victim cache: whatever its size and place, a run's bits are those of a run
without one, through kills, keys that go, and evaluations in between."""

from __future__ import annotations

import random
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
from holdfast.errors import BatchTooLarge, ConfigError, PoolFull

SAMPLES = 48
STEPS = 40


@pytest.fixture
def commands(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    return Commands(pool_root, monkeypatch, capfd)


def songs(pool: holdfast.Pool) -> holdfast.EmbeddingBagCollection:
    """A shop of songs: those of one row size drive one another out, and listeners are keys that go."""

    def table(name: str, dim: int, **more: Any) -> holdfast.EmbeddingBagConfig:
        return holdfast.EmbeddingBagConfig(name=name, embedding_dim=dim, feature_names=[name], **more)

    return holdfast.EmbeddingBagCollection(
        pool,
        [
            table("song", 24, num_embeddings=1500),
            table("album", 24, num_embeddings=400),
            table("genre", 4, num_embeddings=12),
            table("listener", 10, num_embeddings=None, data_type="bf16", ttl_steps=9, capacity=5000),
        ],
        optimizer=holdfast.RowWiseAdam(lr=0.05),
    )


def train(directory: Path, victims: holdfast.VictimCache | None, steps: int, **options: Any) -> dict[str, float]:
    options = {"log_bytes": 256 << 10, "scratchpad_bytes": 150_000, "medium": "block"} | options
    torch.manual_seed(1)
    with holdfast.Pool(directory, seed=5, victims=victims, **options) as pool:
        rows = songs(pool)
        net = torch.nn.Linear(24 + 24 + 4 + 10, 1)
        dense = torch.optim.SGD(net.parameters(), lr=0.01)
        checkpoint = holdfast.Checkpoint(pool, model=net, optimizer=dense)
        checkpoint.resume()
        while pool.step < steps:
            draws = torch.Generator().manual_seed(pool.step)

            def some(most: int, draws: torch.Generator = draws) -> tuple[torch.Tensor, torch.Tensor]:
                ids = (torch.rand(SAMPLES, generator=draws) ** 2 * most).long()
                return ids, torch.arange(SAMPLES)

            batch = {"song": some(1500), "album": some(400), "genre": some(12), "listener": some(2000)}
            if pool.step % 5 == 0:
                with torch.no_grad():
                    net(rows({**batch, "song": some(1500)}).values())
            dense.zero_grad()
            (net(rows(batch).values()) - 1).pow(2).mean().backward()
            dense.step()
            rows.optimizer.step()
            checkpoint.commit((pool.step + 1) * SAMPLES)
        pool.flush()
        traffic = pool.traffic()
    assert traffic is not None
    return traffic


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("without")
    assert train(directory / "pool", None, STEPS)["rows_from_victims"] == 0
    return digest_of_tables(directory / "pool")


@pytest.mark.parametrize(("size", "place"), [(3000, "memory"), (40_000, "file"), (1 << 20, "node")])
def test_rows_are_those_of_a_pool_without_one(pool_root: Path, expected: dict[str, str], size: int, place: str) -> None:
    where: dict[str, Any] = {"memory": {}, "node": {"nodes": (0,)}, "file": {"directory": "/dev/shm"}}[place]
    traffic = train(pool_root / "pool", holdfast.VictimCache(bytes=size, **where), STEPS)
    assert digest_of_tables(pool_root / "pool") == expected
    assert 0 < traffic["rows_from_victims"] < traffic["rows_missed"]
    assert traffic["victim_rows"] * 24 <= size


def test_what_it_has_is_not_read_from_the_drive(pool_root: Path) -> None:
    without = train(pool_root / "without", None, STEPS)
    beside = train(pool_root / "beside", holdfast.VictimCache(bytes=1 << 20), STEPS)
    # The scratchpad has fewer rows, as its memory says what is in the victim cache; the drive is read the less.
    assert beside["scratchpad_rows"] < without["scratchpad_rows"]
    assert beside["fetched_bytes"] < without["fetched_bytes"] / 2


LIFE = """
import sys
from pathlib import Path
import holdfast
sys.path[:0] = sys.argv[4:]
from test_victims import train
size = int(sys.argv[3])
train(Path(sys.argv[1]), holdfast.VictimCache(bytes=size) if size else None, int(sys.argv[2]))
"""


@pytest.mark.thorough
def test_kills_with_another_one_in_every_life_leave_no_trace(pool_root: Path, expected: dict[str, str]) -> None:
    draw = random.Random(3)
    directory, here = pool_root / "killed", str(Path(__file__).parent)
    for _ in range(5):
        size = str(draw.choice((0, 2000, 30_000, 500_000)))
        command = [sys.executable, "-c", LIFE, str(directory), str(STEPS), size, here, str(Path(here).parent)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            process.wait(timeout=2.0 + draw.random() * 2.0)
        except subprocess.TimeoutExpired:
            process.kill()
        _, said = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), said.decode()
    train(directory, holdfast.VictimCache(bytes=7000), STEPS)
    assert digest_of_tables(directory) == expected


def test_what_cannot_be_had_is_refused_before_anything_is_made(pool_root: Path) -> None:
    pool = pool_root / "pool"
    with pytest.raises(ConfigError, match="overwrites its rows in place"):
        train(pool, holdfast.VictimCache(bytes=1 << 20), 1, medium="memory")
    assert not pool.exists() or not list(pool.iterdir())
    for bad in (
        {"bytes": 0},
        {"bytes": -1},
        {"bytes": 10**23},
        {"bytes": 1 << 20, "nodes": (-1,)},
        {"bytes": 1 << 20, "nodes": (1 << 40,)},
    ):
        with pytest.raises(ConfigError, match="victims"):
            holdfast.VictimCache(**bad)


@pytest.mark.parametrize(
    ("victims", "error", "says"),
    [
        ({"directory": "/proc"}, ConfigError, "name a directory"),
        ({"directory": "/absent"}, ConfigError, "name a directory"),
        ({"nodes": (0, 999)}, ConfigError, "victims.nodes = .*999"),
        ({"nodes": (0,), "directory": "/dev/shm"}, ConfigError, "one of the two"),
        ({"bytes": 1 << 50, "directory": "/dev/shm"}, PoolFull, "free space there, or make it smaller"),
        ({"bytes": 1 << 60}, PoolFull, "make it smaller"),
    ],
)
def test_a_pool_is_whole_after_an_error_that_says_what_to_do(
    pool_root: Path, victims: dict[str, Any], error: type[Exception], says: str
) -> None:
    train(pool_root / "pool", None, 3)
    before = digest_of_tables(pool_root / "pool")
    with pytest.raises(error, match=says):
        train(pool_root / "pool", holdfast.VictimCache(**{"bytes": 1 << 20} | victims), 4)
    assert digest_of_tables(pool_root / "pool") == before
    train(pool_root / "pool", holdfast.VictimCache(bytes=1 << 20), 4)


def test_a_batch_that_is_too_large_is_told_what_it_takes_tags_included(pool_root: Path) -> None:
    victims = holdfast.VictimCache(bytes=1 << 20)
    with pytest.raises(BatchTooLarge) as caught:
        train(pool_root / "pool", victims, 1, scratchpad_bytes=60_000)
    wanted = int(str(caught.value).partition("scratchpad_bytes of ")[2].split()[0])
    train(pool_root / "pool", victims, 1, scratchpad_bytes=wanted)


def test_the_command_line_takes_one_and_lets_it_go(commands: Commands) -> None:
    pool = commands.root / "pool"
    options = ["--set", "pool.medium=block", "--set", "pool.scratchpad_bytes=60000"]
    half = commands("train", commands.config, "--pool", pool, *options, "--set", "train.steps=4",
                    "--set", "pool.victims.bytes=50000", "--set", "pool.victims.directory=/dev/shm")  # fmt: skip
    assert half.code == 0, half.err
    whole = commands("train", commands.config, "--pool", pool, *options)
    assert whole.code == 0, whole.err
    alone = commands("train", commands.config, "--pool", commands.root / "alone", *options)
    assert alone.code == 0, alone.err
    assert digest_of_tables(pool) == digest_of_tables(commands.root / "alone")
    wrong = commands("train", commands.config, "--pool", pool, *options, "--set", "pool.victims.bites=5")
    assert wrong.code != 0 and "bytes" in wrong.err and "Traceback" not in wrong.err
    without = commands("train", commands.config, "--pool", pool, *options, "--set", "pool.victims.directory=/dev/shm")
    assert without.code != 0 and "bytes" in without.err and "Traceback" not in without.err
