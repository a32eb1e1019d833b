"""A snapshot that is taken while another process trains is that run, stopped at the snapshot's step, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from crash_runs import HERE, SRC, Zygote, digest, pool_root
from holdfast import _core
from holdfast.admin.snapshot import SnapshotSummary, copying, open_chain, restore_snapshot, take_snapshot
from holdfast.errors import PoolError, PoolNotFound, StepError
from holdfast.pools.read_only import at_rest

pytestmark = pytest.mark.thorough

ENDLESS = 1_000_000
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "memory": {"medium": "memory"},
    "memory_small_log": {"medium": "memory", "log_bytes": 1 << 18, "optimizer": "adam"},
    "memory_captured_ahead": {"medium": "memory", "capture_ahead": True, "dense_interval": 4, "dtype": "bf16"},
    "memory_row_checksums": {"medium": "memory", "row_checksums": True, "capture_ahead": True, "dense_interval": 2},
    "memory_micro_batches": {"medium": "memory", "micro_batches": 2, "skip_every": 3, "optimizer": "adagrad"},
    "block": {"medium": "block", "log_bytes": 1 << 19},
    "block_dense_every_3_steps": {"medium": "block", "log_bytes": 1 << 19, "dense_interval": 3, "optimizer": "adam"},
    "block_micro_batches": {"medium": "block", "log_bytes": 1 << 20, "micro_batches": 2, "dtype": "fp16"},
}


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-live-", dir=pool_root()))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 2048)


class Training:
    """A process that trains the tiny run as fast as it can, until the block ends; then it is killed."""

    def __init__(self, pool: Path, options: Mapping[str, Any], steps: int = ENDLESS) -> None:
        self._pool = pool
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        code = "import json, sys, tiny_run; tiny_run.train(sys.argv[1], tiny_run.Options(**json.loads(sys.argv[2])))"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(pool), json.dumps({**options, "steps": steps})],
            env={
                **os.environ,
                **one,
                "MKL_CBWR": "AUTO,STRICT",
                "PYTHONPATH": f"{SRC}{os.pathsep}{HERE}",
            },
        )

    @property
    def step(self) -> int:
        try:
            return int(_core.Reader(str(self._pool)).commit["step"])
        except PoolError:  # it is being made
            return 0

    def wait_for(self, step: int) -> None:
        deadline_s = time.monotonic() + 60
        while self.step < step:
            assert self._process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def slowly(rows: int) -> None:
    """Lets the run take steps between two chunks."""
    time.sleep(0.003)


class Reference:
    """The same run in a pool of its own, which nothing disturbs."""

    def __init__(self, zygote: Zygote, pool: Path, options: Mapping[str, Any]) -> None:
        self._run: Callable[[Path, int], object] = lambda where, steps: zygote.run(where, {**options, "steps": steps})
        self._pool = pool

    def digest_at(self, step: int) -> str:
        self._run(self._pool, step)
        return digest(self._pool)

    def train(self, pool: Path, step: int) -> str:
        self._run(pool, step)
        return digest(pool)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_live_snapshots_full_and_incremental_restore_to_the_bit(name: str, zygote: Zygote, root: Path) -> None:
    options = CONFIGURATIONS[name]
    taken: dict[str, SnapshotSummary] = {}
    with Training(root / "pool", options) as training:
        training.wait_for(20)
        taken["a"] = take_snapshot(root / "pool", root / "a", on_rows=slowly)
        taken["b"] = take_snapshot(root / "pool", root / "b", since=root / "a", on_rows=slowly)
        taken["c"] = take_snapshot(root / "pool", root / "c", since=root / "b", on_rows=slowly)
        taken["d"] = take_snapshot(root / "pool", root / "d")
    taken["e"] = take_snapshot(root / "pool", root / "e", since=root / "c")  # of a pool that was killed
    assert sum(summary.corrections for summary in taken.values()) > 0
    assert [len(open_chain(root / name)) for name in taken] == [1, 2, 3, 1, 4]

    reference = Reference(zygote, root / "reference", options)
    for name, summary in taken.items():
        restore_snapshot(root / name, root / f"restored-{name}", medium=options["medium"])
        assert digest(root / f"restored-{name}") == reference.digest_at(summary.step), (name, summary)
        restored = _core.Reader(str(root / f"restored-{name}"))
        assert restored.verify() == []
        assert restored.header["row_checksums"] == options.get("row_checksums", False)
    last = taken["e"].step
    continued = reference.digest_at(last + 30)
    for name in taken:
        assert reference.train(root / f"restored-{name}", last + 30) == continued, name
    with at_rest(root / "pool") as (reader, _):
        assert reader.commit["step"] == last


@pytest.mark.parametrize(("medium", "other"), [("memory", "block"), ("block", "memory")])
def test_a_snapshot_goes_on_over_the_other_kind_of_store(medium: str, other: str, zygote: Zygote, root: Path) -> None:
    reference = Reference(zygote, root / "reference", {"medium": medium})
    reference.digest_at(12)
    take_snapshot(root / "reference", root / "snapshot")
    restore_snapshot(root / "snapshot", root / "restored", medium=other)  # type: ignore[arg-type]
    zygote.run(root / "restored", {"medium": other, "steps": 30})
    assert digest(root / "restored") == reference.digest_at(30)


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_restored_pool_survives_kills_as_any_other(medium: str, zygote: Zygote, root: Path) -> None:
    options = {"medium": medium, "steps": 9}
    reference = Reference(zygote, root / "reference", options)
    reference.digest_at(5)
    take_snapshot(root / "reference", root / "snapshot")
    expected = reference.digest_at(9)
    for point in range(1, 40, 3):
        pool = root / f"killed-{point}"
        restore_snapshot(root / "snapshot", pool, medium=medium)  # type: ignore[arg-type]
        zygote.run(pool, options, kill_at=point)
        zygote.run(pool, options)
        assert digest(pool) == expected, point


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_step_waits_for_its_dense_state(medium: str, zygote: Zygote, root: Path) -> None:
    options = {"medium": medium, "dense_interval": 10}
    with Training(root / "pool", options) as training:
        training.wait_for(5)
        wanted = (training.step // 10 + 30) * 10
        assert take_snapshot(root / "pool", root / "snapshot", step=wanted).step == wanted
        training.wait_for(wanted + 20)
        with pytest.raises(StepError, match="is past"):
            take_snapshot(root / "pool", root / "late", step=wanted)
    with pytest.raises(StepError, match="no run takes it"):
        take_snapshot(root / "pool", root / "never", step=ENDLESS)
    restore_snapshot(root / "snapshot", root / "restored", medium=medium)  # type: ignore[arg-type]
    assert digest(root / "restored") == Reference(zygote, root / "reference", options).digest_at(wanted)
    assert sorted(path.name for path in root.iterdir()) == ["pool", "reference", "restored", "snapshot"]


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_copy_that_takes_the_pools_place_meanwhile_is_never_mixed_with_it(
    medium: str, zygote: Zygote, root: Path
) -> None:
    """It is the same pool, of an earlier step, so nothing in its files tells it from the one that was there."""
    digests = {}
    for steps in (80, 140):
        zygote.run(root / "pool", {"medium": medium, "log_bytes": 1 << 17, "steps": steps})
        digests[steps] = digest(root / "pool")
        if steps == 80:
            shutil.copytree(root / "pool", root / "copy")

    def replace(rows: int) -> None:
        if (root / "copy").exists():
            (root / "pool").rename(root / "diverged")
            (root / "copy").rename(root / "pool")

    taken = take_snapshot(root / "pool", root / "snapshot", on_rows=replace)
    restore_snapshot(root / "snapshot", root / "restored", medium=medium)  # type: ignore[arg-type]
    assert digest(root / "restored") == digests[taken.step] == digests[80]
    with pytest.raises(PoolNotFound):
        take_snapshot(root / "pool", root / "gone", on_rows=lambda _: shutil.rmtree(root / "pool", True))
    assert not (root / "gone").exists()
