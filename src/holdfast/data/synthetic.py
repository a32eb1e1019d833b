"""Made-up clicks: Zipf-skewed ids, integer counts and a planted model of the label. Sample ``i`` is a pure function of
(config, i), generated when it is read.

- Ids: ``lookups`` per bag and table, popularity rank by Zipf's law, rank to row by a permutation, so hot rows are not
  neighbours.
- With ``drift``, items come and go: so many are born a sample and table, the youngest is the most popular, and one that
  is as old as ``rows`` later ones is never seen again. Their ids are keys, all over the 64 bits.
- Dense: integer counts ``floor(expm1(6 u**2))`` with ``u`` uniform (0 to 402, mostly small), given as ``log1p(count)``.
- Labels: see planted.py. Scale and intercept are set so that, on 8,192 samples kept for that, the logit's standard
  deviation is ``signal`` and the mean click probability ``click_rate``. With the defaults the planted probabilities
  have an AUC of 0.82 to 0.85, which no model can beat; ``bayes_auc`` measures it. A small DLRM reached 0.823 of 0.837
  on a million Criteo-shaped samples of scale 0.01.
- ``model_seed`` sets the planted model and which rows are hot; ``sample_seed`` and ``first_sample`` which samples are
  drawn. So validation data is the same config with another ``sample_seed``, or a ``first_sample`` beyond the training
  range.

Bits: every step is exact integer arithmetic or float64 far finer than what it decides, so samples do not depend on
threads, blocks or the order of reading. (exp and log may differ in the last of 53 bits between machines; one sample in
billions could show it.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from holdfast.data.block import FixedBags, SampleBlock
from holdfast.data.counter import stream_key, uniforms
from holdfast.data.hashing import mix64
from holdfast.data.planted import PlantedModel, expected_auc
from holdfast.data.scatter import Scatter
from holdfast.data.source import DEFAULT_CAPACITY, Feature
from holdfast.data.zipf import ZipfLaw
from holdfast.errors import ConfigError
from holdfast.files.config import UNRECORDED

CRITEO_CARDINALITIES = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
"""Distinct values of the 26 categorical columns of the Criteo Kaggle set."""

_IDS_STREAM, _DENSE_STREAM, _LABEL_STREAM, _ROWS_STREAM, _CALIBRATION_STREAM = 1, 2, 3, 4, 5
_BLOCK_BYTES = 1 << 20
_MAX_BLOCK_SAMPLES = 4096
_CALIBRATION_SAMPLES = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """What is generated.

    num_samples: samples in an epoch. rows: rows of each table. lookups: ids per bag of each table, or one number for
    all. num_dense: dense columns. zipf_exponent: skew of the ids; 0 is uniform. signal: standard deviation of the
    planted logit. click_rate: mean click probability. model_seed: which model is planted and which rows are hot.
    sample_seed: which samples are drawn. first_sample: index of the first sample. drift: items born a sample; then rows
    is how many are seen at a time. Raises ConfigError that names the field.
    """

    num_samples: int
    rows: tuple[int, ...]
    lookups: int | tuple[int, ...] = 1
    num_dense: int = 13
    zipf_exponent: float = 1.05
    signal: float = 1.65
    click_rate: float = 0.25
    model_seed: int = 0
    sample_seed: int = 0
    first_sample: int = 0
    drift: float = field(default=0.0, metadata=UNRECORDED)

    def __post_init__(self) -> None:
        # canonical types, so that equal configs have equal fingerprints
        object.__setattr__(self, "rows", tuple(int(count) for count in self.rows))
        if not isinstance(self.lookups, int):
            object.__setattr__(self, "lookups", tuple(int(count) for count in self.lookups))
            num_given = len(self.lookups_per_table)
            _require(num_given == len(self.rows), "lookups", f"one number or {len(self.rows)}", f"{num_given} numbers")
        for name in ("zipf_exponent", "signal", "click_rate", "drift"):
            object.__setattr__(self, name, float(getattr(self, name)))
        _require(self.num_samples >= 1, "num_samples", "at least 1", self.num_samples)
        _require(len(self.rows) >= 1, "rows", "at least one table", self.rows)
        _require(
            all(1 <= count < 2**62 for count in self.rows),
            "rows",
            "at least 1 and less than 2**62 in every table",
            self.rows,
        )
        _require(all(count >= 1 for count in self.lookups_per_table), "lookups", "at least 1", self.lookups)
        _require(self.num_dense >= 0, "num_dense", "at least 0", self.num_dense)
        _require(0.0 <= self.zipf_exponent <= 8.0, "zipf_exponent", "in [0, 8]", self.zipf_exponent)
        _require(0.0 <= self.signal <= 100.0, "signal", "in [0, 100]", self.signal)
        _require(0.0 < self.click_rate < 1.0, "click_rate", "in (0, 1)", self.click_rate)
        _require(0.0 <= self.drift <= 1000.0, "drift", "in [0, 1000]", self.drift)
        for name in ("model_seed", "sample_seed", "first_sample"):
            _require(0 <= getattr(self, name) < 2**63, name, "in [0, 2**63)", getattr(self, name))

    @property
    def lookups_per_table(self) -> tuple[int, ...]:
        return (self.lookups,) * len(self.rows) if isinstance(self.lookups, int) else self.lookups


def criteo_shape(*, num_samples: int, scale: float = 1.0, model_seed: int = 0, sample_seed: int = 0) -> SyntheticConfig:
    """13 dense columns and 26 single-id tables of Criteo Kaggle's cardinalities times ``scale`` (at least 3 rows each);
    use ``dataclasses.replace`` for other fields."""
    rows = tuple(max(3, round(cardinality * scale)) for cardinality in CRITEO_CARDINALITIES)
    return SyntheticConfig(num_samples=num_samples, rows=rows, model_seed=model_seed, sample_seed=sample_seed)


def uniform_shape(
    *,
    num_samples: int,
    num_tables: int,
    rows_per_table: int,
    lookups_per_bag: int = 1,
    num_dense: int = 13,
    model_seed: int = 0,
    sample_seed: int = 0,
) -> SyntheticConfig:
    """``num_tables`` alike tables; use ``dataclasses.replace`` for other fields."""
    return SyntheticConfig(
        num_samples=num_samples,
        rows=(rows_per_table,) * num_tables,
        lookups=lookups_per_bag,
        num_dense=num_dense,
        model_seed=model_seed,
        sample_seed=sample_seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticSamples:
    """Samples as drawn, ``n`` of them. ids, ranks: int64 ``[n, L]`` per table, popularity ranks from 1; counts: int64
    ``[n, num_dense]``; probabilities: float64 ``[n]``, the planted click probabilities; labels: bool ``[n]``."""

    ids: tuple[NDArray[np.int64], ...]
    ranks: tuple[NDArray[np.int64], ...]
    counts: NDArray[np.int64]
    probabilities: NDArray[np.float64]
    labels: NDArray[np.bool_]


class SyntheticSource:
    """A source (see source.py) of generated samples; features are named C1, C2..."""

    def __init__(self, config: SyntheticConfig) -> None:
        self._config = config
        laws: dict[int, ZipfLaw] = {}
        for num_rows in config.rows:
            laws.setdefault(num_rows, ZipfLaw(num_ranks=num_rows, exponent=config.zipf_exponent))
        self._laws = [laws[num_rows] for num_rows in config.rows]
        self._scatters = [
            Scatter(size=num_rows, key=stream_key(config.model_seed, _ROWS_STREAM, table))
            for table, num_rows in enumerate(config.rows)
        ]
        self._planted = PlantedModel(seed=config.model_seed, num_dense=config.num_dense, num_features=len(config.rows))
        self._scale, self._intercept = self._calibrate()

    @property
    def config(self) -> SyntheticConfig:
        return self._config

    @property
    def features(self) -> tuple[Feature, ...]:
        keys = self._config.drift > 0
        return tuple(
            Feature(name=f"C{table}", num_embeddings=DEFAULT_CAPACITY if keys else num_rows, keys=keys)
            for table, num_rows in enumerate(self._config.rows, 1)
        )

    @property
    def num_dense(self) -> int:
        return self._config.num_dense

    @property
    def num_samples(self) -> int:
        return self._config.num_samples

    @property
    def sample_bytes(self) -> int:
        return 8 * sum(self._config.lookups_per_table) + 4 * self._config.num_dense + 4

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        bounds = np.append(np.arange(0, self.num_samples, self._block_samples), self.num_samples)
        return np.diff(bounds)

    def read_block(self, index: int) -> SampleBlock:
        begin = index * self._block_samples
        samples = self.draw(begin, min(self._block_samples, self.num_samples - begin))
        return SampleBlock(
            labels=samples.labels.astype(np.float32),
            dense=np.log1p(samples.counts.astype(np.float64)).astype(np.float32),
            bags=tuple(FixedBags(ids) for ids in samples.ids),
        )

    def fingerprint(self) -> Mapping[str, str | int]:
        fields = asdict(self._config)
        if not self._config.drift:
            del fields["drift"]  # as before there was such a field
        described = repr(sorted(fields.items()))
        return {"kind": "synthetic", "config": hashlib.blake2b(described.encode(), digest_size=16).hexdigest()}

    def draw(self, begin: int, count: int) -> SyntheticSamples:
        """The samples ``[begin, begin + count)``, counted from ``first_sample``; may reach beyond ``num_samples``."""
        seed = self._config.sample_seed
        first = self._config.first_sample + begin
        ids, ranks, counts = self._draw_inputs(seed, first, count)
        logits = self._intercept + self._scale * self._planted.scores(ids, ranks, np.log1p(counts.astype(np.float64)))
        probabilities = 1.0 / (1.0 + np.exp(-logits))
        labels = uniforms(stream_key(seed, _LABEL_STREAM), first, count) < probabilities
        return SyntheticSamples(ids=ids, ranks=ranks, counts=counts, probabilities=probabilities, labels=labels)

    @property
    def _block_samples(self) -> int:
        return max(1, min(_MAX_BLOCK_SAMPLES, _BLOCK_BYTES // self.sample_bytes))

    def _draw_inputs(
        self, seed: int, first: int, count: int
    ) -> tuple[tuple[NDArray[np.int64], ...], tuple[NDArray[np.int64], ...], NDArray[np.int64]]:
        """ids and ranks per table ``[count, L]``, and counts ``[count, num_dense]``."""
        ids: list[NDArray[np.int64]] = []
        ranks: list[NDArray[np.int64]] = []
        for table, num_lookups in enumerate(self._config.lookups_per_table):
            key = stream_key(seed, _IDS_STREAM, table)
            numbers = uniforms(key, first * num_lookups, count * num_lookups).reshape(count, num_lookups)
            table_ranks = self._laws[table].ranks(numbers)
            ranks.append(table_ranks)
            if self._config.drift:
                ids.append(self._items(table, first, table_ranks))
            else:
                ids.append(self._scatters[table](table_ranks - 1))
        num_dense = self._config.num_dense
        numbers = uniforms(stream_key(seed, _DENSE_STREAM), first * num_dense, count * num_dense)
        counts = np.floor(np.expm1(6.0 * np.square(numbers))).astype(np.int64).reshape(count, num_dense)
        return tuple(ids), tuple(ranks), counts

    def _items(self, table: int, first: int, ranks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys of items of these ranks by age, as the samples from `first` on see them."""
        born = np.floor(np.arange(first, first + len(ranks), dtype=np.float64) * self._config.drift).astype(np.int64)
        numbers = born[:, None] + self._config.rows[table] - ranks
        key = np.uint64(stream_key(self._config.model_seed, _ROWS_STREAM, table))
        return mix64(numbers.view(np.uint64) ^ key).view(np.int64)

    def _calibrate(self) -> tuple[float, float]:
        """Scale and intercept of the logit; a function of all of the config but which samples it names."""
        seed = stream_key(self._config.model_seed, _CALIBRATION_STREAM)
        num_samples = max(1, min(_CALIBRATION_SAMPLES, 64 * _BLOCK_BYTES // self.sample_bytes))
        ids, ranks, counts = self._draw_inputs(seed, 0, num_samples)
        scores = self._planted.scores(ids, ranks, np.log1p(counts.astype(np.float64)))
        deviation = float(scores.std())
        # rounded, so that the last bit of a sum on another machine changes nothing
        scale = round(self._config.signal / deviation, 6) if deviation > 0.0 else 0.0
        low, high = -200.0, 200.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            mean = float((1.0 / (1.0 + np.exp(-(middle + scale * scores)))).mean())
            low, high = (middle, high) if mean < self._config.click_rate else (low, middle)
        return scale, round(low, 6)


def bayes_auc(config: SyntheticConfig, *, num_samples: int = 200_000) -> float:
    """The AUC of the planted click probabilities themselves, measured on ``num_samples`` samples: the best that any
    model can reach on data of ``config`` (to about 0.002)."""
    source = SyntheticSource(replace(config, num_samples=num_samples))
    begins = np.concatenate([[0], np.cumsum(source.block_sizes)]).tolist()
    parts = [source.draw(begin, end - begin).probabilities for begin, end in pairwise(begins)]
    return expected_auc(np.concatenate(parts))


def _require(holds: bool, field: str, what: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"synthetic {field}: must be {what}, not {value}")
