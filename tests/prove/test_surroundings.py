"""What the witness makes of a script's own variables, in a process of the test's."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import holdfast
from holdfast.proving.surroundings import surrounding_leaves
from holdfast.proving.witness import _loader_workers


class Closed(Mapping[str, Any]):
    """As a database that was closed: nothing can be asked of it."""

    def __getitem__(self, key: str) -> Any:
        raise ValueError("closed")

    def __iter__(self) -> Iterator[str]:
        raise ValueError("closed")

    def __len__(self) -> int:
        raise ValueError("closed")


class Gone:
    pass


def test_a_variable_that_cannot_be_looked_at_is_left_out_and_the_others_are_seen(pool_root: Path) -> None:
    with holdfast.Pool(pool_root / "pool") as pool:
        table = holdfast.EmbeddingBagConfig(name="t", num_embeddings=3, embedding_dim=2, feature_names=["f"])
        holdfast.EmbeddingBagCollection(pool, [table])
        checkpoint = holdfast.Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[])
        closed, proxy = Closed(), weakref.proxy(Gone())  # noqa: F841
        noise = torch.Generator()  # noqa: F841
        names = [leaf.name.partition(" ")[0] for leaf in surrounding_leaves(checkpoint)]
    assert "noise" in names
    assert not {"closed", "proxy"} & set(names)


def test_workers_of_loaders_are_counted_beside_a_proxy_of_what_is_gone() -> None:
    proxy = weakref.proxy(Gone())  # noqa: F841
    loader = DataLoader([1, 2], num_workers=2)
    assert _loader_workers() >= loader.num_workers
