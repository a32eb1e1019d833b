"""Loops over tables whose ids are keys, each as one of its ranks runs it. Functions of (directory, step) alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast
from holdfast.data.batch import JaggedFeatures
from holdfast.errors import HoldfastError
from own_loops import device_of, open_pool

DIM = 6
SIZE = 24
FEATURES = ["item", "seen", "tag"]


def tables(options: dict[str, Any]) -> list[holdfast.EmbeddingBagConfig]:
    """One that lies in all shards, read by two features, and one that lies whole."""
    names = ("ttl_steps", "max_keys", "stay", "admit_after", "admit_probability")
    policy = {name: options[name] for name in names if name in options}
    return [
        holdfast.EmbeddingBagConfig(
            num_embeddings=None, capacity=options.get("capacity", 9000), embedding_dim=DIM, name="item",
            feature_names=["item", "seen"], **policy,
        ),
        holdfast.EmbeddingBagConfig(
            num_embeddings=None, capacity=900, embedding_dim=DIM, name="tag", feature_names=["tag"], pooling="mean",
        ),
    ]  # fmt: skip


def batch_of(number: int, part: tuple[int, int], *, seen: int = 1) -> tuple[JaggedFeatures, torch.Tensor]:
    """Keys all over the 64 bits of a stream that moves on: old ones stay away, some come back. seen: ids of a bag."""
    draw = np.random.default_rng(number)
    born = draw.integers(max(0, 8 * number - 90), 8 * number, SIZE * (1 + seen))
    keys = (born.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)
    keys[0] = -1
    tags = draw.integers(-40, 40, (SIZE, 3))
    lengths = draw.integers(0, 4, SIZE)
    first, last = part[0] * SIZE // part[1], (part[0] + 1) * SIZE // part[1]
    samples = range(first, last)
    bags = [
        *([keys[i]] for i in samples),
        *(keys[SIZE + i * seen : SIZE + (i + 1) * seen] for i in samples),
        *(tags[i, : lengths[i]] for i in samples),
    ]
    offsets = torch.from_numpy(np.cumsum([0, *map(len, bags)]))
    values = torch.from_numpy(np.concatenate([np.asarray(bag, np.int64) for bag in bags]))
    labels = torch.from_numpy(draw.random(SIZE, np.float32)[first:last])
    return JaggedFeatures(FEATURES, values, offsets), labels


def train(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """options: steps; of `tables`; ahead (batches announced); dense (there is a network beside the rows);
    evaluate_every; seen; device. Without a network every number of trainers trains the same rows."""
    with open_pool(directory, options) as pool:
        random.seed(1), torch.manual_seed(3)
        np.random.seed(1)  # noqa: NPY002 - the checkpoint saves its state
        rows = holdfast.EmbeddingBagCollection(
            pool, tables(options), optimizer=holdfast.Adagrad(lr=0.3), device=device_of(options)
        )
        over = nn.Linear(3 * DIM if options.get("dense") else 1, 1)
        optimizer = torch.optim.Adam(over.parameters(), lr=0.01)
        checkpoint = holdfast.Checkpoint(pool, model=over, optimizer=optimizer)
        say(joined=True, opened=checkpoint.resume())
        if not pool.group.is_trainer:
            pool.serve()
            say(closed=True)
            return
        planned: dict[int, Any] = {}
        for step in range(pool.step + 1, options.get("steps", 12) + 1):
            for coming in range(step, min(step + options.get("ahead", 0), options.get("steps", 12)) + 1):
                if coming not in planned:
                    features, labels = batch_of(coming, pool.part, seen=options.get("seen", 1))
                    planned[coming] = rows.plan(features), labels
                    if options.get("ahead"):
                        rows.announce(planned[coming][0])
            plan, labels = planned.pop(step)
            pooled = rows(plan).values()
            scored = over(pooled).squeeze(1) if options.get("dense") else pooled.sum(dim=1)
            optimizer.zero_grad()
            ((scored - labels) ** 2).mean().backward()
            if options.get("dense"):
                pool.average_gradients(over)
                optimizer.step()
            rows.optimizer.step()
            checkpoint.commit()
            say(step=step, durable=pool.durable_step)
            if options.get("evaluate_every") and step % options["evaluate_every"] == 0:
                say(score=score(rows, pool.part))
        checkpoint.flush()
        say(durable=pool.durable_step, traffic=rows.traffic())
    say(closed=True)


@torch.no_grad()
def score(rows: holdfast.EmbeddingBagCollection, part: tuple[int, int]) -> list[float]:
    """Of keys that nobody has seen among those that are known, which leaves no trace. A number for each sample."""
    features, _ = batch_of(10_000, part)
    known, _ = batch_of(9, part)
    values = torch.cat([features.values()[: SIZE // 2], known.values()[: SIZE // 2]])
    of_both = JaggedFeatures(["item", "seen", "tag"], torch.cat([values] * 3), torch.arange(3 * len(values) + 1))
    rows.eval()
    scores = rows(of_both).values().sum(dim=1).tolist()
    rows.train()
    return scores


def until_full(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """Trains until it says what a table that is too small for its keys ends with."""
    try:
        train(directory, say, {**options, "capacity": 40})
    except HoldfastError as error:
        say(full=f"{type(error).__name__}: {error}")
        raise
