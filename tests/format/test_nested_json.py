"""Text that is nested so deep that it would exhaust Python's stack is damage like any other: a typed error, at whatever
depth the reader, or what comes after it, gives up."""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from holdfast.admin.snapshot.chain import Snapshot
from holdfast.admin.snapshot.form import MANIFEST
from holdfast.admin.tensor_files import open_tensors
from holdfast.errors import ConfigError, Corrupted, FormatMismatch, HoldfastError
from holdfast.files.config import read_config, read_json
from holdfast.group.manifest import Manifest
from holdfast.run.sections import RunConfig
from holdfast.state import state_tree
from holdfast.train import observe, trace
from holdfast_lab.placement.access_profile import AccessProfile

DEPTHS = (300, 900, 1000, 5000, 100_000)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def in_objects(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


def read_snapshot(directory: Path, text: str) -> None:
    (directory / MANIFEST).write_text(f'{{"format":"holdfast snapshot","version":1,"crc32c":0,"deep":{text}}}')
    Snapshot.open(directory)


def read_group(directory: Path, text: str) -> None:
    Manifest.from_json(f'{{"format":"holdfast group","version":1,"crc32c":0,"deep":{text}}}', "group.json")


def read_dense_state(directory: Path, text: str) -> None:
    state_tree.unpack(f'{{"format":1,"tensors":[],"tree":{text}}}'.encode(), b"")


def read_tensors(directory: Path, text: str) -> None:
    header = f'{{"weight":{text}}}'.encode()
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    open_tensors(path)


def read_profile(directory: Path, text: str) -> None:
    path = directory / "profile.json"
    path.write_text(text)
    read_json(AccessProfile, path, version=1)


def read_toml(directory: Path, text: str) -> None:
    path = directory / "run.toml"
    path.write_text(f"a = {text.replace(':', '=').replace('{', '{ ')}")
    read_config(RunConfig, path)


def read_setting(directory: Path, text: str) -> None:
    path = directory / "run.toml"
    path.write_text("")
    read_config(RunConfig, path, [f"train.steps={text}"])


def read_metrics(directory: Path, text: str) -> None:
    path = directory / "metrics.jsonl"
    path.write_text(f'{{"step":1,"deep":{text}}}\n')
    observe._cut_after(path, 3)


def read_trace(directory: Path, text: str) -> None:
    trace._parse(text.encode())


READERS: dict[str, Callable[[Path, str], object]] = {
    "snapshot": read_snapshot,
    "group": read_group,
    "dense state": read_dense_state,
    "safetensors": read_tensors,
    "profile": read_profile,
    "configuration": read_toml,
    "setting": read_setting,
    "metrics": read_metrics,
    "trace": read_trace,
}


@pytest.mark.parametrize("name", READERS)
def test_deep_nesting_is_a_typed_error(name: str, tmp_path: Path) -> None:
    for depth in DEPTHS:
        for text in (nested(depth), in_objects(depth)):
            with suppress(Corrupted, FormatMismatch, ConfigError):
                READERS[name](tmp_path, text)


def test_a_state_nested_deeper_than_it_can_be_read_is_not_written() -> None:
    tree: object = torch.zeros(1)
    for _ in range(100_000):
        tree = [tree]
    with pytest.raises(HoldfastError):
        state_tree.flatten(tree)
