"""EmbeddingCollection: a vector for each id, and no pooling.

To the core each id is a bag of its own, and the ids of all features that read a table are one column of bags. Columns
are as long as the longest of them, with empty bags at their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.data.batch import Bags, JaggedFeatures, holds_ids, jagged_parts, kind_of
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, DataError, IdError
from holdfast.pools.optim import RowOptimizerSpec
from holdfast.pools.pool import Pool
from holdfast.pools.tables import EmbeddingBagConfig, normalize_all
from holdfast.rows.collection import RowCollection
from holdfast.rows.features import KeyedJagged, offsets_of
from holdfast.rows.row_access import PlannedFeatures


class JaggedEmbeddings:
    """The vectors of a feature's ids, in the shape of TorchRec's ``JaggedTensor``.

    values: float32 ``[num_ids, dim]``, sample by sample.
    offsets: int64 ``[batch_size + 1]``; sample ``b`` has ``values[offsets[b] : offsets[b + 1]]``.
    """

    __slots__ = ("_offsets", "_values")

    def __init__(self, values: Tensor, offsets: Tensor) -> None:
        self._values = values
        self._offsets = offsets

    def values(self) -> Tensor:
        return self._values

    def offsets(self) -> Tensor:
        return self._offsets

    def lengths(self) -> Tensor:
        return self._offsets.diff()

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Every sample with as many vectors: ``[batch_size, length, dim]``.

        desired_length: so many, the first ones of a sample that has more; default: those of the longest sample.
        """
        lengths = self.lengths()
        longest = int(lengths.max()) if lengths.numel() else 0
        length = longest if desired_length is None else desired_length
        dense = self._values.new_full((lengths.numel(), length, self._values.shape[1]), padding_value)
        places = torch.arange(length, device=lengths.device)
        sample, place = torch.nonzero(places < lengths[:, None], as_tuple=True)
        values = self._values[self._offsets[:-1][sample] + place] if longest > length else self._values
        return dense.index_put((sample, place), values)


@dataclass(frozen=True, slots=True)
class _Part:
    """A feature's ids in one batch. Their vectors are wanted by these offsets, nested or as JaggedEmbeddings, or in the
    shape of the ids."""

    ids: Tensor
    offsets: Tensor | None = None
    is_nested: bool = False

    def shaped(self, vectors: Tensor) -> Any:
        """What forward returns of vectors ``[num_ids, dim]``."""
        if self.offsets is None:
            return vectors.reshape(*self.ids.shape, vectors.shape[1])
        offsets = self.offsets.to(vectors.device)
        if self.is_nested:
            return torch.nested.nested_tensor_from_jagged(vectors, offsets)
        return JaggedEmbeddings(vectors, offsets)


