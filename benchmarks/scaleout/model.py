"""What a step of a group costs: bytes and messages, memory, time. Pure functions; docs/SCALING.md says what follows.

Where each formula is from:

- who has which row: `holdfast.group.layout` (lay_out, assign) and core/rows/shards.h, by way of the real functions;
- what travels: core/routing/route_message.h and `holdfast.group.exchange`; to whom: gloo's alltoallv sends to every
  rank, also when there is nothing to say; dense gradients go to who adds a part of them up, and back (transport.py);
- what waits for what: `holdfast.train.trainer.Trainer._step` over `holdfast.group.remote_rows`;
- when a step is durable: `holdfast.group.pool_share.PoolShare.commit`.

Bytes are exact up to chance. Times are as good as `Costs` and `Cluster`, most of which are declared, not measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from holdfast import _core
from holdfast.group.layout import TableShards, assign, stride_bits
from holdfast.group.pool_share import Status
from holdfast.group.roles import Roles, slice_of
from peers.batches import ZIPF_EXPONENT

_MULTIPLIER = 2_654_435_761  # peers.batches scatters ids with it
_HOT_ROWS = 1 << 16  # of each table, one by one; the others are spread evenly over its shards
_FLOAT = 4
_LOSS_AND_CHANGED = 2 * _FLOAT  # travels with the dense gradients

Ids = Literal["scattered", "by_frequency"]
"""Where a table's hot rows are: anywhere, in each table elsewhere; or at its beginning, as in ids that were numbered by
how often they come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Tables of `rows` rows each; bags of `lookups` ids; `batch` samples a step over all trainers."""

    name: str
    tables: int
    rows: int
    dim: int
    lookups: int
    batch: int
    dense_parameters: int
    dense_columns: int = 13
    zipf: float = ZIPF_EXPONENT
    ids: Ids = "scattered"

    @property
    def values(self) -> int:
        """Ids and dense values of a sample."""
        return self.tables * self.lookups + self.dense_columns

    @property
    def lookups_per_step(self) -> int:
        return self.tables * self.batch * self.lookups

    @property
    def row_bytes(self) -> int:
        """Weights, and a float of row-wise Adagrad's."""
        return _FLOAT * (self.dim + 1)

    @property
    def table_bytes(self) -> int:
        return self.tables * self.rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """memory_ranks: as in Roles. split: every table lies over all shards; else each lies whole in one."""

    world_size: int
    memory_ranks: int = 0
    split: bool = False
    num_shards: int = 64

    @property
    def roles(self) -> Roles:
        return Roles(world_size=self.world_size, memory_ranks=self.memory_ranks)

    def layout(self, tables: int) -> list[TableShards]:
        if self.split and self.num_shards > 1:
            return [TableShards(0, self.num_shards)] * tables
        return [TableShards(table % self.num_shards, 1) for table in range(tables)]


def enough_shards(owners: int) -> int:
    """Four for each owner, so that they can be dealt out evenly."""
    return min(4096, max(64, 1 << (4 * owners - 1).bit_length()))


# Who is asked.


