"""A dialled pool asks its medium for what it moves, waits for that, and is the same pool."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, tensor

from holdfast import SGD, EmbeddingBagCollection, EmbeddingBagConfig, JaggedFeatures, MediumDial, Pool
from holdfast.admin.digest import digest_pool
from holdfast.errors import ConfigError
from holdfast.pools.read_only import open_reader
from holdfast_lab.placement.dial_probe import dial_of, probe_dialled

ROWS, DIM, BATCH = 1000, 32, 64
FAST = {
    "read_bandwidth_bytes_per_s": 1e15,
    "write_bandwidth_bytes_per_s": 1e15,
    "read_latency_s": 0.0,
    "write_latency_s": 0.0,
    "outstanding_requests": 1.0,
    "granularity_bytes": 256,
    "sync_latency_s": 0.0,
}


def features(seed: int) -> JaggedFeatures:
    ids = np.random.default_rng(seed).integers(0, ROWS, BATCH)
    return JaggedFeatures(keys=("t",), values=tensor(ids), offsets=tensor(np.arange(BATCH + 1)))


def unique(seed: int) -> int:
    return len(np.unique(features(seed).values().numpy()))


class Steps:
    """A pool of one table in `directory`, and steps of it without a dense part."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.pool = Pool(directory, medium="memory", **options)
        table = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["t"])
        self.rows = EmbeddingBagCollection(self.pool, [table], optimizer=SGD(lr=0.1))

    def forward(self, seed: int) -> Tensor:
        return self.rows(features(seed)).values()

    def step(self, seed: int) -> None:
        self.forward(seed).sum().backward()
        self.rows.optimizer.step()
        self.pool.commit(0)


def asked(pool: Pool) -> dict[str, float]:
    counts = pool.core.dial_counts
    assert counts is not None
    return counts


def test_a_step_asks_for_its_rows_once_to_read_and_once_to_write_and_for_its_log(tmp_path: Path):
    steps = Steps(tmp_path, dial=MediumDial(**FAST))
    steps.step(0)
    steps.pool.flush()
    counts = asked(steps.pool)
    rows = unique(0)
    assert counts["read_requests"] == counts["read_granules"] == rows
    assert counts["write_requests"] == counts["written_granules"] == rows
    row_bytes = 4 * DIM + 8  # its number, too
    assert rows * row_bytes < counts["stream_written_bytes"] < rows * row_bytes + 1024


def test_a_row_and_its_state_lie_apart_and_are_two_requests(tmp_path: Path):
    from holdfast import Adam

    pool = Pool(tmp_path, medium="memory", dial=MediumDial(**FAST))
    table = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["t"])
    rows = EmbeddingBagCollection(pool, [table], optimizer=Adam(lr=0.1))
    rows(features(0))
    assert asked(pool)["read_requests"] == 2 * unique(0)


def test_evaluation_pays_for_its_reads(tmp_path: Path):
    import torch

    steps = Steps(tmp_path, dial=MediumDial(**FAST))
    with torch.no_grad():
        steps.forward(1)
    assert asked(steps.pool)["read_requests"] == unique(1)


def test_rows_captured_ahead_are_asked_for_once_and_those_handed_over_never(tmp_path: Path):
    steps = Steps(tmp_path, dial=MediumDial(**FAST))
    pooled = steps.forward(0)
    read = asked(steps.pool)["read_requests"]
    assert steps.rows.capture_ahead(steps.rows.plan(features(1)))
    pooled.sum().backward()
    steps.rows.optimizer.step()
    own = np.setdiff1d(features(1).values().numpy(), features(0).values().numpy())
    assert asked(steps.pool)["read_requests"] - read == len(own)


def test_what_is_trained_is_the_same_whatever_the_medium(tmp_path: Path):
    digests = set()
    options: list[dict[str, Any]] = [
        {},
        {"dial": MediumDial(like="pmem", stretch=3)},
        {"dial": MediumDial(like="cxl-dram"), "synchronous": True},
    ]
    for number, option in enumerate(options):
        steps = Steps(tmp_path / str(number), **option)
        for seed in range(5):
            steps.step(seed)
        steps.pool.close()
        digests.add(digest_pool(open_reader(tmp_path / str(number))).tables["t"])
    assert len(digests) == 1


def test_a_verb_returns_no_sooner_than_its_medium_is_declared_to_be_done(tmp_path: Path):
    slow = {**FAST, "read_latency_s": 1e-3}
    steps = Steps(tmp_path, dial=MediumDial(**slow))
    began = time.perf_counter()
    steps.forward(0)
    assert time.perf_counter() - began >= unique(0) * 1e-3
    assert asked(steps.pool)["declared_s"] == pytest.approx(unique(0) * 1e-3)


