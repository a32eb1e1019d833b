"""benchmarks/larger: outsiders over tables that nobody has touched yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from larger.outsiders import MappedFiles, make_outsider
from larger.systems import Settings
from larger.workload import FileOfBatches, Workload, make_workload, write_ids


def workload_of_new_tables() -> Workload:
    small = make_workload("kaggle", quick=True)
    return replace(small, shape=replace(small.shape, num_tables=3, num_embeddings=40_000, batch_size=64))


def test_a_first_pass_over_mapped_files_takes_the_space_of_the_rows_that_it_touches(tmp_path: Path) -> None:
    workload = workload_of_new_tables()
    write_ids(workload, tmp_path / "ids", 3)
    directory = tmp_path / "files"
    directory.mkdir()
    settings = Settings(directory=directory, scratchpad_bytes=1 << 20, log_bytes=1 << 20, new_tables=True)
    source = FileOfBatches(workload, tmp_path / "ids")
    system = make_outsider("mmap", workload, source, settings, tmp_path)
    for _ in range(3):
        system.step()
    system.close()
    touched = [source.read_ids(number)[0].ravel() for number in range(3)]
    rows = torch.unique(torch.cat([torch.from_numpy(ids.astype("int64")) for ids in touched]))
    files = MappedFiles(workload, directory, new_tables=True)
    [trained, *_] = files.read([rows] * 3)
    others = torch.tensor([row for row in range(2000) if row not in set(rows.tolist())])
    [untouched, *_] = files.read([others] * 3)
    files.close()
    assert (trained[:, -1] > 0).all(), "rows that were trained have state"
    assert (trained[:, :-1].abs() > 0).any(dim=1).all(), "they began with weights"
    assert trained.isfinite().all()
    assert not untouched.any()
    taken = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
    assert taken < workload.table_bytes / 2
