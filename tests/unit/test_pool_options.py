"""What a pool is asked to be and cannot: the field is named, nothing is made, and a pool that is there stays usable."""

from __future__ import annotations

import errno
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import (
    SGD,
    Checkpoint,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    GroupOptions,
    Pool,
    import_tables,
    prefetch,
)
from holdfast.errors import ConfigError, PoolError, PoolExists, PoolFull, PoolNotFound, PoolReadOnly
from holdfast.pools import directory
from holdfast.pools.directory import Medium

TABLE = EmbeddingBagConfig(num_embeddings=100, embedding_dim=4, name="t", feature_names=["f"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dense_interval", 0),
        ("log_bytes", 4095),
        ("recovery", "newest"),
        ("medium", "tape"),
        ("scratchpad_bytes", 0),
        ("scratchpad_nodes", (-1,)),
        ("scratchpad_nodes", (0, 777)),
        ("scratchpad_nodes", (1 << 40,)),
        ("dense_interval", 10**23),
        ("log_bytes", 10**23),
        ("scratchpad_bytes", 10**23),
        ("seed", -1),
        ("seed", 10**23),
        ("dense_interval", 1.5),
        ("log_bytes", 2.0**30),
        ("seed", "1"),
    ],
)
def test_an_option_that_cannot_be_is_named_and_nothing_is_made(pool_root: Path, field: str, value: Any) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"^{field} = "):
        Pool(pool_root / "pool", **options)
    assert not (pool_root / "pool").exists()


