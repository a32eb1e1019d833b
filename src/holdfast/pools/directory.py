"""A pool's directory: whether a pool is there, of how many writers, and how a new one would keep its rows."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from holdfast import _core
from holdfast.errors import (
    ConfigError,
    Corrupted,
    PoolError,
    PoolExists,
    PoolFull,
    PoolNotFound,
    PoolOfGroup,
    PoolReadOnly,
)
from holdfast.files.durable import make_directory
from holdfast.files.names import advice_on, trouble_with
from holdfast.pools.dial import MediumDial
from holdfast.pools.machine import number_in

RecoveryMode = Literal["exact", "relaxed"]
Medium = Literal["auto", "memory", "block"]
SUPERBLOCK = "pool.holdfast"
SUPERBLOCK_COPY = "pool.copy"
GROUP_MANIFEST = "group.json"
SNAPSHOT_MANIFEST = "manifest.json"
SNAPSHOT_FORMAT = "holdfast snapshot"  # as it says itself
_MIN_LOG_BYTES = 16 << 20
_ROW_LOG_BYTES = 1 << 30  # of tables of up to eight times as much
_LARGEST_ROW_LOG_BYTES = 16 << 30  # opening takes a third of a second for each GiB
_ROW_LOG_SHARE = 8  # a larger log than one of so many of the tables' bytes saves little
_TABLES_IN_MEMORY_TIMES = 4  # of tables that the scratchpad holds: any merge costs most of them, however much it takes
_LARGEST_LOG_OF_TABLES_IN_MEMORY = 4 << 30
_LAUNCHED = {"OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpiexec", "SLURM_STEP_NUM_TASKS": "srun"}
_SMALL_TABLES_TIMES = 16  # with so many times their bytes there is room for six steps that have all of their rows


def below_home(directory: str | os.PathLike[str]) -> Path:
    """The directory; one whose name begins with ``~`` as a shell has it. No such user: a name like any other.

    Raises ConfigError for an empty name, which would be the working directory, and for one that is not UTF-8."""
    if not os.fspath(directory):
        raise ConfigError(
            "the name of the pool's directory is empty (a variable that is not set?); . is the working directory"
        )
    if trouble := trouble_with(directory):
        raise ConfigError(f"the pool's directory {trouble}")
    try:
        return Path(directory).expanduser()
    except RuntimeError:
        return Path(directory)


def check_pool(pool: object) -> None:
    """Raises ConfigError where something else is given for a Pool, as the name of its directory."""
    if hasattr(pool, "collections"):
        return
    what = f"a {type(pool).__name__} is none"
    if isinstance(pool, (str, os.PathLike)):
        what = f"{os.fspath(pool)!r} is where one lies; open it, and give what `with holdfast.Pool(...) as pool` has"
    raise ConfigError(f"pool: it must be a holdfast.Pool, {what}")


def exists(directory: str | os.PathLike[str]) -> bool:
    """Whether there is a pool of one writer in `directory`."""
    return (Path(directory) / SUPERBLOCK).exists()


def is_of_group(directory: str | os.PathLike[str]) -> bool:
    """Whether there is a pool of several writers in `directory` (holdfast.group)."""
    return (Path(directory) / GROUP_MANIFEST).exists()


def is_shared(directory: str | os.PathLike[str]) -> bool:
    """Whether `directory` is to be opened by a group: several processes were started together, or a group made it.
    Raises ConfigError where a launcher's variable says no number of them."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return True
    return number_in("WORLD_SIZE", 1) > 1 or is_of_group(directory)


def begins_a_group(directory: str | os.PathLike[str]) -> bool:
    """Whether a launcher started this process, be it the only rank yet, and no pool of one process is in `directory`:
    what is made there takes more ranks later."""
    of_one_process = any((Path(directory) / name).exists() for name in (SUPERBLOCK, SUPERBLOCK_COPY))
    return "RANK" in os.environ and "MASTER_ADDR" in os.environ and not of_one_process


