"""What a run, as its configuration describes it, will ask of memory. Allocates neither tables nor a pool.

How often rows are asked for comes from an access profile; without one, from the law that generated data follow (Zipf),
or from the assumption that all rows are alike, which is the worst case for every cache and hot tier.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from holdfast.data import Feature, Source, SyntheticSource
from holdfast.data.block import FixedBags
from holdfast.data.zipf import ZipfLaw
from holdfast.errors import ConfigError
from holdfast.pools.read_only import layout_of
from holdfast.pools.tables import normalize_all, to_spec
from holdfast.run.assembly import make_network
from holdfast.run.network import ModelConfig
from holdfast.run.optimizers import OptimizerConfig, TorchOptimizerConfig
from holdfast.run.sections import RunConfig
from holdfast_lab.placement.access_profile import AccessProfile
from holdfast_lab.placement.ladder import Rung
from holdfast_lab.placement.program import Demand, TableDemand
from holdfast_lab.placement.reuse import ReuseCurve, ReuseRung, expected_reuse

_EXACT_RANKS = 1 << 16  # further ranks are summed in runs of nearly the same probability
_RUNS_PER_OCTAVE = 32
_PROBED = 32  # rows and columns of the parameter that tells what an optimizer keeps
_NEARLY_ONE = 1.0 - 2.0**-53  # a single row's probability, whose logarithm of being missed must stay finite


def demand_of(config: RunConfig, source: Source, profile: AccessProfile | None) -> tuple[Demand, str]:
    """The demand, and in words what the rates of access rest on.

    Raises ConfigError where the profile is of other tables or another batch size, DataError where the first samples
    cannot be read (only without a profile, to see how many ids a sample has).
    """
    if profile is None:
        _refuse_unknown_keys(source.features)
    tables = normalize_all(config.embedding.tables(source.features))
    layouts = [layout_of(to_spec(table, config.embedding.spec().kind)) for table in tables]
    accesses_per_batch, ladders, basis = _accesses(config, source, profile)
    demands = tuple(
        TableDemand(
            name=table.name,
            weight_bytes=layout.weight_bytes,
            state_bytes=layout.state_bytes,
            accesses_per_batch=accesses,
            ladder=ladder,
        )
        for table, layout, accesses, ladder in zip(tables, layouts, accesses_per_batch, ladders, strict=True)
    )
    demand = Demand(
        tables=demands,
        dense_bytes=_dense_bytes(config, source),
        dense_interval=config.pool.dense_interval,
        log_bytes=config.pool.log_bytes,
    )
    return demand, basis


def reuse_of(config: RunConfig, source: Source, profile: AccessProfile | None) -> list[ReuseCurve]:
    """How soon the rows of each table come again, from what `demand_of` says the rates of access rest on. Raises what
    it raises."""
    if profile is not None:
        _check_profile(config, source.features, profile)
        rungs = [table.reuse for table in profile.tables]
    else:
        exponent, lookups, _ = _law(source)
        rungs = [
            _expected_reuse(feature.num_embeddings, exponent, config.train.batch_size * count)
            for feature, count in zip(source.features, lookups, strict=True)
        ]
    rows = (
        [f.num_embeddings for f in source.features] if profile is None else [t.num_embeddings for t in profile.tables]
    )
    return [ReuseCurve(of_table, num_rows) for of_table, num_rows in zip(rungs, rows, strict=True)]


def expected_ladder(num_rows: int, exponent: float, accesses_per_batch: float) -> tuple[Rung, ...]:
    """What a profile of independent draws by Zipf's law would find on average; exponent 0: all rows alike."""
    edges, widths, probabilities, missed = _runs(num_rows, exponent, accesses_per_batch)
    shares = np.append(0.0, np.cumsum(widths * probabilities))
    unique = np.append(0.0, np.cumsum(widths * (1.0 - missed)))
    ends = [1 << power for power in range(num_rows.bit_length()) if 1 << power < num_rows]
    return tuple(
        Rung(
            rows=end,
            access_share=min(1.0, float(shares[place])),
            unique_rows_per_batch=min(float(end), float(unique[place])),
        )
        for end in [*ends, num_rows]
        for place in [int(np.searchsorted(edges, end))]
    )


def _expected_reuse(num_rows: int, exponent: float, accesses_per_batch: float) -> tuple[ReuseRung, ...]:
    """The same for how soon rows come again."""
    _, widths, _, missed = _runs(num_rows, exponent, accesses_per_batch)
    return expected_reuse(widths, 1.0 - missed)