def test_an_empty_name_is_not_the_working_directory(pool_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(pool_root)
    for make in (Pool, lambda name: import_tables(name, [TABLE], {})):
        with pytest.raises(ConfigError, match=r"directory is empty .*not set"):
            make("")
    assert not list(pool_root.iterdir())


def test_a_name_that_is_too_long_is_said_to_be(pool_root: Path) -> None:
    for make in (Pool, lambda name: import_tables(name, [TABLE], {})):
        with pytest.raises(ConfigError, match=r"directory '.*xxx' has a name that is longer than the filesystem"):
            make(pool_root / ("x" * 300))


@pytest.mark.parametrize("pool", ["runs/a", Path("runs/a"), None])
def test_what_stands_for_a_pool_and_is_none_is_named(pool: Any) -> None:
    words = "'runs/a' is where one lies; open it" if pool else "a NoneType is none"
    network = torch.nn.Linear(4, 1)
    dense = torch.optim.SGD(network.parameters())
    for make in (
        lambda: EmbeddingBagCollection(pool, [TABLE]),
        lambda: EmbeddingCollection(pool, [TABLE]),
        lambda: Checkpoint(pool, model=network, optimizer=dense),
        lambda: prefetch([], pool),
    ):
        with pytest.raises(ConfigError, match=f"pool: it must be a holdfast.Pool, {words}"):
            make()


def test_a_name_that_is_not_utf8_is_refused_also_where_it_is_the_working_directorys(
    pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = Path(os.fsdecode(os.fsencode(pool_root) + b"/\xff"))
    odd.mkdir()
    monkeypatch.chdir(odd)
    for make in (Pool, lambda name: import_tables(name, [TABLE], {})):
        for name in ("pool", odd / "pool", os.fsencode(odd).decode("utf-8", "surrogateescape")):
            with pytest.raises(ConfigError, match="not UTF-8"):
                make(name)
    assert not list(odd.iterdir())


def test_a_name_that_the_locale_has_in_another_encoding_is_refused(
    pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python makes its part of it under the one name, and the core looks for it under the other."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    with pytest.raises(ConfigError, match=r"'.*p\\xe4' would have two names.* for iso8859-1.* set PYTHONUTF8=1"):
        Pool(pool_root / "p\xe4")
    EmbeddingBagCollection(Pool(pool_root / "plain"), [TABLE], optimizer=SGD(lr=0.1))


@pytest.mark.parametrize(
    ("refused", "kind", "words"),
    [
        (errno.ENOSPC, PoolFull, "No space left on device; free space there, or inodes (df -i)"),
        (errno.EDQUOT, PoolFull, "Disk quota exceeded; free space of this user there, or have the quota raised"),
        (errno.EACCES, PoolReadOnly, "Permission denied"),
        (errno.EIO, PoolError, "Input/output error"),
    ],
)
def test_a_directory_that_cannot_be_made_is_the_error_that_its_files_would_be(
    pool_root: Path, monkeypatch: pytest.MonkeyPatch, refused: int, kind: type[PoolError], words: str
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(refused, os.strerror(refused), str(path))

    monkeypatch.setattr(directory, "make_directory", refuse)
    with pytest.raises(kind) as raised:
        EmbeddingBagCollection(Pool(pool_root / "pool"), [TABLE], optimizer=SGD(lr=0.1))
    assert (raised.type, str(raised.value)) == (kind, f"making {pool_root / 'pool'}: {words}")


def test_a_link_to_what_is_not_there_says_so(pool_root: Path) -> None:
    link = pool_root / "pool"
    link.symlink_to(pool_root / "unmounted" / "pool")
    with pytest.raises(PoolExists, match=r"is a link to .*unmounted/pool, which is not there"):
        EmbeddingBagCollection(Pool(link), [TABLE], optimizer=SGD(lr=0.1))


def test_a_relative_name_where_the_working_directory_was_removed_says_so(
    pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pool_root / "gone").mkdir()
    monkeypatch.chdir(pool_root / "gone")
    (pool_root / "gone").rmdir()
    with pytest.raises(ConfigError, match="'pool' is relative, and the working directory was removed"):
        Pool("pool")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shards", 3),
        ("shards", 0),
        ("shards", 1 << 20),
        ("split_rows", -1),
        ("timeout", 0.0),
        ("timeout", float("nan")),
    ],
)
def test_an_option_of_a_group_that_cannot_be_is_named(field: str, value: Any) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(ConfigError, match=f"^group.{field} = "):
        GroupOptions(**options)


@pytest.mark.parametrize(
    ("made", "asked", "words"),
    [
        ({"medium": "memory"}, {"medium": "block"}, "medium = 'block', .* was made as 'memory'"),
        ({"medium": "block"}, {"medium": "memory"}, "medium = 'memory', .* was made as 'block'"),
        ({"medium": "memory"}, {"row_checksums": True}, "row_checksums = true, .* was made without"),
    ],
)
def test_a_pool_is_not_opened_as_what_it_is_not_and_is_left_usable(
    pool_root: Path, made: dict[str, Any], asked: dict[str, Any], words: str
) -> None:
    with Pool(pool_root / "pool", log_bytes=1 << 20, **made) as pool:
        EmbeddingBagCollection(pool, [TABLE])
    with pytest.raises(ConfigError, match=words):
        Pool(pool_root / "pool", **asked)
    with Pool(pool_root / "pool", **made) as pool:  # nobody holds its lock
        EmbeddingBagCollection(pool, [TABLE])
        assert pool.recovered.clean


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_pool_whose_further_tables_could_not_be_made_goes_on_with_those_that_it_had(
    pool_root: Path, medium: Medium
) -> None:
    large = EmbeddingBagConfig(name="large", num_embeddings=1 << 22, embedding_dim=64, feature_names=["large"])
    keyed = EmbeddingBagConfig(
        num_embeddings=None, name="keyed", capacity=100, embedding_dim=4, feature_names=["keyed"], keys="int64"
    )
    with Pool(pool_root / "pool", medium=medium, log_bytes=1 << 20, seed=1) as pool:
        rows = EmbeddingBagCollection(pool, [TABLE])
        of_keys = EmbeddingBagCollection(pool, [keyed])
        before = rows.read(0, torch.arange(3))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, hard))
        try:
            with pytest.raises(PoolError, match=r"table-0002.*ulimit -f"):
                EmbeddingBagCollection(pool, [large])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(pool.collections) == 2
        assert torch.equal(rows.read(0, torch.arange(3)), before)
        rows({name: torch.tensor([1]) for name in TABLE.feature_names}).values().sum().backward()
        of_keys({"keyed": torch.tensor([1 << 40])}).values().sum().backward()
        for collection in pool.collections:
            collection.optimizer.step()
        assert pool.commit(1) == 1
    with Pool(pool_root / "pool") as pool:
        assert pool.step == 1


