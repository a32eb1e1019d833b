"""Loops of users' own, each as one of its ranks runs it. None knows how many ranks there are but through its pool.

A loop takes the pool's directory, what to say things with, and options; it is a function of (directory, step) alone,
so any two lives of it end alike.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.group import shared_pool

ROWS = {"item": 3000, "shop": 40, "words": 700}
DIM = 6
Batch = tuple[dict[str, tuple[Tensor, Tensor]], Tensor, Tensor]


def batch_of(number: int, size: int, part: tuple[int, int]) -> Batch:
    """Ids, dense columns and labels of this trainer's part of a batch."""
    generator = torch.Generator().manual_seed(number)
    first, last = part[0] * size // part[1], (part[0] + 1) * size // part[1]
    item = (torch.rand(size, generator=generator) ** 2 * ROWS["item"]).long()
    shop = torch.randint(0, ROWS["shop"], (size,), generator=generator)
    lengths = torch.randint(0, 4, (size,), generator=generator)
    words = torch.randint(0, ROWS["words"], (size, 3), generator=generator)
    dense = torch.randn(size, 4, generator=generator)
    labels = (torch.rand(size, generator=generator) < 0.4).float()
    ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths[first:last].cumsum(0)])
    mine = torch.cat([row[:n] for row, n in zip(words[first:last], lengths[first:last], strict=True)])
    one_each = torch.arange(last - first + 1)
    ids = {"item": (item[first:last], one_each), "shop": (shop[first:last], one_each), "words": (mine, ends)}
    return ids, dense[first:last], labels[first:last]


def open_pool(directory: Path, options: dict[str, Any]) -> holdfast.Pool:
    group = holdfast.GroupOptions(
        shards=8,
        split_rows=1000,
        timeout=options.get("timeout", 10.0),
        memory_ranks=options.get("memory_ranks", 0),
        memory_ranks_at=options.get("memory_ranks_at", ()),
        shared_memory=options.get("shared_memory", True),
    )
    return holdfast.Pool(
        directory,
        seed=11,
        medium=options.get("medium", "memory"),
        log_bytes=options.get("log_bytes"),
        scratchpad_bytes=200_000,
        dense_interval=options.get("dense_interval", 1),
        recovery=options.get("recovery", "exact"),
        log=holdfast.LogMedium(directory=options["logs"]) if "logs" in options else None,
        group=group,
    )


def device_of(options: dict[str, Any]) -> holdfast.DeviceConfig:
    """options: device, what to call DeviceConfig with; else rows are looked up beside the pool."""
    return holdfast.DeviceConfig(**options.get("device", {}))


def tables(*names: str) -> list[holdfast.EmbeddingBagConfig]:
    return [
        holdfast.EmbeddingBagConfig(num_embeddings=ROWS[name], embedding_dim=DIM, name=name, feature_names=[name])
        for name in names
    ]


class Ranker(nn.Module):
    """Two collections, which update in different ways; dropout, and batch statistics that differ between ranks.
    sequences: the one of words does not pool, and an attention over its vectors does."""

    def __init__(
        self, pool: holdfast.Pool, dropout: float, device: holdfast.DeviceConfig, *, sequences: bool = False
    ) -> None:
        super().__init__()
        collection = functools.partial(holdfast.EmbeddingBagCollection, pool, device=device)
        self.things = collection(tables("item", "shop"), optimizer=holdfast.Adam(lr=0.02))
        of_words = functools.partial(holdfast.EmbeddingCollection, pool, device=device) if sequences else collection
        self.words = of_words(tables("words"), optimizer=holdfast.RowWiseAdagrad(lr=0.1))
        self.query = nn.Linear(DIM, 1) if sequences else None
        self.over = nn.Sequential(
            nn.Linear(3 * DIM + 4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1)
        )

    def forward(self, ids: Any, dense: Tensor) -> Tensor:
        words = self.words(ids[1])
        if self.query is None:
            return self.of_rows(self.things(ids[0]).values(), words.values(), dense)
        vectors = words["words"].to_padded_dense(3)
        pooled = (self.query(vectors).softmax(dim=1) * vectors).sum(dim=1)
        return self.of_rows(self.things(ids[0]).values(), pooled, dense)

    def of_rows(self, things: Tensor, words: Tensor, dense: Tensor) -> Tensor:
        return self.over(torch.cat([things, words, dense], dim=1)).squeeze(1)


