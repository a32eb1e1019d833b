"""The batches of benchmarks/larger: the trace's shares, a bijection to rows, and pure functions of the number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from holdfast.data.loader import Loader
from larger.amplification import predicted, step_sizes
from larger.workload import (
    MIN_ROWS,
    TRACE_POINTS,
    FileOfBatches,
    IdDrawer,
    TraceLaw,
    Workload,
    make_workload,
    write_ids,
)
from peers.shapes import KAGGLE

ROWS = 100_000
SMALL = Workload(
    name="small", shape=replace(KAGGLE, num_tables=3, num_embeddings=ROWS, batch_size=4096, lookups_per_bag=16)
)


def share_of_most_accessed(ids: np.ndarray, num_rows: int) -> float:
    counts = np.sort(np.bincount(ids.ravel(), minlength=ROWS))[::-1]
    return float(counts[:num_rows].sum() / counts.sum())


@pytest.mark.parametrize(("fraction", "share"), TRACE_POINTS)
def test_the_top_rows_take_the_share_that_the_trace_gives_them(fraction: float, share: float) -> None:
    drawer = IdDrawer(SMALL)
    ids = np.concatenate([drawer.draw(number)[0] for number in range(64)])
    # of 4.2 million draws; the rows that happened to be drawn more often than the law says add a little
    assert share_of_most_accessed(ids, round(fraction * ROWS)) == pytest.approx(share, abs=0.003)


@pytest.mark.parametrize("num_rows", [MIN_ROWS, 12_345, ROWS, 4_000_000])
def test_ranks_stay_within_the_table_and_rise_with_the_number(num_rows: int) -> None:
    law = TraceLaw(num_rows)
    numbers = np.concatenate([np.linspace(0.0, 1.0, 100_001)[:-1], [np.nextafter(1.0, 0.0)]])
    ranks = law.ranks(numbers)
    assert ranks[0] == 0
    assert ranks[-1] == num_rows - 1
    assert (np.diff(ranks) >= 0).all()


def test_a_table_with_too_few_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2000"):
        TraceLaw(MIN_ROWS - 1)


def test_every_rank_has_a_row_of_its_own() -> None:
    (scatter, *_) = IdDrawer(SMALL)._scatters
    assert len(np.unique(scatter(np.arange(ROWS)))) == ROWS


def test_hot_rows_lie_on_pages_all_over_and_elsewhere_in_every_table() -> None:
    hot = [scatter(np.arange(50)) for scatter in IdDrawer(SMALL)._scatters]
    for rows in hot:
        assert len(np.unique(rows // (ROWS // 50))) > 25
    assert len(np.intersect1d(hot[0], hot[1])) < 5


def test_a_batch_is_a_function_of_its_number() -> None:
    first, again = IdDrawer(SMALL), IdDrawer(SMALL)
    first.draw(0)
    assert np.array_equal(first.draw(7), again.draw(7))
    assert not np.array_equal(first.draw(7), first.draw(8))
    assert not np.array_equal(first.draw(7), IdDrawer(replace(SMALL, seed=2)).draw(7))


def test_uniform_ids_are_even_and_a_share_of_them_mixes() -> None:
    even = IdDrawer(replace(SMALL, uniform_share=1.0))
    ids = np.concatenate([even.draw(number)[0] for number in range(64)])
    assert share_of_most_accessed(ids, ROWS // 2) < 0.58  # of 42 draws a row, give or take six
    half = IdDrawer(replace(SMALL, uniform_share=0.5))
    ids = np.concatenate([half.draw(number)[0] for number in range(64)])
    assert share_of_most_accessed(ids, ROWS // 100) == pytest.approx(0.5 * 0.957 + 0.5 * 0.01, abs=0.005)


def test_the_loader_hands_out_the_batches_in_their_order(tmp_path: Path) -> None:
    workload = make_workload("kaggle", quick=True)
    write_ids(workload, tmp_path / "ids", 3)
    source = FileOfBatches(workload, tmp_path / "ids")
    drawer = IdDrawer(workload)
    with Loader(source, batch_size=workload.shape.batch_size, seed=0, shuffle=False) as loader:
        for number, batch in zip(range(4), loader, strict=False):
            assert np.array_equal(batch.features.values().numpy(), drawer.draw(number % 3).ravel())


@pytest.mark.parametrize("standing_steps", [0, 1])
def test_predicted_write_amplification_counts_every_block_once_where_rows_do_not_come_again(
    standing_steps: int, tmp_path: Path
) -> None:
    workload = make_workload("uniform", quick=True)
    write_ids(workload, tmp_path / "ids", 4)
    source = FileOfBatches(workload, tmp_path / "ids")
    appended_bytes, updated_bytes = step_sizes(source)
    # two steps a merge, then none to two more, the later the table; an image of 68 + 4 bytes fits seven times into a
    # sector, and a block has eight of them
    blocks = set()
    for table in range(26):
        rows = {row for number in range(2) for row in source.read_ids(number)[table].ravel().tolist()}
        for number in range(2, 2 + round(2 * (table + 0.5) / 26 * standing_steps)):
            rows -= set(source.read_ids(number)[table].ravel().tolist())
        blocks |= {(table, row // 56) for row in rows}
    blocks |= {(table, block + 1) for table, block in blocks if (table, block + 2) in blocks}
    expected = (appended_bytes + len(blocks) * 4096 / 2) / updated_bytes
    found = predicted(source, 2 * appended_bytes, standing_steps * appended_bytes)
    assert found == pytest.approx(expected)