def test_a_checkpoint_of_another_pool_than_its_models_is_refused(pool_root: Path) -> None:
    """It committed steps without a row, one after the other, and the pool with the rows none."""
    pools = [Pool(pool_root / name, log_bytes=1 << 20) for name in "ab"]
    models = [torch.nn.Sequential(EmbeddingBagCollection(pool, [TABLE])) for pool in pools]
    with pytest.raises(ConfigError, match=r"rows of table 't' are none of the pool in .*/a: give the Checkpoint the"):
        Checkpoint(pools[0], model=models[1], optimizer=[])
    for pool, model in zip(pools, models, strict=True):
        assert Checkpoint(pool, model=torch.nn.ModuleList([model, models[1].eval()]), optimizer=[]).resume() == 0
        pool.close()


def test_a_pool_that_is_not_made_yet_has_nothing_to_use_and_closes(pool_root: Path) -> None:
    pool = Pool(pool_root / "pool")
    with pytest.raises(PoolNotFound, match="made when the first tables are attached"):
        _ = pool.core
    pool.close()
    assert not (pool_root / "pool").exists()


def test_what_is_to_happen_before_a_pool_closes_happens_once_while_it_is_open(pool_root: Path) -> None:
    happened: list[tuple[str, int]] = []
    pool = Pool(pool_root / "pool", medium="memory", log_bytes=1 << 20)
    EmbeddingBagCollection(pool, [TABLE])
    pool.before_closing(lambda: happened.append(("first", pool.durable_step)))
    pool.before_closing(lambda: happened.append(("second", pool.durable_step)))
    pool.close()
    pool.close()
    assert happened == [("first", 0), ("second", 0)]


def test_a_pool_below_the_home_directory_is_where_the_shell_would_have_it(
    pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(pool_root))
    monkeypatch.chdir(pool_root)
    with Pool("~/pool") as pool:
        EmbeddingBagCollection(pool, [TABLE])
        assert pool.directory == pool_root / "pool"
    with Pool(Path("~", "pool")) as pool:
        EmbeddingBagCollection(pool, [TABLE])
        assert not pool.is_new
    assert not (pool_root / "~").exists()
    with Pool("~nobody-of-this-name") as pool:  # a name like any other
        EmbeddingBagCollection(pool, [TABLE])
    assert (pool_root / "~nobody-of-this-name").is_dir()


def test_a_relative_directory_is_below_where_the_pool_was_asked_for(
    pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = pool_root / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(pool_root)
    with Pool("pool") as pool:
        monkeypatch.chdir(elsewhere)
        EmbeddingBagCollection(pool, [TABLE])
    assert list(elsewhere.iterdir()) == []
    monkeypatch.chdir(pool_root)
    with Pool("pool") as pool:
        assert not pool.is_new


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("value", ["", "two", "0"])
def test_a_number_of_ranks_that_is_none_is_named_before_a_pool_is_made(
    variable: str, value: str, pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a variable that a file of Compose's lets through, and that nobody set."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # as torchrun leaves it
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=f"^{variable} = '{value}': it must be a number from 1$"):
        Pool(pool_root / "pool")
    assert not (pool_root / "pool").exists()


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_process_that_a_launcher_started_with_others_is_told_that_it_trains_alone(
    variable: str, pool_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(name: str) -> None:
        with Pool(pool_root / name) as pool:
            EmbeddingBagCollection(pool, [TABLE], optimizer=SGD(lr=0.1))

    monkeypatch.setenv(variable, "4")
    with pytest.warns(RuntimeWarning, match=r"run started 4 processes, and RANK is not set: .*/new alone.*torchrun"):
        make("new")
    make("new")
    monkeypatch.setenv(variable, "1")
    make("of one")
    monkeypatch.setenv(variable, "4")
    monkeypatch.setenv("RANK", "0")
    make("of a rank")