def shard_shares(workload: Workload, ranks: Ranks) -> NDArray[np.float64]:
    """The part of a table's lookups that goes to each shard, [tables, shards]."""
    shares = np.zeros((workload.tables, ranks.num_shards))
    if not ranks.split or ranks.num_shards == 1:
        for table, of_table in enumerate(ranks.layout(workload.tables)):
            shares[table, of_table.first_shard] = 1.0
        return shares
    hot = min(_HOT_ROWS, workload.rows)
    likely = np.arange(1, hot + 1, dtype=np.float64) ** -workload.zipf
    rest = zipf_sum(hot, workload.rows, workload.zipf)
    total = float(likely.sum()) + rest
    bits = stride_bits(workload.rows, ranks.num_shards)
    rank = np.arange(hot, dtype=np.int64)
    for table in range(workload.tables):
        rows = rank
        if workload.ids == "scattered":
            rows = (rank * _MULTIPLIER + table * (workload.rows // workload.tables)) % workload.rows
        places = _core.places_of(workload.rows, ranks.num_shards, table % ranks.num_shards, np.ascontiguousarray(rows))
        shares[table] = np.bincount(places >> bits, weights=likely, minlength=ranks.num_shards)
    return (shares + rest / ranks.num_shards) / total


def zipf_sum(first: int, last: int, exponent: float) -> float:
    """Of rank ** -exponent over the ranks in (first, last]."""
    if exponent == 1.0:
        return math.log((last + 0.5) / (first + 0.5))
    return float(((last + 0.5) ** (1 - exponent) - (first + 0.5) ** (1 - exponent)) / (1 - exponent))


def owner_shares(workload: Workload, ranks: Ranks, *, owner_of: Sequence[int] | None = None) -> NDArray[np.float64]:
    """The part of a table's lookups that goes to each owner, [tables, owners]. owner_of: of each shard; as `assign`
    deals them out unless said otherwise."""
    of_shard = shard_shares(workload, ranks)
    owners = len(ranks.roles.owners)
    if owner_of is None:
        load = np.rint(of_shard.sum(axis=0) * 1e9).astype(np.int64)
        owner_of = assign([int(count) for count in load], owners)
    shares = np.zeros((workload.tables, owners))
    for owner in range(owners):
        shares[:, owner] = of_shard[:, np.array(owner_of) == owner].sum(axis=1)
    return shares


def skew(shares: NDArray[np.float64]) -> float:
    """Lookups of the owner with most, over the mean."""
    of_owner = shares.sum(axis=0)
    return float(of_owner.max() / of_owner.mean())


# Bytes and messages.


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes a step that each rank sends to others and gets from others, [ranks], by what; messages: that it sends."""

    sent: dict[str, NDArray[np.float64]]
    received: dict[str, NDArray[np.float64]]
    messages: int
    sum_messages: int  # of these, of dense gradients: half of them after the other half

    def total(self, what: str) -> float:
        return float(self.sent[what].sum())

    def busiest(self, what: str) -> float:
        """Bytes through the busiest rank's port, which sends and receives at once."""
        return float(np.maximum(self.sent[what], self.received[what]).max())

    def both_ways(self, what: str) -> float:
        """Bytes that the busiest rank has to handle."""
        return float((self.sent[what] + self.received[what]).max())


def traffic(workload: Workload, ranks: Ranks, shares: NDArray[np.float64]) -> Traffic:
    """What holdfast sends, on average."""
    reached = 1.0 - (1.0 - shares) ** workload.lookups  # of a table's bags, by owner
    single = workload.lookups * shares * (1.0 - shares) ** (workload.lookups - 1)
    samples = np.array([_slice(workload, ranks, trainer) for trainer in ranks.roles.trainers], np.float64)
    ids = samples[:, None] * workload.lookups * shares.sum(axis=0)[None]
    # Lengths of bags are left out where a trainer has one id at most for each bag of a feature.
    at_most_one = np.minimum(1.0, 1.0 - reached + single)
    lengths = np.zeros_like(ids)
    for size in np.unique(samples):
        lengths[samples == size] = size * (reached * (1.0 - at_most_one**size)).sum(axis=0)
    vectors = samples[:, None] * reached.sum(axis=0)[None] * workload.dim
    to_owners = _between(ranks, _FLOAT * (ids + lengths))
    blocks = _between(ranks, _FLOAT * vectors)
    size, trainers = ranks.world_size, len(samples)
    statuses = np.full(size, 8.0 * Status.WIDTH * (size - 1))
    counts = _between(ranks, np.full((trainers, len(ranks.roles.owners)), 16.0 * workload.tables))
    dense = _FLOAT * workload.dense_parameters + _LOSS_AND_CHANGED
    summed = np.zeros(size)
    summed[:trainers] = 2 * (trainers - 1) * dense / trainers
    sum_messages = 2 * (trainers - 1)
    tables_sent = {
        "counts": statuses + counts.sum(axis=1),
        "ids": to_owners.sum(axis=1),
        "vectors": blocks.sum(axis=0),
        "gradients": blocks.sum(axis=1),
        "dense gradients": summed,
    }
    tables_received = {
        **tables_sent,
        "counts": statuses + counts.sum(axis=0),
        "ids": to_owners.sum(axis=0),
        "vectors": blocks.sum(axis=1),
        "gradients": blocks.sum(axis=0),
    }
    return Traffic(
        sent=tables_sent,
        received=tables_received,
        messages=4 * (size - 1) + sum_messages,
        sum_messages=sum_messages,
    )


def least_total(workload: Workload, ranks: Ranks, shares: NDArray[np.float64]) -> dict[str, float]:
    """What the scheme cannot do without, over all ranks: no lengths, no counts; as arithmetic.py counts it."""
    reached = 1.0 - (1.0 - shares) ** workload.lookups
    samples = np.array([_slice(workload, ranks, trainer) for trainer in ranks.roles.trainers], np.float64)
    ids = _between(ranks, _FLOAT * samples[:, None] * workload.lookups * shares.sum(axis=0)[None])
    vectors = _between(ranks, _FLOAT * workload.dim * samples[:, None] * reached.sum(axis=0)[None])
    return {
        "ids": float(ids.sum()),
        "vectors": float(vectors.sum()),
        "gradients": float(vectors.sum()),
        "dense": 2.0 * (len(samples) - 1) * _FLOAT * workload.dense_parameters,
    }


def _slice(workload: Workload, ranks: Ranks, trainer: int) -> int:
    begin, end = slice_of(workload.batch, trainer, len(ranks.roles.trainers))
    return end - begin


def _between(ranks: Ranks, amounts: NDArray[np.float64]) -> NDArray[np.float64]:
    """[trainers, owners] as [ranks, ranks], without what a rank has for itself."""
    roles = ranks.roles
    full = np.zeros((ranks.world_size, ranks.world_size))
    full[: len(roles.trainers), roles.owners.start : roles.owners.stop] = amounts
    np.fill_diagonal(full, 0.0)
    return full


# Memory.


def unique_rows(workload: Workload) -> float:
    """Different rows of all tables in a step."""
    draws = workload.batch * workload.lookups
    edges = np.unique(np.geomspace(1, workload.rows, 400).astype(np.int64))
    total = 1.0 + zipf_sum(1, workload.rows, workload.zipf)
    found = 1.0 - (1.0 - 1.0 / total) ** draws
    for first, last in pairwise(edges):
        likely = zipf_sum(int(first), int(last), workload.zipf) / total / (last - first)
        found += (last - first) * -math.expm1(draws * math.log1p(-likely))
    return float(workload.tables * found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    rows: float
    log: float
    buffers: float
    dense: float
    connections: float


LOG_STEPS_BEHIND = 10  # that a log keeps beyond dense_interval, before room is asked for
_SOCKET_BYTES = 256 << 10  # of the kernel's, for a connection that is used


def memory(workload: Workload, ranks: Ranks, shares: NDArray[np.float64], *, dense_interval: int = 1) -> Memory:
    """Of the fullest owner, which trains as well where no rank is for memory alone."""
    owners = len(ranks.roles.owners)
    moved = traffic(workload, ranks, shares)
    part = 1.0 / owners if ranks.split else math.ceil(workload.tables / owners) / workload.tables
    record = unique_rows(workload) * skew(shares) / owners * (8 + workload.row_bytes)
    reached = 1.0 - (1.0 - shares) ** workload.lookups
    trainers = len(ranks.roles.trainers)
    blocks = (
        workload.batch * _FLOAT * workload.dim * (float(reached.sum(axis=0).max()) + float(reached.sum()) / trainers)
    )
    joined = math.ceil(workload.batch / trainers) * _FLOAT * workload.dim * workload.tables
    ids = _FLOAT * workload.lookups_per_step * (skew(shares) / owners + 1 / trainers)
    return Memory(
        rows=workload.table_bytes * part,
        log=record * (dense_interval + LOG_STEPS_BEHIND),
        buffers=2 * (blocks + joined + ids + moved.both_ways("counts")),  # with gradients; two batches' ids
        dense=4.0 * _FLOAT * workload.dense_parameters,  # parameters, gradients, their flat copy, a slot that is staged
        connections=2.0 * _SOCKET_BYTES * (ranks.world_size - 1),  # the world's, and as many among trainers
    )


# Time.


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Of one core, fitted (scaling.py)."""

    plan_s: float  # of a lookup: routing it and planning it
    owner_s: float  # of a lookup: capture, lookup, update
    flop_s: float  # of the MLPs, forward and backward
    float_s: float  # of a pooled float of a sample: joined, interacting, and its gradient
    fixed_s: float  # of a step, whatever is in it
    byte_s: float  # through a socket, at either end
    message_s: float
    value_s: float = 26e-9  # of the data: an id or a dense value, read, shuffled and put into batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """Of an owner's rows. sync_s: until a step's log is durable, besides its bytes. misses: of a step's rows, the part
    that is not in the scratchpad; read ahead, `reads_per_s` at most."""

    name: str
    read_bytes_per_s: float
    write_bytes_per_s: float
    sync_s: float
    is_block: bool = False
    misses: float = 0.0
    reads_per_s: float = math.inf
    row_granularity: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Machines of one rank each. message_s: of a processor and its network card, for a message, either end."""

    bytes_per_s: float
    latency_s: float
    message_s: float
    medium: Medium
    cores: int = 16
    efficiency: float = 0.7  # of several cores
    jitter: float = 0.03  # of a rank's own time, standard deviation
    sync_jitter: float = 0.3
    dense_bytes_per_s: float = 5e9  # copying and checking a dense state: rm3's commit, benchmarks/reports/bench


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds on the way that everybody waits for. `total` is their sum, or what a block device needs beside it; it
    leaves out `loader`."""

    owners: float
    vectors: float
    train: float
    gradients: float
    update: float
    commit: float
    stragglers: float
    ids_wait: float  # what ids and counts take beyond what they travel beside
    background: float  # reading ahead and logging on a block device: a step takes no less
    loader: float  # a trainer reads and shuffles its share of the stream, which has lanes: a step takes no less, either
    durable_lag: float  # from a step's end until the group knows that it is durable

    @property
    def total(self) -> float:
        way = self.owners + self.vectors + self.train + self.gradients + self.update + self.commit
        return max(way + self.stragglers + self.ids_wait, self.background)


_FLOPS = 6  # of a parameter and sample, forward and backward


def step(
    workload: Workload,
    ranks: Ranks,
    shares: NDArray[np.float64],
    cluster: Cluster,
    costs: Costs,
    *,
    dense_interval: int = 1,
) -> Step:
    roles = ranks.roles
    owners, trainers, size = len(roles.owners), len(roles.trainers), ranks.world_size
    cores = 1.0 if cluster.cores == 1 else cluster.cores * cluster.efficiency
    moved = traffic(workload, ranks, shares)
    busiest = skew(shares) / owners
    lookups = workload.lookups_per_step * busiest
    rows = unique_rows(workload) * min(1.0, busiest)
    medium = cluster.medium
    touched = max(medium.row_granularity, workload.row_bytes)

    of_owner = costs.owner_s * lookups / cores
    before, after = of_owner * 0.55, of_owner * 0.45  # capture and lookup; update
    if not medium.is_block:
        before = max(before, rows * touched / medium.read_bytes_per_s)
        before = max(before, rows * (8 + workload.row_bytes) / medium.write_bytes_per_s)  # the log
        after = max(after, rows * touched / medium.write_bytes_per_s)
    of_sample = _FLOPS * costs.flop_s * workload.dense_parameters + costs.float_s * workload.tables * workload.dim
    train = of_sample * math.ceil(workload.batch / trainers) / cores
    plan = costs.plan_s * (lookups + workload.lookups_per_step / trainers) / 2 / cores

    # gloo has one thread for its sockets.
    def bytes_s(what: str) -> float:
        return max(moved.busiest(what) / cluster.bytes_per_s, moved.both_ways(what) * costs.byte_s)

    def collective(what: str) -> float:
        if size == 1:
            return 0.0
        return cluster.latency_s + (size - 1) * cluster.message_s + bytes_s(what)

    summed = 0.0
    if trainers > 1:
        summed = bytes_s("dense gradients") + 2 * cluster.latency_s + moved.sum_messages * cluster.message_s
    # The bottom MLP runs beside the vectors (a third of the MLPs, or less); planning beside the gradients.
    vectors = max(0.0, collective("vectors") - 0.1 * train)
    gradients = max(collective("gradients") + bytes_s("dense gradients"), summed, plan)
    beside = train + before + after
    ids_wait = max(0.0, collective("counts") + collective("ids") - beside)

    dense = _FLOAT * workload.dense_parameters / cluster.dense_bytes_per_s / dense_interval
    own = before + after + train + costs.fixed_s
    stragglers = cluster.jitter * own * expected_maximum(size)
    log_s = rows * (8 + workload.row_bytes) / medium.write_bytes_per_s if medium.is_block else 0.0
    sync = (medium.sync_s + log_s) * (1.0 + cluster.sync_jitter * expected_maximum(owners))
    background = max(log_s, rows * medium.misses / medium.reads_per_s)
    found = Step(
        owners=before,
        vectors=vectors,
        train=train,
        gradients=gradients,
        update=after,
        commit=dense + costs.fixed_s,
        stragglers=stragglers,
        ids_wait=ids_wait,
        background=background,
        loader=costs.value_s * math.ceil(workload.batch / trainers) * workload.values / cores,
        durable_lag=sync,
    )
    # The older dense slot may be overwritten once the newer one's rows are known to be durable: told with the counts of
    # the step after, noted before its end.
    hidden = (dense_interval - 1) * found.total + before
    settle = max(0.0, sync - hidden) / dense_interval
    return replace(found, commit=found.commit + settle, durable_lag=max(found.total, sync))


def expected_maximum(count: int) -> float:
    """Of so many standard normal draws (Blom)."""
    return 0.0 if count < 2 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


# Failures.


def useful_part(*, size: int, step_s: float, dense_interval: int, restart_s: float, node_mtbf_s: float) -> float:
    """Of the time: a rank's death stops all, costs a restart, and the steps since the last dense state."""
    lost = restart_s + (dense_interval / 2 + 1) * step_s
    return max(0.0, 1.0 - lost * size / node_mtbf_s)


def rendezvous_s(size: int, *, request_s: float = 50e-6) -> float:
    """Every rank asks rank 0's store for the address of every other, twice: for all ranks, and for the trainers."""
    return 2.0 * size * (size - 1) * request_s
