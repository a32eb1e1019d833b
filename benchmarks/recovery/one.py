"""One life of a pool, in a process of its own: ``fill`` leaves a log full of what recovery has to undo, and dies;
``open`` recovers it, timed. Prints one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

import holdfast

_DIM = 16
_WORKING_SET_ROWS = 1 << 20  # the last rows of the table, whatever its size: what is touched is the same
_BATCH_ROWS = 1 << 15
_NEVER = 1 << 30  # steps from one dense state to the next


def _open(arguments: argparse.Namespace) -> tuple[holdfast.Pool, holdfast.EmbeddingBagCollection]:
    pool = holdfast.Pool(
        arguments.pool,
        medium=arguments.medium,
        log_bytes=arguments.log_bytes,
        scratchpad_bytes=256 << 20,
        dense_interval=_NEVER,
    )
    table = holdfast.EmbeddingBagConfig(
        name="t", num_embeddings=arguments.table_rows, embedding_dim=_DIM, feature_names=["f"]
    )
    return pool, holdfast.EmbeddingBagCollection(pool, [table], optimizer=holdfast.RowWiseAdagrad())


def fill(arguments: argparse.Namespace) -> dict[str, Any]:
    """A dense state at step 0, then steps until the log has no room for another."""
    pool, rows = _open(arguments)
    pool.core.write_dense(b"{}", [], 0)
    generator = torch.Generator().manual_seed(1)
    first = max(0, arguments.table_rows - _WORKING_SET_ROWS)
    offsets = torch.arange(_BATCH_ROWS)
    record_bytes = 0
    while (free := pool.core.log_bytes_free) >= 2 * record_bytes:
        ids = torch.randint(first, arguments.table_rows, (_BATCH_ROWS,), generator=generator)
        rows({"f": (ids, offsets)}).values().sum().backward()
        rows.optimizer.step()
        step = pool.commit(pool.core.cursor + _BATCH_ROWS)
        while pool.rows_durable_step < step:
            time.sleep(0.0005)
        record_bytes = max(record_bytes, free - pool.core.log_bytes_free)
    return {"steps": pool.step, "used_log_bytes": pool.core.log_bytes - pool.core.log_bytes_free}


def open_again(arguments: argparse.Namespace) -> dict[str, Any]:
    pool, _ = _open(arguments)
    report = pool.recovered
    result = {"seconds": report.seconds, "clean": report.clean, "rows_step": report.rows_step, "step": report.step}
    pool.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["fill", "open"])
    parser.add_argument("pool", type=Path)
    parser.add_argument("--medium", choices=["memory", "block"], required=True)
    parser.add_argument("--table-rows", type=int, required=True)
    parser.add_argument("--log-bytes", type=int, required=True)
    arguments = parser.parse_args()
    result = fill(arguments) if arguments.mode == "fill" else open_again(arguments)
    print(json.dumps(result), flush=True)
    if arguments.mode == "fill":
        os.kill(os.getpid(), signal.SIGKILL)  # recovery is for what a crash leaves


if __name__ == "__main__":
    main()