def make_directory_alone(directory: Path) -> None:
    """Makes the directory of a pool that is this process's alone. Warns where a launcher started others with it, which
    would each train a pool of their own, or find this one busy. Raises PoolExists, PoolFull, PoolReadOnly, PoolError.
    """
    launchers = {} if "RANK" in os.environ else _LAUNCHED
    for variable, launcher in launchers.items():
        if (size := os.environ.get(variable, "1")) != "1":
            warnings.warn(
                f"{launcher} started {size} processes, and RANK is not set: this one trains {directory} alone, on all "
                "of its data. To train one pool together start them with torchrun, or set RANK, WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT for each",
                RuntimeWarning,
                stacklevel=2,
            )
            break
    make_pool_directory(directory)


def make_pool_directory(directory: Path) -> None:
    """Raises PoolExists, PoolFull, PoolReadOnly, PoolError."""
    try:
        make_directory(directory)
    except FileExistsError as error:
        what = "is there already, and is no directory"
        if directory.is_symlink() and not directory.exists():
            what = f"is a link to {directory.readlink()}, which is not there: a disk that is not mounted?"
        raise PoolExists(f"{directory} {what}") from error
    except OSError as error:
        raise pool_error(error, f"making {directory}") from error


def pool_error(error: OSError, doing: str) -> PoolError:
    """What the operating system refused, as the error that says so."""
    kinds: dict[int | None, type[PoolError]] = {
        errno.ENOSPC: PoolFull, errno.EDQUOT: PoolFull,
        errno.EROFS: PoolReadOnly, errno.EACCES: PoolReadOnly, errno.EPERM: PoolReadOnly,
    }  # fmt: skip
    return kinds.get(error.errno, PoolError)(f"{doing}: {error.strerror}{advice_on(error)}")


def check_vacant(directory: str | os.PathLike[str]) -> None:
    """Raises where parts of a pool lie in a directory in which none is published: they may be all that is left of it.

    What an attempt at a pool left that did not end is marked as that, and no such part.

    Raises PoolOfGroup (parts of several writers), Corrupted; PoolNotFound where a snapshot lies there.
    """
    directory = Path(directory)
    refuse_snapshot(directory)
    if not directory.is_dir() or _core.is_unpublished(str(directory)):
        return
    parts = _core.pool_parts(str(directory))
    if of_group := [part for part in parts if part.startswith(("writers-", "dense/"))]:
        raise PoolOfGroup(
            f"{directory} has no {GROUP_MANIFEST}, but parts of a pool of several writers: {some_of(of_group)}. They "
            f"may hold its rows, so nothing was changed: put {GROUP_MANIFEST} back from another rank's storage or from "
            "a copy; for a new pool name another directory, or remove these files"
        )
    if parts:
        raise Corrupted(
            f"{directory} has no {SUPERBLOCK}, but files of a pool: {some_of(parts)}. The file that makes them a pool "
            "is lost, and they may hold its rows, so nothing was changed: `holdfast verify --repair` puts it back "
            f"where {SUPERBLOCK_COPY} is there; or put it back from a copy of the directory. For a new pool name "
            "another directory, or remove these files"
        )


def refuse_snapshot(directory: Path) -> None:
    """Raises PoolNotFound where a snapshot lies in the directory, in which no pool belongs."""
    try:
        with (directory / SNAPSHOT_MANIFEST).open("rb") as file:
            is_snapshot = SNAPSHOT_FORMAT.encode() in file.read(4096)
    except OSError:
        return
    if is_snapshot:
        raise PoolNotFound(
            f"{directory} is a snapshot, and no pool: make one of it elsewhere (holdfast restore {directory} POOL) and "
            "go on with that"
        )


