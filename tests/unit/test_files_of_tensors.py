"""What files of tensors may hold that nobody means: each is said to be that, and nothing is imported."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import holdfast
from holdfast.errors import ConfigError, Corrupted, FormatMismatch, HoldfastError

ROWS, DIM = 10, 4
WEIGHT = "embedding_bags.items.weight"
TABLES = [holdfast.EmbeddingBagConfig(name="items", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])]
VALUES = torch.arange(float(ROWS * DIM)).reshape(ROWS, DIM)


def refused(pool_root: Path, source: Any, error: type[HoldfastError], words: str, **options: Any) -> None:
    with pytest.raises(error, match=words):
        holdfast.import_tables(pool_root / "pool", TABLES, source, **options)
    assert not (pool_root / "pool").exists()


def saved(pool_root: Path, values: object, **options: Any) -> Path:
    path = pool_root / "state.pt"
    torch.save(values, path, **options)
    return path


def test_of_two_tensors_of_one_name_none_is_taken(pool_root: Path) -> None:
    nested = {"embedding_bags": {"items": {"weight": VALUES}}, WEIGHT: VALUES + 1}
    refused(pool_root, saved(pool_root, nested), ConfigError, f"state.pt has two tensors {WEIGHT}")
    entry = {"dtype": "F32", "shape": [ROWS, DIM], "data_offsets": [0, 160]}
    text = json.dumps({WEIGHT: entry, "other": entry}).replace("other", WEIGHT).encode()
    path = pool_root / "state.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(160))
    refused(pool_root, path, Corrupted, f"it has {WEIGHT} twice")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Tensor.to_sparse, "is torch.sparse_coo; give it in full"),
        (Tensor.to_sparse_csr, "is torch.sparse_csr; give it in full"),
        (lambda values: values.to("meta"), "is on the meta device"),
        (lambda values: torch.quantize_per_tensor(values, 0.1, 0, torch.qint8), "is quantized; give it as floats"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_has_no_rows_to_read_is_said_to_be_that(
    pool_root: Path, made: Callable[[Tensor], Tensor], words: str
) -> None:
    values = made(VALUES)
    refused(pool_root, {"items": values}, ConfigError, words)
    refused(pool_root, saved(pool_root, {WEIGHT: values}), ConfigError, words)


def test_what_is_not_unpickled_is_named_and_what_an_old_torch_saved_told_what_to_do(pool_root: Path) -> None:
    of_a_script = {WEIGHT: VALUES, "args": argparse.Namespace(lr=1)}
    refused(pool_root, saved(pool_root, of_a_script), FormatMismatch, r"the first is of argparse\.Namespace\): save a")
    old = saved(pool_root, {WEIGHT: VALUES}, _use_new_zipfile_serialization=False)
    refused(pool_root, old, FormatMismatch, "a PyTorch before 1.6 saved has to be loaded and saved again")


def test_a_dict_that_holds_itself_is_no_file_of_tensors(pool_root: Path) -> None:
    without_end: dict[str, Any] = {WEIGHT: VALUES}
    without_end["model"] = without_end
    refused(pool_root, saved(pool_root, without_end), FormatMismatch, "holds dicts in dicts without end")


@pytest.mark.parametrize(
    ("optimizer", "part", "shape"),
    [
        (holdfast.Adagrad(), "momentum1", (ROWS, DIM)),
        (holdfast.RowWiseAdagrad(), "momentum1", (ROWS,)),
        (holdfast.Adam(), "momentum2", (ROWS, DIM)),
    ],
)
def test_squares_below_zero_are_another_optimizers_state(
    pool_root: Path, optimizer: Any, part: str, shape: tuple[int, ...]
) -> None:
    """The first step made each row of a batch NaN, and the pool durable with it."""
    state = {"momentum1": torch.zeros(ROWS, DIM), part: torch.ones(shape)}
    state[part][3] = -1
    refused(
        pool_root,
        {"items": {"weight": VALUES, **state}},
        ConfigError,
        "row 3 is below 0, where the configuration's optimizer keeps squares",
        optimizer=optimizer,
    )


def test_a_modules_own_name_of_a_table_is_told_the_way_in(pool_root: Path) -> None:
    source = saved(pool_root, {"user.weight": VALUES, "top.weight": torch.ones(1, DIM)})
    refused(pool_root, source, ConfigError, rf"--rename user\.weight={WEIGHT}, if that is it")
    assert holdfast.import_tables(pool_root / "pool", TABLES, source, rename={"user.weight": WEIGHT}) is not None
    module_dict = saved(pool_root, {"tables.items.weight": VALUES})
    assert holdfast.import_tables(pool_root / "other", TABLES, module_dict, rename={"tables": "embedding_bags"})


def test_of_two_copies_of_a_table_neither_is_taken(pool_root: Path) -> None:
    source = saved(pool_root, {WEIGHT: VALUES, f"ema.{WEIGHT}": VALUES})
    refused(pool_root, source, ConfigError, f"several names in the file fit: {WEIGHT}, ema.{WEIGHT}; leave all but one")