def _runs(
    num_rows: int, exponent: float, accesses_per_batch: float
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Runs of ranks that are nearly alike: their edges int64 [N + 1], widths int64 [N], the probability of an access to
    one row, and that a batch misses the row, float64 [N]."""
    law = ZipfLaw(num_ranks=num_rows, exponent=exponent)
    edges = _run_edges(num_rows)
    widths = np.diff(edges)
    probabilities = law.probability((edges[:-1] + 1 + edges[1:]) // 2)
    probabilities /= (widths * probabilities).sum()
    missed = np.exp(accesses_per_batch * np.log1p(-np.minimum(probabilities, _NEARLY_ONE)))
    return edges, widths, probabilities, missed


def _accesses(
    config: RunConfig, source: Source, profile: AccessProfile | None
) -> tuple[list[float], list[tuple[Rung, ...]], str]:
    if profile is not None:
        _check_profile(config, source.features, profile)
        rates = [table.accesses / profile.batches for table in profile.tables]
        sketched = sum(table.method == "sketch" for table in profile.tables)
        counting = f"{sketched} of {len(profile.tables)} tables by a sketch" if sketched else "counted exactly"
        return (
            rates,
            [table.ladder for table in profile.tables],
            f"a profile of {profile.batches:,} batches, {counting}",
        )
    exponent, lookups, basis = _law(source)
    rates = [config.train.batch_size * count for count in lookups]
    ladders = [
        expected_ladder(feature.num_embeddings, exponent, rate)
        for feature, rate in zip(source.features, rates, strict=True)
    ]
    return rates, ladders, basis


def _law(source: Source) -> tuple[float, list[float], str]:
    """Zipf's exponent, ids per sample of each feature, and in words why."""
    if isinstance(source, SyntheticSource):
        exponent = source.config.zipf_exponent
        lookups = [float(count) for count in source.config.lookups_per_table]
        return exponent, lookups, f"no profile: the generated data's own law, Zipf with exponent {exponent}"
    basis = "no profile: assumed that all rows are alike, the worst case; `holdfast profile` measures"
    return 0.0, _lookups_of_first_block(source), basis


def _check_profile(config: RunConfig, features: tuple[Feature, ...], profile: AccessProfile) -> None:
    if profile.batch_size != config.train.batch_size:
        raise ConfigError(
            f"profile: it was taken with train.batch_size = {profile.batch_size}, the run has "
            f"{config.train.batch_size}; how many rows a batch touches does not scale, take the profile again"
        )
    names = [table.name for table in profile.tables]
    wanted = [feature.name for feature in features]
    if names != wanted:
        raise ConfigError(f"profile: it has the tables {', '.join(names)}; the run has {', '.join(wanted)}")
    for table, feature in zip(profile.tables, features, strict=True):
        if not feature.keys and table.num_embeddings != feature.num_embeddings:
            raise ConfigError(
                f"profile: table '{table.name}' had {table.num_embeddings:,} rows, in the run it has "
                f"{feature.num_embeddings:,}; take the profile again"
            )


def _refuse_unknown_keys(features: Iterable[Feature]) -> None:
    for feature in features:
        if feature.keys:
            raise ConfigError(
                f"table '{feature.name}' has keys, and how many come, nobody knows: give the plan a profile, which "
                "`holdfast profile` takes"
            )


def _lookups_of_first_block(source: Source) -> list[float]:
    """Mean ids per sample of each feature."""
    block = source.read_block(0)
    return [
        float(bags.ids.shape[1]) if isinstance(bags, FixedBags) else bags.ids.size / block.num_samples
        for bags in block.bags
    ]


def _dense_bytes(config: RunConfig, source: Source) -> int:
    """The model's parameters and their optimizer's state, float32."""
    is_ours = isinstance(config.model, ModelConfig)
    with torch.device("meta") if is_ours else nullcontext():  # shapes alone; a user's may need more than that
        model = make_network(config, source)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return 4 * num_parameters * (1 + _state_values(config.optimizer))


def _state_values(optimizer: OptimizerConfig | TorchOptimizerConfig) -> int:
    """Values of state that the dense optimizer keeps for each parameter: of one that is stepped here."""
    parameter = nn.Parameter(torch.zeros(_PROBED, _PROBED))
    parameter.grad = torch.zeros(_PROBED, _PROBED)
    live = optimizer.make([parameter])
    live.step()
    kept = [value.numel() for value in live.state[parameter].values() if isinstance(value, torch.Tensor)]
    return round(sum(kept) / parameter.numel())


def _run_edges(num_rows: int) -> NDArray[np.int64]:
    """0, then the last rank of every run: single ranks first, then runs that grow with the rank; all powers of two are
    edges, so that rungs end at one."""
    single = np.arange(min(num_rows, _EXACT_RANKS) + 1)
    if num_rows <= _EXACT_RANKS:
        return single
    first, last = _EXACT_RANKS.bit_length() - 1, (num_rows - 1).bit_length()
    exponents = first + np.arange(1, (last - first) * _RUNS_PER_OCTAVE + 1) / _RUNS_PER_OCTAVE
    ends = np.rint(np.exp2(exponents)).astype(np.int64)
    return np.concatenate([single, ends[ends < num_rows], [num_rows]])