def train(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """options: steps, micro_batches, ahead (batches announced), evaluate_every, max_norm, scaler, overflow_at (a step
    in which rank 1's gradients are not finite), skip_averages_at, odd_lr_at, rows_not_updated_at and
    words_not_updated_at (of rank 1), settle_every, dropout, sequences, fewer_on_rank_1 (steps), stop (a file: ranks
    kill themselves once it is there), device. Each rank has a generator of its own in `extra`, and sums its losses."""
    steps, micro_batches = options.get("steps", 8), options.get("micro_batches", 1)
    with open_pool(directory, options) as pool:
        rank = pool.group.rank
        random.seed(1), np.random.seed(1)
        torch.manual_seed(100 + rank)
        dropout, sequences = options.get("dropout", 0.2), options.get("sequences", False)
        model = Ranker(pool, dropout, device_of(options), sequences=sequences)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        collections = [model.things, model.words]
        noise = torch.Generator().manual_seed(7 + rank)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if options.get("scaler") else None
        sums = {"loss": 0.0}
        extra = {"noise": noise, "sums": sums}
        checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer, scaler=scaler, extra=extra)
        resumed = checkpoint.resume()
        sums |= checkpoint.saved("sums")
        say(joined=True, opened=resumed, way=pool.group.way)
        if not pool.group.is_trainer:
            pool.serve()
            say(closed=True)
            return
        announced: dict[int, Any] = {}

        def planned(number: int) -> tuple[Any, Tensor, Tensor]:
            ids, dense, labels = batch_of(number, 24, pool.part)
            things = {name: ids[name] for name in ("item", "shop")}
            return (model.things.plan(things), model.words.plan({"words": ids["words"]})), dense, labels

        if rank == 1:
            steps -= options.get("fewer_on_rank_1", 0)
        last = steps * micro_batches
        for step in range(resumed + 1, steps + 1):
            optimizer.zero_grad()
            for micro in range(micro_batches):
                number = (step - 1) * micro_batches + micro + 1
                for coming in range(number, min(number + options.get("ahead", 0), last) + 1):
                    if coming not in announced:
                        announced[coming] = planned(coming)
                        if options.get("ahead"):
                            for collection, plan in zip(collections, announced[coming][0], strict=True):
                                collection.announce(plan)
                ids, dense, labels = announced.pop(number)
                dense = dense + 0.1 * torch.randn(dense.shape, generator=noise)
                loss = nn.functional.binary_cross_entropy_with_logits(model(ids, dense), labels) / micro_batches
                if options.get("overflow_at") == step and rank == 1:
                    loss = loss * float("inf")
                (loss if scaler is None else scaler.scale(loss)).backward()
            if options.get("skip_averages_at") != step:
                pool.average_gradients(model)
            optimizers = [optimizer, *(collection.optimizer for collection in collections)]
            if rank == 1 and options.get("odd_lr_at") == step:
                model.words.optimizer.param_groups[0]["lr"] /= 2
            if rank == 1 and options.get("rows_not_updated_at") == step:
                del optimizers[1:]
            if rank == 1 and options.get("words_not_updated_at") == step:
                del optimizers[2:]
            if scaler is not None:
                for each in optimizers:
                    scaler.unscale_(each)
            if max_norm := options.get("max_norm"):
                say(norm=float(holdfast.clip_grad_norm_(model.parameters(), collections, max_norm)))
            for each in optimizers:
                each.step() if scaler is None else scaler.step(each)
            if scaler is not None:
                scaler.update()
            sums["loss"] += float(loss)
            checkpoint.commit()
            say(step=step, durable=pool.durable_step, loss=float(loss), sum=sums["loss"])
            if "stop" in options and Path(options["stop"]).exists():
                os.kill(os.getpid(), signal.SIGKILL)
            if options.get("settle_every") and step % options["settle_every"] == 0:
                pool.flush()
            if options.get("evaluate_every") and step % options["evaluate_every"] == 0:
                say(score=score(model, pool.part))
        if options.get("flush", True):
            checkpoint.flush()
        say(durable=pool.durable_step, traffic=model.things.traffic())
    say(closed=True)


@torch.no_grad()
def score(model: Ranker, part: tuple[int, int]) -> float:
    model.eval()
    ids, dense, _ = batch_of(10_000, 24, part)
    scored = model(({name: ids[name] for name in ("item", "shop")}, {"words": ids["words"]}), dense)
    model.train()
    return float(scored.sum())


