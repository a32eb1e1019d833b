"""How long a crashed pool with a 100 GB table takes to open: one process fills the log and dies, another opens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holdfast

_EMBEDDING_DIM = 32
_NUM_EMBEDDINGS = 100_000_000_000 // (_EMBEDDING_DIM * 4)
_BATCH_SIZE = 2048
_LOOKUPS_PER_BAG = 26
_ZIPF_EXPONENT = 1.05
_HASH_MULTIPLIER = 2_654_435_761


def _ids(generator: torch.Generator) -> Tensor:
    """Zipf by the inverse of the continuous distribution: cumulative sums would be as many as the table's rows."""
    uniforms = torch.rand(_BATCH_SIZE * _LOOKUPS_PER_BAG, generator=generator, dtype=torch.float64)
    power = 1.0 - _ZIPF_EXPONENT
    ranks = (1.0 + uniforms * (float(_NUM_EMBEDDINGS) ** power - 1.0)) ** (1.0 / power)
    ids: Tensor = ranks.to(torch.int64) * _HASH_MULTIPLIER % _NUM_EMBEDDINGS
    return ids


def _build(
    directory: Path, dense_interval: int
) -> tuple[holdfast.Pool, holdfast.EmbeddingBagCollection, holdfast.Checkpoint]:
    pool = holdfast.Pool(directory, seed=1, dense_interval=dense_interval)
    rows = holdfast.EmbeddingBagCollection(
        pool,
        [
            holdfast.EmbeddingBagConfig(
                name="t0", num_embeddings=_NUM_EMBEDDINGS, embedding_dim=_EMBEDDING_DIM, feature_names=["f0"]
            )
        ],
        optimizer=holdfast.RowWiseAdagrad(),
    )
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 256))
    checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    return pool, rows, checkpoint


def fill(directory: Path, dense_interval: int) -> dict[str, Any]:
    """Steps whose rows become durable and whose dense state does not, until the log has no room for another: the most
    that recovery can have to undo. The process is to be killed now."""
    pool, rows, checkpoint = _build(directory, dense_interval)
    checkpoint.resume()
    generator = torch.Generator().manual_seed(1)
    offsets = torch.arange(_BATCH_SIZE + 1, dtype=torch.int64) * _LOOKUPS_PER_BAG
    record_bytes = 0
    while pool.core.log_bytes_free >= 1.1 * record_bytes:
        planned = rows.plan(holdfast.JaggedFeatures(["f0"], _ids(generator), offsets), ahead=False)
        capture = rows.capture(planned)
        record_bytes = max(record_bytes, capture.bytes)
        torch.autograd.backward(rows.lookup(capture, planned).sum())
        rows.optimizer.step()
        pool.commit(pool.core.cursor + _BATCH_SIZE)
    while pool.rows_durable_step < pool.step:
        time.sleep(0.001)
    return {
        "steps": pool.step,
        "record_bytes": record_bytes,
        "log_bytes": pool.core.log_bytes,
        "log_bytes_free": pool.core.log_bytes_free,
        "table_bytes": _NUM_EMBEDDINGS * _EMBEDDING_DIM * 4,
    }


def open_again(directory: Path, dense_interval: int) -> dict[str, Any]:
    """Opens the pool, rolls back, builds the collection, loads the dense state: all up to the first step."""
    # PyTorch imports its compiler when the first optimizer is made; imports do not count.
    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.01)
    begin, cpu_begin = time.perf_counter(), time.process_time()
    pool, _, checkpoint = _build(directory, dense_interval)
    step = checkpoint.resume()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    report = pool.recovered
    result = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "core_seconds": report.seconds,
        "clean": report.clean,
        "rows_step": report.rows_step,
        "step": step,
        "records_undone": report.records_undone,
        "rows_restored": report.rows_restored,
        "log_bytes": pool.core.log_bytes,
    }
    pool.close()
    return result