class EmbeddingCollection(RowCollection):
    """Embedding tables in a pool for sequences: a vector for each id, in the order of the ids, and no pooling.

    pool, optimizer, device: as of an EmbeddingBagCollection; one pool may hold tables of both.
    tables: ``EmbeddingBagConfig``, whose pooling changes nothing, or TorchRec's ``EmbeddingConfig``. Several features
        may read one table.
    padding_idx: an id that stands for none, of all tables or by table: its vector is zeros, and it has neither a row
        nor a gradient, as in ``torch.nn.Embedding``.

    It is called with what an EmbeddingBagCollection is called with, but a tensor of ids may have any shape, and
    features any number of samples each. It returns a dict with the vectors of each feature: of a tensor of ids a
    float32 tensor ``[*ids.shape, embedding_dim]``, nested where that is; of ``(ids, offsets)``, and of a
    KeyedJaggedTensor, a JaggedEmbeddings. Per-sample weights are not used.

    Raises what EmbeddingBagCollection does.
    """

    def __init__(
        self,
        pool: Pool,
        tables: Iterable[Any],
        *,
        optimizer: RowOptimizerSpec | None = None,
        device: DeviceConfig | None = None,
        padding_idx: int | Mapping[str, int] | None = None,
    ) -> None:
        configs = normalize_all(tables)
        names = [table.name for table in configs]
        padding = dict(padding_idx) if isinstance(padding_idx, Mapping) else dict.fromkeys(names, padding_idx)
        for name, of_table in padding.items():
            if name not in names:
                raise ConfigError(f"padding_idx: there is no table '{name}' (there are {', '.join(names)})")
            if of_table is not None and type(of_table) is not int:
                raise ConfigError(f"padding_idx of table '{name}': {of_table!r}; it must be an id, an int")
        super().__init__(pool, [replace(table, feature_names=[table.name]) for table in configs], optimizer, device)
        self._configs = configs
        self._padding = [padding.get(name) for name in names]

    @property
    def tables(self) -> Sequence[EmbeddingBagConfig]:
        return self._configs

    def embedding_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    def keys(self) -> list[str]:
        return [feature for table in self._configs for feature in table.feature_names]

    def plan(
        self,
        features: KeyedJagged | Mapping[str, Bags],
        *,
        ahead: bool = True,
        evaluates: bool = False,
    ) -> PlannedFeatures:
        """The plan verb, see EmbeddingBagCollection."""
        try:
            return super().plan(features, ahead=ahead, evaluates=evaluates)
        except IdError as error:  # which numbers the bags of a column
            raise self._bad_id(self._parts_of(features)) or error from None

    def forward(self, features: KeyedJagged | Mapping[str, Bags] | PlannedFeatures) -> dict[str, Any]:
        values, planned = self._look_up(features)
        parts: dict[str, _Part] = planned.parts
        vectors = {}
        # unsafe_: pieces may be changed in place, as the output of nn.Embedding; nobody else has what they are of.
        of_tables = torch.unsafe_split_with_sizes(values, self._dims, dim=1)
        for table, of_table in zip(self._configs, of_tables, strict=True):
            sizes = [parts[feature].ids.numel() for feature in table.feature_names]
            pieces = torch.unsafe_split_with_sizes(of_table, [*sizes, len(values) - sum(sizes)])
            for feature, piece in zip(table.feature_names, pieces, strict=False):
                vectors[feature] = parts[feature].shaped(piece)
        return vectors

    def _bags_of(self, features: KeyedJagged | Mapping[str, Bags]) -> tuple[KeyedJagged, dict[str, _Part]]:
        parts = self._parts_of(features)
        return self._columns_of(parts), parts

    def _parts_of(self, features: KeyedJagged | Mapping[str, Bags]) -> dict[str, _Part]:
        wanted = self.keys()
        if isinstance(features, Mapping):
            return {feature: _part_of(feature, features[feature]) for feature in wanted}
        keys, values, offsets = features.keys(), features.values(), offsets_of(features).to(torch.int64)
        batch_size, rest = divmod(offsets.numel() - 1, len(keys))
        if rest or offsets[0] < 0 or (offsets.diff() < 0).any() or offsets[-1] > values.numel():
            raise DataError(
                f"{offsets.numel()} offsets, from {int(offsets[0])} to {int(offsets[-1])}, do not fit {len(keys)} "
                f"features with {values.numel()} ids: they are features x samples + 1, and never go back"
            )
        parts = {}
        for feature in wanted:
            first = keys.index(feature) * batch_size
            bounds = offsets[first : first + batch_size + 1]
            parts[feature] = _Part(values[int(bounds[0]) : int(bounds[-1])], bounds - bounds[0])
        return parts

    def _columns_of(self, parts: Mapping[str, _Part]) -> JaggedFeatures:
        """Each id a bag, but for padding, whose bags are empty."""
        ids = [
            torch.cat([parts[feature].ids.reshape(-1) for feature in table.feature_names]) for table in self._configs
        ]
        longest = max(of_table.numel() for of_table in ids)
        values, counts = [], []
        for of_table, padding in zip(ids, self._padding, strict=True):
            is_id = torch.ones_like(of_table, dtype=torch.bool) if padding is None else of_table != padding
            values.append(of_table if padding is None else of_table[is_id])
            counts.append(nn.functional.pad(is_id, (0, longest - of_table.numel())))
        ends = torch.cat(counts).cumsum(0)
        return JaggedFeatures(self._columns, torch.cat(values), torch.cat((ends.new_zeros(1), ends)))

    def _bad_id(self, parts: Mapping[str, _Part]) -> IdError | None:
        """By the names and numbers that whoever calls this knows."""
        for table, padding in zip(self._configs, self._padding, strict=True):
            for feature in table.feature_names if table.keys is None else ():
                part = parts[feature]
                is_bad = ((part.ids < 0) | (part.ids >= table.num_rows)).reshape(-1)
                if padding is not None:
                    is_bad &= part.ids.reshape(-1) != padding
                for place in torch.nonzero(is_bad)[:1].flatten().tolist():
                    of_sample = part.ids[:1].numel()
                    sample = place // of_sample
                    if part.offsets is not None:
                        sample = int(torch.searchsorted(part.offsets, place, right=True)) - 1
                    return IdError(
                        f"id outside [0, {table.num_rows}): {part.ids.reshape(-1)[place]} (feature {feature}, "
                        f"sample {sample})"
                    )
        return None


def _part_of(feature: str, bags: Bags) -> _Part:
    if isinstance(bags, Tensor) and bags.is_nested:
        return _Part(*jagged_parts(feature, bags), is_nested=True)
    if isinstance(bags, Tensor):
        if bags.dim() == 0 or not holds_ids(bags):
            raise DataError(
                f"feature {feature!r}: ids must be an int64 or int32 tensor of one dimension or more, "
                f"not {kind_of(bags)}"
            )
        return _Part(bags.to(torch.int64))
    jagged = JaggedFeatures.from_bags({feature: bags})
    return _Part(jagged.values(), jagged.offsets())