def rows_alone(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """No dense part to speak of: the loss is a mean over samples of what was pooled, so the rows of any number of
    trainers should be those of one."""
    with open_pool(directory, options) as pool:
        rows = holdfast.EmbeddingBagCollection(pool, tables("item", "words"), optimizer=holdfast.SGD(lr=0.5))
        shift = nn.Linear(1, 1)
        checkpoint = holdfast.Checkpoint(pool, model=shift, optimizer=torch.optim.SGD(shift.parameters()))
        say(joined=True, opened=checkpoint.resume())
        if not pool.group.is_trainer:
            pool.serve()
            return
        for step in range(pool.step + 1, options.get("steps", 6) + 1):
            ids, _, labels = batch_of(step, 24, pool.part)
            pooled = rows({name: ids[name] for name in ("item", "words")}).values()
            ((pooled.sum(dim=1) - labels) ** 2).mean().backward()
            rows.optimizer.step()
            checkpoint.commit()
            say(step=step)
        checkpoint.flush()
    say(closed=True)


def ids_on_rank_0_alone(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """The bags of the other ranks are empty, in training and in evaluation, or they have no samples (bags)."""
    with open_pool(directory, options) as pool:
        rows = holdfast.EmbeddingBagCollection(pool, tables("shop"), optimizer=holdfast.SGD(lr=0.5))
        checkpoint = holdfast.Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[])
        say(joined=True, opened=checkpoint.resume())
        is_first = pool.group.rank == 0
        ids = torch.arange(6) if is_first else torch.empty(0, dtype=torch.long)
        asked = {"shop": (ids, torch.arange(7) if is_first else torch.zeros(options["bags"] + 1, dtype=torch.long))}
        for _ in range(options["steps"]):
            rows(asked).values().sum().backward()
            rows.optimizer.step()
            checkpoint.commit()
        rows.eval()
        say(score=float(rows(asked).values().sum()))
        checkpoint.flush()
    say(closed=True)


def on_unlike_machines(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """Of each rank the scratchpad that it has by itself is larger than that of the one before."""
    shared_pool.default_scratchpad_bytes = lambda: (1 + int(os.environ["RANK"])) << 20
    with holdfast.Pool(directory, medium="block", log_bytes=1 << 20, group=holdfast.GroupOptions(shards=8)) as pool:
        rows = holdfast.EmbeddingBagCollection(pool, tables("item"), optimizer=holdfast.SGD(lr=0.5))
        checkpoint = holdfast.Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[])
        say(joined=True, opened=checkpoint.resume())
        for _ in range(options["steps"]):
            ids, _, _ = batch_of(pool.step + 1, 24, pool.part)
            rows({"item": ids["item"]}).values().sum().backward()
            rows.optimizer.step()
            checkpoint.commit()
        checkpoint.flush()
    say(closed=True)


def weighted(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """Bags whose ids have weights, of no ids and of many. options: steps; learned: a dense parameter is in the weights;
    pairs: a split table's bags have several ids, too; ahead; not_finite_at: a step in which a weight of rank 1 is;
    capture_ahead; device; two_losses: a backward pass for each of two; no_gradient_at: a step in which rank 1's dense
    gradient is not finite; overflows_at: a step in which rows do, of finite gradients; resumes_before: a step before
    which it resumes once more; goes_on: uses the pool when it is closed."""
    with open_pool(directory, options) as pool:
        names = ["item", "words", *(["pairs"] if options.get("pairs") else [])]
        configs = [
            holdfast.EmbeddingBagConfig(
                num_embeddings=ROWS.get(name, ROWS["item"]), embedding_dim=DIM, name=name, feature_names=[name],
                pooling="sum" if name == "item" else "mean",
            )
            for name in names
        ]  # fmt: skip
        rows = holdfast.EmbeddingBagCollection(pool, configs, optimizer=holdfast.SGD(lr=0.5), device=device_of(options))
        random.seed(1), np.random.seed(1)
        gain = nn.Linear(1, 3, bias=False)
        with torch.no_grad():
            gain.weight.copy_(torch.tensor([[1.0], [0.5], [-0.75]]))
        optimizer = torch.optim.SGD(gain.parameters(), lr=0.01)
        checkpoint = holdfast.Checkpoint(pool, model=gain, optimizer=optimizer)
        say(joined=True, opened=checkpoint.resume(), recovered=str(pool.recovered))
        if not pool.group.is_trainer:
            pool.serve()
            return
        announced: dict[int, Any] = {}
        for step in range(pool.step + 1, options.get("steps", 6) + 1):
            if options.get("resumes_before") == step:
                trained = gain.weight.detach().clone()
                say(resumed=checkpoint.resume(), kept=bool(torch.equal(trained, gain.weight)))
            for coming in range(step, min(step + options.get("ahead", 0), options.get("steps", 6)) + 1):
                if coming not in announced:
                    given = weighted_batch(coming, pool.part, names, gain if options.get("learned") else None)
                    given[0].weights_or_none().retain_grad()
                    announced[coming] = rows.plan(given[0]), given
                    if options.get("ahead"):
                        rows.announce(announced[coming][0])
            plan, (given, labels) = announced.pop(step)
            weights = given.weights_or_none()
            if options.get("not_finite_at") == step and pool.group.rank == 1:
                broken = weights.detach().clone()
                broken[0] = float("nan")
                broken.requires_grad_()
                plan = rows.plan(holdfast.JaggedFeatures(names, given.values(), given.offsets(), broken))
            pooled = rows(plan).values()
            loss = ((pooled.sum(dim=1) - labels) ** 2).mean()
            if options.get("capture_ahead") and step + 1 <= options.get("steps", 6):
                coming = weighted_batch(step + 1, pool.part, names, None)
                announced.setdefault(step + 1, (rows.plan(coming[0]), coming))
                say(captured=rows.capture_ahead(announced[step + 1][0]))
            if options.get("overflows_at") == step:
                loss, rows.optimizer.param_groups[0]["lr"] = loss * 1e6, 1e38
            optimizer.zero_grad()
            if options.get("two_losses"):
                pooled[:, ::2].square().sum(dim=1).mean().backward(retain_graph=True)
            loss.backward()
            if weights.grad is not None:
                say(weights=weights.grad.tolist(), at=step)
            if options.get("no_gradient_at") == step and pool.group.rank == 1:
                gain.weight.grad[0] = float("nan")
            pool.average_gradients(gain)
            optimizer.step()
            rows.optimizer.step()
            checkpoint.commit(loss=loss.detach())
            say(step=step)
        rows.eval()
        say(score=float(rows(weighted_batch(10_000, pool.part, names, None)[0]).values().sum()), traffic=rows.traffic())
        checkpoint.flush()
    say(closed=True)
    if options.get("goes_on"):
        late = weighted_batch(10_000, pool.part, names, None)[0]
        for use in (lambda: rows(late), lambda: pool.average_gradients(gain), pool.flush):
            try:
                use()
            except holdfast.errors.StepError as error:
                say(refused=str(error))


def weighted_batch(
    number: int, part: tuple[int, int], names: list[str], gain: nn.Linear | None
) -> tuple[holdfast.JaggedFeatures, Tensor]:
    bags, _, labels = batch_of(number, 24, part)
    given = holdfast.JaggedFeatures.from_bags({name: bags["words" if name == "pairs" else name] for name in names})
    values = given.values()
    weights = ((values * 37 + number * 11) % 101 - 50).float() / 32  # a few of them are 0
    if gain is None:
        return holdfast.JaggedFeatures(names, values, given.offsets(), weights.requires_grad_()), labels
    weights = weights * gain(torch.ones(len(values), 1))[torch.arange(len(values)), values % 3]
    return holdfast.JaggedFeatures(names, values, given.offsets(), weights), labels


def refused(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """Does what a group refuses, and lets the error end the rank."""
    what = options["what"]
    options = {**options, "dense_interval": 1 + (what == "interval" and _rank() == 1)}
    if what == "relaxed" and _rank() == 1:
        options["recovery"] = "relaxed"
    with open_pool(directory, options) as pool:
        if what == "device":
            pool_device = holdfast.DeviceConfig(kind="cpu", rows="scratchpad")
            holdfast.EmbeddingBagCollection(pool, tables("item"), device=pool_device)
        names = ["item"] if what == "tables" and pool.group.rank == 1 else ["item", "shop"]
        configs = tables(*names)
        if what == "policy":
            of_rank = {"num_embeddings": None, "capacity": 100, "ttl_steps": 3 + pool.group.rank}
            configs[0] = dataclasses.replace(configs[0], **of_rank)
        rows = holdfast.EmbeddingBagCollection(pool, configs)
        say(joined=True)
        ids, _, _ = batch_of(1, 24, pool.part)
        if what == "thread":
            raise in_thread(lambda: rows.plan(ids))
        if what == "late":
            _ = pool.step
            holdfast.EmbeddingBagCollection(pool, tables("words"))
        if what == "serve":
            pool.serve()
        if what == "ddp":
            wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
            holdfast.Checkpoint(pool, model=wrapped, optimizer=torch.optim.SGD(wrapped.parameters()))
        if what == "sharded":
            sharded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
            fully_shard(sharded[0], mesh=init_device_mesh("cpu", (2,)))
            holdfast.Checkpoint(pool, model=sharded, optimizer=torch.optim.SGD(sharded.parameters()))
        if what == "bare":
            rows(ids)
            pool.commit(1)
        if what == "order":
            plans = [rows.plan(ids), rows.plan(ids)]
            for plan in plans:
                rows.announce(plan)
            rows(plans[1])
        _ = pool.step


def in_thread(work: Callable[[], Any]) -> BaseException:
    """What it raised in a thread of its own."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(work).exception()
    assert error is not None
    return error


def _rank() -> int:
    return int(os.environ["RANK"])


def with_data_loader(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """A DataLoader with worker processes and a DistributedSampler; uneven: rank 1 ends two steps earlier;
    initialised: the script has a process group of its own."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    if options.get("initialised"):
        torch.distributed.init_process_group("gloo")
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randint(0, ROWS["item"], (240,), generator=generator), torch.rand(240))
    with open_pool(directory, options) as pool:
        random.seed(1), np.random.seed(1)
        torch.manual_seed(5)
        part, parts = pool.part
        rows = holdfast.EmbeddingBagCollection(pool, tables("item"))
        model = nn.Sequential(nn.Linear(DIM, 4), nn.ReLU(), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters())
        checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer)
        say(joined=True, opened=checkpoint.resume())
        sampler = DistributedSampler(data, num_replicas=parts, rank=part, seed=2)
        # Its workers' seeds are drawn from a generator that is nobody else's, as docs/STATE.md wants it.
        loader = DataLoader(data, batch_size=12, sampler=sampler, num_workers=2, generator=torch.Generator())
        for step, (ids, target) in enumerate(loader, 1):
            if step <= pool.step:
                continue
            if options.get("uneven") and pool.group.rank == 1 and step == 8:
                break
            scored = model(rows({"item": (ids, torch.arange(len(ids) + 1))}).values()).squeeze(1)
            optimizer.zero_grad()
            ((scored - target) ** 2).mean().backward()
            pool.average_gradients(model)
            optimizer.step()
            rows.optimizer.step()
            checkpoint.commit()
            say(step=step, durable=pool.durable_step)
            if options.get("initialised"):
                seen = torch.tensor(len(ids))
                try:
                    torch.distributed.all_reduce(seen)
                except RuntimeError:  # the other rank was killed
                    raise SystemExit(1) from None
                assert int(seen) == parts * len(ids)
        checkpoint.flush()
    if options.get("initialised"):
        torch.distributed.all_reduce(torch.zeros(1))  # the script's own group outlives the pool's
        torch.distributed.destroy_process_group()
    say(closed=True)


def with_lanes(directory: Path, say: Callable[..., None], options: dict[str, Any]) -> None:
    """holdfast's loader over a Parquet file of one feature; options: path, window, batch_size, lanes, steps;
    odd_batch_size, of rank 1."""
    from holdfast.data import Loader, ParquetConfig, ParquetSource, SparseColumn

    read = 0

    class Counted(ParquetSource):
        def read_block(self, index: int) -> Any:
            nonlocal read
            read += 1
            return super().read_block(index)

    sparse = {"item": SparseColumn(column="item", num_embeddings=ROWS["item"], hashing="identity")}
    source = Counted(ParquetConfig(paths=[options["path"]], label="label", dense=("dense",), sparse=sparse))
    with open_pool(directory, options) as pool:
        torch.manual_seed(5)
        rows = holdfast.EmbeddingBagCollection(pool, tables("item"))
        model = nn.Linear(DIM, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = Loader(
            source,
            batch_size=options["odd_batch_size" if options.get("odd_batch_size") and _rank() == 1 else "batch_size"],
            seed=3,
            shuffle_window_samples=options["window"],
            lanes=options["lanes"],
            part=pool.part,
        )
        checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer, loader=loader)
        say(joined=True, opened=checkpoint.resume())
        with loader:
            while pool.step < options["steps"]:
                batch = next(loader)
                scored = model(rows(batch.features).values()).squeeze(1)
                loss = nn.functional.binary_cross_entropy_with_logits(scored, batch.labels)
                optimizer.zero_grad()
                loss.backward()
                pool.average_gradients(model)
                optimizer.step()
                rows.optimizer.step()
                checkpoint.commit()
                say(step=pool.step, durable=pool.durable_step, loss=float(loss))
        checkpoint.flush()
    say(closed=True, blocks=read)