def some_of(names: Sequence[str], most: int = 3) -> str:
    """So many of them, in words."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def wants_log_store(directory: Path, medium: Medium) -> bool:
    """Whether a new pool in `directory`, which is there, keeps its rows in a log store."""
    return medium == "block" or (medium == "auto" and _core.is_block_medium(str(directory)))


def log_bytes_of(log_store: bool, table_bytes: int, scratchpad_bytes: int) -> int:
    """Size of a new pool's log where nobody says.

    A row log of an eighth of its writer's tables: what a merge costs is blocks of home, which more rows share the
    larger the log is. Its index takes memory, a fifth of its bytes where rows are small, so it has no more than twice
    those of the scratchpad; but 1 GiB it may always have, and small tables do not need as much. Tables that the
    scratchpad holds are trained as fast as steps are logged and merged: there the log is larger than they are, so that
    what is merged is a small part of that."""
    if not log_store:
        return _MIN_LOG_BYTES
    wanted = max(table_bytes // _ROW_LOG_SHARE, min(_SMALL_TABLES_TIMES * table_bytes, _ROW_LOG_BYTES))
    if table_bytes <= scratchpad_bytes:
        wanted = max(wanted, min(_TABLES_IN_MEMORY_TIMES * table_bytes, _LARGEST_LOG_OF_TABLES_IN_MEMORY))
    most = min(max(_ROW_LOG_BYTES, 2 * scratchpad_bytes), _LARGEST_ROW_LOG_BYTES)
    return max(_MIN_LOG_BYTES, min(wanted, most))


def refusal_of(directory: Path, medium: Medium, log_store: bool, *, lacks_checksums: bool) -> str:
    """Why a pool that is there is not what is asked for; empty where it is. log_store: how it keeps its rows.
    lacks_checksums: which are wanted."""
    kept_as = "block" if log_store else "memory"
    if medium not in ("auto", kept_as):
        return (
            f"medium = {medium!r}, but the pool in {directory} was made as {kept_as!r}: a pool cannot change that, "
            f"leave it out, start a new pool, or move this one (holdfast snapshot, then restore --medium {medium})"
        )
    if lacks_checksums:
        return (
            f"row_checksums = true, but the pool in {directory} was made without: a pool cannot change that, leave it "
            "out, start a new pool, or move this one (holdfast snapshot, then restore --row-checksums)"
        )
    return ""


def describe_medium(medium: str, header: Mapping[str, Any], dial: MediumDial | None = None) -> str:
    """In words. medium: as the core describes it. header: of the pool. dial: that it is under."""
    kind, level = medium.rpartition(", ")[0], header["level"]
    survives = "power loss" if level == "power" else "any death of the process, not of the machine"
    moved = ", which it did where it was made" if level == "process" and header["level_at_creation"] == "power" else ""
    dialled = "" if dial is None else f", made as slow as {dial}"
    return f"{kind} (level {level}: survives {survives}{moved}){dialled}"


def check_options(
    dense_interval: int,
    log_bytes: int | None,
    recovery: str,
    medium: str,
    scratchpad_bytes: int | None,
    scratchpad_nodes: Sequence[int],
    seed: int,
) -> None:
    """Raises ConfigError that names the one that cannot be."""
    numbers = {"dense_interval": dense_interval, "log_bytes": log_bytes, "scratchpad_bytes": scratchpad_bytes}
    said: dict[str, object] = {**numbers, "seed": seed}
    for name, value in said.items():
        if value is not None and not isinstance(value, Integral):
            raise ConfigError(f"{name} = {value!r}; it must be a whole number")
    if not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed = {seed}; it must lie in [0, 2^64)")
    if dense_interval < 1:
        raise ConfigError(f"dense_interval = {dense_interval}; it must be at least 1")
    if log_bytes is not None and log_bytes < 4096:
        raise ConfigError(f"log_bytes = {log_bytes}; it must be at least 4096")
    if recovery not in ("exact", "relaxed"):
        raise ConfigError(f"recovery = {recovery!r}; it must be exact or relaxed")
    if medium not in ("auto", "memory", "block"):
        raise ConfigError(f"medium = {medium!r}; it must be auto, memory or block")
    if scratchpad_bytes is not None and scratchpad_bytes < 1:
        raise ConfigError(f"scratchpad_bytes = {scratchpad_bytes}; it must be positive")
    for name, number in numbers.items():
        if number is not None and number >= 1 << 63:
            raise ConfigError(f"{name} = {number}; it must be less than 2^63")
    check_nodes(scratchpad_nodes)


def check_nodes(scratchpad_nodes: Sequence[int]) -> None:
    """Raises ConfigError where the machine has no memory on one of these NUMA nodes."""
    if not all(0 <= node < 1 << 32 for node in scratchpad_nodes):
        raise ConfigError(
            f"scratchpad_nodes = {list(scratchpad_nodes)}; nodes are counted from 0, and "
            "/sys/devices/system/node/has_memory says which there are"
        )
    _core.check_nodes(list(scratchpad_nodes))