def test_a_pool_in_blocks_asks_for_requests_and_syncs(tmp_path: Path):
    pool = Pool(tmp_path, medium="block", scratchpad_bytes=1 << 20, dial=MediumDial(like="ssd"), synchronous=True)
    table = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["t"])
    rows = EmbeddingBagCollection(pool, [table], optimizer=SGD(lr=0.1))
    rows(features(0)).values().sum().backward()
    rows.optimizer.step()
    before = asked(pool)
    pool.commit(0)
    after = asked(pool)
    assert after["syncs"] > before["syncs"]
    assert after["stream_written_bytes"] - before["stream_written_bytes"] >= unique(0) * 4 * DIM


def test_a_synchronous_commit_returns_when_its_step_is_durable(tmp_path: Path):
    steps = Steps(tmp_path, synchronous=True)
    for seed in range(3):
        steps.step(seed)
        assert steps.pool.durable_step == steps.pool.step == seed + 1


def test_a_pool_without_a_dial_counts_nothing(tmp_path: Path):
    steps = Steps(tmp_path)
    steps.step(0)
    assert steps.pool.core.dial_counts is None


def test_a_dialled_pool_says_so_and_promises_what_its_real_medium_does(tmp_path: Path):
    plain, dialled = Steps(tmp_path / "plain"), Steps(tmp_path / "dialled", dial=MediumDial(like="pmem", stretch=2))
    assert dialled.pool.level == plain.pool.level
    assert "pmem, 19.5 and 7 GB/s, 486 and 1,204 ns, clocks stretched 2 times" in dialled.pool.description


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "read_bandwidth_bytes_per_s is missing"),
        ({"like": "pmem", "read_latency_s": -1.0}, "read_latency_s = -1"),
        ({"like": "pmem", "write_bandwidth_bytes_per_s": 0.0}, "write_bandwidth_bytes_per_s = 0"),
        ({"like": "pmem", "stretch": float("inf")}, "stretch = inf"),
        ({"like": "tape"}, "like = 'tape'"),
    ],
)
def test_figures_that_no_medium_has_are_refused(options: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        MediumDial(**options)


def test_figures_override_those_of_the_medium_and_all_are_stretched():
    dial = MediumDial(like="pmem", read_latency_s=1e-6, stretch=10)
    assert dial.figures == pytest.approx((3.9e9, 1.4e9, 1.4e9, 1e-5, 6.02e-6, 60, 256, 0.0, math.inf, False))


def test_a_probe_of_a_dialled_medium_finds_it_no_faster_than_declared(tmp_path: Path):
    steps = []
    found = probe_dialled(tmp_path, MediumDial(like="cxl-dram", stretch=100), on_step=steps.append)
    assert sum(steps) == 6
    assert {figure.name for figure in found.figures} >= {"read_bandwidth_bytes_per_s", "read_latency_s"}
    for figure in found.figures:
        slower = figure.measured / figure.declared if figure.name.endswith("_s") else figure.declared / figure.measured
        assert figure.name.endswith("per_s") or slower > 0.97, str(figure)
        assert not figure.name.endswith("per_s") or figure.measured < 1.03 * figure.declared, str(figure)
    assert not list(tmp_path.iterdir())


def test_a_dial_is_named_or_read_from_a_file(tmp_path: Path):
    assert dial_of("ssd") == MediumDial(like="ssd")
    path = tmp_path / "mine.toml"
    path.write_text('like = "pmem"\nstretch = 20\n')
    assert dial_of(str(path)) == MediumDial(like="pmem", stretch=20)
    with pytest.raises(ConfigError, match="no such file"):
        dial_of("tape")


def test_rows_that_the_cache_has_no_room_for_are_read_by_every_lookup_and_by_the_update(tmp_path: Path):
    half = unique(0) * 4 * DIM / 2
    steps = Steps(tmp_path, dial=MediumDial(**{**FAST, "cache_bytes": half}))
    pooled = steps.forward(0)
    assert asked(steps.pool)["read_requests"] == unique(0) + BATCH // 2  # captured, then half of the lookups
    pooled.sum().backward()
    steps.rows.optimizer.step()
    assert asked(steps.pool)["stream_read_bytes"] == half


def test_a_relaxed_lookup_asks_for_as_many_lookups_in_its_two_parts(tmp_path: Path):
    steps = Steps(tmp_path, dial=MediumDial(**{**FAST, "cache_bytes": 0.0}))
    first, then = (steps.rows.plan(features(seed)) for seed in (0, 1))
    capture = steps.rows.capture(first)
    steps.rows.lookup(capture, first)
    before = asked(steps.pool)["read_requests"]
    steps.rows.lookup_ahead(then, first)
    own = np.setdiff1d(features(1).values().numpy(), features(0).values().numpy())
    own_lookups = int(np.isin(features(1).values().numpy(), own).sum())
    assert asked(steps.pool)["read_requests"] - before == len(own) + own_lookups


def test_a_link_of_two_ways_is_declared_to_the_core():
    assert MediumDial(like="ssd", duplex=True).figures == (*MediumDial(like="ssd").figures[:-1], True)
