"""A loop whose dense part is on a device that is only pretended, as one of its ranks runs it."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from own_loops import DIM, ROWS, batch_of, device_of, open_pool

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
from pretended_cuda import TracedMark, pretended_cuda


def train(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """options: steps, max_norm; pretended (the device; else the processor); forgets (gradients are read before they
    have arrived); device (how rows are reached, see own_loops.device_of), data_type."""
    if not options.get("pretended"):
        return _train(directory, say, options, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch, pretended_cuda(patch) as machine:
        if options.get("forgets"):
            patch.setattr(TracedMark, "wait", lambda mark: None)
        _train(directory, say, options, torch.device("cuda", 0))
        say(problems=machine.problems)
    return None


def _train(directory: Path, say: Callable[..., None], options: dict[str, Any], device: torch.device) -> None:
    on_device = dataclasses.replace(device_of({"device": {"rows": "near_memory"}, **options}), kind=device.type)
    with open_pool(directory, options) as pool:
        tables = [
            holdfast.EmbeddingBagConfig(
                num_embeddings=ROWS[name],
                embedding_dim=DIM,
                name=name,
                feature_names=[name],
                data_type=options.get("data_type", "fp32"),
            )
            for name in ("item", "shop", "words")
        ]
        rows = holdfast.EmbeddingBagCollection(pool, tables, optimizer=holdfast.Adam(lr=0.02), device=on_device)
        random.seed(1), np.random.seed(1), torch.manual_seed(5)  # noqa: NPY002
        net = nn.Sequential(nn.Linear(3 * DIM + 4, 8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, foreach=False)
        checkpoint = holdfast.Checkpoint(pool, model=net, optimizer=optimizer)
        say(joined=True, opened=checkpoint.resume())
        if not pool.group.is_trainer:
            pool.serve()
            say(closed=True)
            return
        for step in range(pool.step + 1, options.get("steps", 6) + 1):
            ids, dense, labels = batch_of(step, 24, pool.part)
            vectors = rows(ids).values()
            assert vectors.device == device
            logits = net(torch.cat([vectors, dense.to(device)], dim=1)).squeeze(1)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, labels.to(device)).backward()
            pool.average_gradients(net)
            if max_norm := options.get("max_norm"):
                holdfast.clip_grad_norm_(net.parameters(), [rows], max_norm)
            optimizer.step()
            rows.optimizer.step()
            checkpoint.commit()
            say(step=step, durable=pool.durable_step)
        with torch.no_grad():
            score = float(rows(batch_of(10_000, 24, pool.part)[0]).values().sum())
            say(score=score, traffic=rows.traffic())
        checkpoint.flush()
    say(closed=True)
