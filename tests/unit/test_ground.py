"""What a pool lies on decides what it promises: the level is what is true, and whoever only looks changes nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from holdfast import Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.admin.inspection import inspect_pool
from holdfast.admin.repair import problems_of
from holdfast.errors import ConfigError, Corrupted, PoolError

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting takes root")


def make(directory: Path, *, log_store: bool = True) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    tables = [
        _core.TableSpec(
            name="t", num_embeddings=100, embedding_dim=4, dtype=0, optimizer=0, pooling=0, init_low=-1.0, init_high=1.0
        )
    ]
    _core.Pool.create(str(directory), 7, 1 << 16, tables, log_store=log_store)
    return directory


def level_on(directory: Path) -> str:
    pool = make(directory / "pool")
    level = _core.Reader(str(pool)).header["level"]
    shutil.rmtree(pool)
    return str(level)


@contextmanager
def mounted(where: Path, *arguments: str) -> Iterator[Path]:
    where.mkdir(parents=True)
    done = subprocess.run(["mount", *arguments, str(where)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this kernel does not mount it: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


@contextmanager
def disk_in(directory: Path) -> Iterator[Path]:
    """An ext4 in a file of `directory`, mounted."""
    image = directory / "disk.img"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    if subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False).returncode != 0:
        pytest.skip("there is no mkfs.ext4")
    with mounted(directory / "disk", "-o", "loop", str(image)) as disk:
        yield disk


def overlay(on: Path, name: str, *options: str) -> list[str]:
    for each in ("lower", f"upper-{name}", f"work-{name}"):
        (on / each).mkdir(exist_ok=True)
    layers = f"lowerdir={on}/lower,upperdir={on}/upper-{name},workdir={on}/work-{name}"
    return ["-t", "overlay", "overlay", "-o", ",".join([layers, *options])]


@needs_root
def test_what_lies_beneath_overlays_and_loop_devices_decides_the_level(tmp_path: Path):
    on_disk = level_on(tmp_path)
    with ExitStack() as stack:
        memory = stack.enter_context(mounted(tmp_path / "memory", "-t", "tmpfs", "tmpfs"))
        assert level_on(memory) == "process"
        over_memory = stack.enter_context(mounted(tmp_path / "over-memory", *overlay(memory, "a")))
        assert level_on(over_memory) == "process"
        assert not _core.is_block_medium(str(over_memory)), "rows there would take memory twice"
        loop = stack.enter_context(disk_in(memory))
        assert level_on(loop) == "process"
        real = stack.enter_context(disk_in(tmp_path))
        assert level_on(real) == on_disk
        over_real = stack.enter_context(mounted(tmp_path / "over-real", *overlay(real, "b")))
        assert level_on(over_real) == on_disk
        unsafe = stack.enter_context(mounted(tmp_path / "unsafe", *overlay(real, "c", "volatile")))
        assert level_on(unsafe) == "process"


@needs_root
def test_an_unknown_boot_is_never_the_same_boot(pool_root: Path):
    pool = make(pool_root / "pool", log_store=False)
    code = (
        "import os, sys\nfrom pathlib import Path\n"
        "from holdfast import Pool\nfrom holdfast.errors import UntrustedPool\n"
        "if os.fork() == 0:\n    Pool(Path(sys.argv[1]))\n    os._exit(0)\n"
        "os.wait()\n"
        "try:\n    Pool(Path(sys.argv[1]))\nexcept UntrustedPool as error:\n    print(error)\n"
    )
    hidden = 'mount --bind /dev/null /proc/sys/kernel/random/boot_id && exec "$@"'
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", hidden, "sh", sys.executable, "-c", code, str(pool)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "cannot be told" in run.stdout, run.stdout + run.stderr


def tree_of(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    paths = [directory, *sorted(directory.rglob("*"))]
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_ctime_ns, path.read_bytes() if path.is_file() else b"")
        for path in paths
    }


@pytest.mark.parametrize("log_store", [True, False])
def test_whoever_only_looks_changes_nothing_and_follows_no_link_that_lies_there(
    pool_root: Path, tmp_path: Path, log_store: bool
):
    pool = make(pool_root / "pool", log_store=log_store)
    with Pool(pool):
        pass
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (pool / f".dax-probe-{os.getpid()}").symlink_to(victim)
    before = tree_of(pool)
    inspect_pool(pool)
    digest_pool(_core.Reader(str(pool)))
    assert problems_of(pool) == []
    assert tree_of(pool) == before
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["lock", "dense-0", "log-0000", "pool.holdfast"])
def test_a_pool_writes_to_no_file_through_a_link(pool_root: Path, tmp_path: Path, name: str):
    pool = make(pool_root / "pool", log_store=False)
    elsewhere = tmp_path / "elsewhere"
    if (pool / name).exists():
        shutil.move(pool / name, elsewhere)
    else:
        elsewhere.write_text("precious")
    before = elsewhere.read_bytes()
    (pool / name).symlink_to(elsewhere)
    with pytest.raises(PoolError):
        Pool(pool)
    assert elsewhere.read_bytes() == before


def test_making_a_pool_truncates_nothing_that_a_link_points_to(pool_root: Path, tmp_path: Path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (pool_root / "pool").mkdir()
    for name in ("pool.holdfast.new", "dense-0", "log-0000"):
        (pool_root / "pool" / name).symlink_to(victim)
    with pytest.raises(Corrupted):
        make(pool_root / "pool", log_store=False)
    assert victim.read_text() == "precious"
    _core.mark_unpublished(str(pool_root / "pool"))  # so they look like what a creation left that did not end
    make(pool_root / "pool", log_store=False)
    assert victim.read_text() == "precious"


@needs_root
def test_a_pool_on_hugetlbfs_is_sent_to_tmpfs(tmp_path: Path) -> None:
    with mounted(tmp_path / "huge", "-t", "hugetlbfs", "none") as huge:
        with pytest.raises(ConfigError, match=r"hugetlbfs, whose files are mapped and never written: put the pool on "):
            make(huge / "pool", log_store=False)
        assert [path.name for path in (huge / "pool").iterdir()] in ([], ["lock"])
