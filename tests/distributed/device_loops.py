"""A loop whose dense part is on a device, or on one that is only pretended, as one of its ranks runs it."""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holdfast
from own_loops import DIM, ROWS, batch_of, device_of, open_pool

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
from pretended_cuda import TracedMark, pretended_cuda


class Mixed(nn.Module):
    """Its last layer computes in bfloat16. It has a part that only some ranks use in a step, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3 * DIM + 4, 8)
        self.last = nn.Linear(8, 1).bfloat16()
        self.sometimes = nn.Parameter(torch.ones(()))
        self.never = nn.Parameter(torch.ones(5))
        self.is_used = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        if self.is_used:
            hidden = hidden * self.sometimes
        return self.last(hidden.bfloat16()).float()


def train(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """options: steps, max_norm, mixed (that network); pretended (the device), real (it is a GPU; else the processor);
    forgets (gradients are read before they have arrived); device (how rows are reached, see own_loops.device_of),
    device_of_rank (the same, of one of them), data_type."""
    if options.get("real"):
        holdfast.prepare_environment()
        return _train(directory, say, options, torch.device("cuda", 0))
    if not options.get("pretended"):
        return _train(directory, say, options, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch, pretended_cuda(patch) as machine:
        if options.get("forgets"):
            patch.setattr(TracedMark, "wait", lambda mark: None)
        _train(directory, say, options, torch.device("cuda", 0))
        say(problems=machine.problems)
    return None


def _train(directory: Path, say: Callable[..., None], options: dict[str, Any], device: torch.device) -> None:
    mine = options.get("device_of_rank", {}).get(os.environ.get("RANK"))
    options = options if mine is None else {**options, "device": mine}
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
        plain = nn.Sequential(nn.Linear(3 * DIM + 4, 8), nn.ReLU(), nn.Linear(8, 1))
        net = (Mixed() if options.get("mixed") else plain).to(device)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01, foreach=False)
        checkpoint = holdfast.Checkpoint(pool, model=net, optimizer=optimizer)
        say(joined=True, opened=checkpoint.resume())
        if pool.group.world_size > 1:
            say(summed_on=str(pool.group.device_of_sums(device)))
        if not pool.group.is_trainer:
            pool.serve()
            say(closed=True)
            return
        for step in range(pool.step + 1, options.get("steps", 6) + 1):
            ids, dense, labels = batch_of(step, 24, pool.part)
            if isinstance(net, Mixed):
                net.is_used = step % 3 == pool.group.rank
            vectors = rows(ids).values()
            assert vectors.device == device
            logits = net(torch.cat([vectors, dense.to(device)], dim=1)).squeeze(1)
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(logits, labels.to(device)).backward()
            before = {name: p.grad.data_ptr() for name, p in net.named_parameters() if p.grad is not None}
            pool.average_gradients(net)
            after = {name: p.grad.data_ptr() for name, p in net.named_parameters() if p.grad is not None}
            say(moved=[name for name in before if before[name] != after[name]], have=sorted(after))
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
