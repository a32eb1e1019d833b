"""Every name and every size that a pool, a snapshot or an export rests on is synced before the rename that publishes
it: a directory that was not synced may come back from a power cut without its files, whatever they were told."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.dear

HERE = Path(__file__).parent
SRC = HERE.parents[1] / "src"
MEANS_NOTHING = ("lock", ".dax-probe")

PLAIN = """
from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool
from holdfast.pools.optim import RowWiseAdagrad

tables = [EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name="t", feature_names=["f"])]
with Pool({root!r} + "/new/runs/pool", medium={medium!r}, log_bytes=1 << 20) as pool:
    EmbeddingBagCollection(pool, tables, optimizer=RowWiseAdagrad(lr=0.5))
"""

APART = PLAIN.replace(
    "with Pool(",
    "import os\nfrom holdfast import LogMedium\nlogs = {root!r} + '/logs'\nos.mkdir(logs)\nwith Pool(",
).replace("log_bytes=1 << 20", "log_bytes=1 << 20, log=LogMedium(directory=logs)")

GROUP = """
import sys
from pathlib import Path

sys.path[:0] = {tests!r}
from group_runs import small
from holdfast.files.config import read_value
from holdfast.run.assembly import RunConfig
from holdfast.group.group import Group
from holdfast.group.options import GroupOptions
from holdfast.run.ranks import open_group_trainer

run = small(pool={{"medium": {medium!r}, "log_bytes": 1 << 20}}, train={{"steps": 2}})
config = read_value(RunConfig, run, "config")
group = Group.from_environment(GroupOptions(timeout=30.0))
with open_group_trainer(config, Path({root!r}) / "new/runs/pool", group) as trainer:
    list(trainer.steps())
"""

COPIES = (
    PLAIN
    + """
from pathlib import Path
from holdfast import _core
from holdfast.admin.snapshot import restore_snapshot, take_snapshot
from holdfast.admin.exporting import export_pool

root = Path({root!r})
take_snapshot(root / "new/runs/pool", root / "snapshot")
restore_snapshot(root / "snapshot", root / "again/and/restored", medium={medium!r})
export_pool(_core.Reader(str(root / "new/runs/pool")), root / "out.safetensors", overwrite=False)
"""
)


@dataclass(frozen=True, slots=True)
class Event:
    what: str
    path: str
    to: str


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = str(HERE / "fault_shim.cpp")
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", source, "-o", str(library)], check=True)
    return library


def recorded(shim: Path, root: Path, program: str, medium: str) -> list[Event]:
    record = root / "record"
    text = program.format(root=str(root), medium=medium, tests=[str(HERE.parent), str(HERE.parent / "distributed")])
    environment = {**os.environ, "LD_PRELOAD": str(shim), "HOLDFAST_RECORD": str(record), "PYTHONPATH": str(SRC)}
    subprocess.run([sys.executable, "-c", text], env=environment, check=True)
    events = [Event(*line.split("\t")) for line in record.read_text().splitlines()]
    inside = [
        event
        for event in events
        if f"{event.path}/".startswith(f"{root}/") and not event.path.endswith(" (deleted)")  # those have no name
    ]
    return [Event(event.what, os.path.normpath(event.path), os.path.normpath(event.to)) for event in inside]


def not_durable(events: list[Event]) -> set[str]:
    """What of these a power cut may take back: names whose directory, files whose size was not synced since."""
    lost: set[str] = set()
    names: dict[str, str] = {}  # by name, the directory to sync
    for event in events:
        match event.what:
            case "make":
                names[event.path] = str(Path(event.path).parent)
            case "rename":
                names.pop(event.path, None)
                moved = {f"{event.to}{name.removeprefix(event.path)}": name for name in [*names, *lost]}
                for to, name in moved.items():
                    if to != name and name.startswith(f"{event.path}/"):
                        if name in names:
                            del names[name]
                            names[to] = str(Path(to).parent)
                        lost.discard(name)
                names[event.to] = str(Path(event.to).parent)
            case "size":
                lost.add(event.path)
            case "sync":
                lost.discard(event.path)
                names = {name: directory for name, directory in names.items() if directory != event.path}
    return {name for name in [*names, *lost] if not Path(name).name.startswith(MEANS_NOTHING)}


def check_published(events: list[Event], published: Path) -> None:
    """By the rename that gave it its name, in a directory that was synced next."""
    (at,) = [number for number, event in enumerate(events) if event.what == "rename" and event.to == str(published)]
    what_was_renamed = {events[at].path}
    assert not_durable(events[:at]) <= what_was_renamed, published
    assert any(event.what == "sync" and event.path == str(published.parent) for event in events[at:])


@pytest.mark.parametrize("medium", ["memory", "block"])
@pytest.mark.parametrize(("program", "file"), [(PLAIN, "pool.holdfast"), (GROUP, "group.json")], ids=["one", "group"])
def test_a_pool_is_published_when_every_name_that_it_rests_on_is_durable(
    program: str, file: str, medium: str, shim: Path, pool_root: Path
):
    events = recorded(shim, pool_root, program, medium)
    assert sum(event.what == "make" for event in events) > 8
    check_published(events, pool_root / "new/runs/pool" / file)


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_snapshots_restored_pools_and_exports_are_there_when_every_name_that_they_rest_on_is_durable(
    medium: str, shim: Path, pool_root: Path
):
    events = recorded(shim, pool_root, COPIES, medium)
    for published in ("snapshot", "again/and/restored", "out.safetensors"):
        check_published(events, pool_root / published)


def test_a_log_on_a_medium_of_its_own_and_the_link_to_it_are_durable_before_the_pool_is_published(
    shim: Path, pool_root: Path
):
    events = recorded(shim, pool_root, APART, "block")
    made = [event.path for event in events if event.what == "make"]
    assert any(path.endswith("/row-log-0000") for path in made)
    assert any(path.startswith(f"{pool_root}/logs/") for path in made)
    # The folder itself is the user's, who made it beforehand.
    there = [event for event in events if event.path != f"{pool_root}/logs" or event.what != "make"]
    check_published(there, pool_root / "new/runs/pool/pool.holdfast")


def test_a_directory_that_is_not_synced_is_found():
    made = [Event("make", "/a", "."), Event("make", "/a/b", "."), Event("size", "/a/b", "."), Event("sync", "/a", ".")]
    assert not_durable(made) == {"/a", "/a/b"}
    assert not_durable([*made, Event("sync", "/a/b", "."), Event("sync", "/", ".")]) == set()
