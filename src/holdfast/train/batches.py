"""The batches that a run trains with, and whoever profiles it looks at."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from holdfast.data.batch import Batch
from holdfast.data.loader import Loader
from holdfast.data.source import Source
from holdfast.train.options import TrainConfig

Item = TypeVar("Item")


def make_loader(
    source: Source,
    config: TrainConfig,
    transform: Callable[[Batch], Item],
    part: tuple[int, int] = (0, 1),
    *,
    in_order: bool = False,
) -> Loader[tuple[Batch, Item]]:
    """The batches that training with `config` sees, in its order, each with what `transform` makes of it."""
    return Loader(
        source,
        batch_size=config.batch_size,
        seed=config.seed,
        shuffle=config.shuffle,
        workers=config.workers,
        prefetch=config.prefetch,
        part=part,
        lanes=config.lanes,
        transform=transform,
        in_order=in_order,
        new_data=config.new_data,
    )
