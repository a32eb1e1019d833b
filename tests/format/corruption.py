"""Corrupted pools: damages pools of both stores at random and judges what comes of opening them.

A case is a function of a seed and a number. `PYTHONPATH=tests python tests/format/corruption.py SEED NUMBER` replays
one. The cases run in a process of their own, with little memory and little time, because a crash, a hang and memory
without bound are findings.

The judge knows one right answer to each pool: the state at the end of the step that the whole pool recovers to. An
error is as good. What docs/FORMAT.md says cannot be told from a crash, or carries no checksum, is in `excuses_for` and
`excuses_of_lost_writes`, and nothing else is.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from damage import LOG, ROW_LOG, SECTOR, SUPERBLOCK, Damage, Files, Place, kind_of_file, places_of, strike, strike_file
from format_doc import LAYOUTS
from holdfast import EmbeddingBagConfig, Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.admin.repair import problems_of, repair_pool
from holdfast.errors import Corrupted, HoldfastError
from holdfast.pools.read_only import open_reader
from pool_image import COMMIT, DENSE, LABEL, RECORD, PoolImage
from tiny_pools import ADAM_TABLES, Writer, files_of

SPARE_MEMORY_BYTES = 1 << 30  # of address space, beyond what the process has when it begins
SECONDS_PER_CASE = 20


class TwinTables(Writer):
    """Two of the tables have one shape, so that one can be taken for the other; some steps take the log round."""

    adam_tables = (
        *ADAM_TABLES,
        EmbeddingBagConfig(num_embeddings=30, embedding_dim=4, name="twin", feature_names=["e"], data_type="fp16"),
    )
    log_bytes = 40960


# What cannot be noticed.

OLDER_STEP = "an older step, exactly"
OTHER_ROWS = "other rows"


@dataclass(frozen=True)
class Excuse:
    """Damage to bytes [begin, end) of a file may go unnoticed and lead to `outcome`. why: as docs/FORMAT.md says it."""

    file: str
    begin: int
    end: int
    outcome: str
    why: str

    def covers(self, damage: Damage) -> bool:
        return any(file == self.file and begin < self.end and self.begin < end for file, begin, end in damage.struck)


def excuses_for(directory: Path, files: Files, kind: Kind, *, is_clean: bool) -> list[Excuse]:
    """docs/FORMAT.md, "What is checked, and what damage looks like": what damage to this pool cannot be told from a
    crash, or strikes what carries no checksum."""
    rows = [name for name in files if name.startswith("shard-") and not kind.rows_are_checked]
    excuses = [
        Excuse(name, 0, len(files[name]) - LABEL, OTHER_ROWS, "rows in place carry no checksums") for name in rows
    ]
    if is_clean:
        return excuses
    excuses += [Excuse(name, 0, DENSE.size, OLDER_STEP, "a torn header of a slot") for name in ("dense-0", "dense-1")]
    if ROW_LOG in files:
        begin, end = max(
            {place.whole for place in places_of(files) if place.structure == "RowLogHeader"},
            key=lambda whole: LAYOUTS["RowLogHeader"].unpack(files[ROW_LOG], whole[0])["position"],
        )
        return [*excuses, Excuse(ROW_LOG, begin, end, OLDER_STEP, "a torn record at the log's end")]
    _write(directory, files)
    image = PoolImage(directory)
    commit, _ = image.newest_commit()
    excuses.append(Excuse(SUPERBLOCK, commit, commit + COMMIT.size, OLDER_STEP, "a torn commit record"))
    for record in image.records_forwards():
        at = image.log_origin + record["position"] % len(image.log)
        excuses.append(Excuse(LOG, at, at + RECORD.size, OTHER_ROWS, "a record that was never sealed"))
    return excuses


def excuses_of_lost_writes(pool: MadePool, damage: Damage) -> set[str]:
    """What is whole, and as it was earlier, holds its checksum. A pool that was closed cleanly says at which step."""
    if not damage.is_stale(pool.older):
        return set()
    if any(file.startswith("shard-") for file, _, _ in damage.struck):
        return {OTHER_ROWS}
    clean_record_is_lost = any(file == SUPERBLOCK and begin == 0 for file, begin, _ in damage.struck)
    if pool.is_clean and not clean_record_is_lost:
        return set()
    is_log = any(file == ROW_LOG for file, _, _ in damage.struck)
    return {OLDER_STEP, OTHER_ROWS} if is_log else {OLDER_STEP}


def must_be_found(pool: MadePool, damage: Damage) -> bool:
    """In a pool that was closed cleanly, verify finds whatever does not hold, but for the record that says so."""
    if not pool.is_clean or damage.kind not in ("flip", "zero", "garbage"):
        return False
    structure, _ = damage.target
    if structure not in (
        "PoolHeader",
        "TableRecord",
        "CommitRecord",
        "DenseHeader",
        "dense payload",
        "RowLogCheckpoint",
        "FileLabel",
    ):
        return False
    return not any(not any(pool.files[file][begin // SECTOR * SECTOR :][:SECTOR]) for file, begin, _ in damage.struck)


# Kinds of pools.


@dataclass(frozen=True)
class Kind:
    """made_with: arguments of `_core.Pool.create`. rows_are_checked: whether rows at home carry checksums."""

    name: str
    made_with: Mapping[str, bool]
    rows_are_checked: bool


KINDS = (
    Kind("in place", {}, rows_are_checked=False),
    Kind("in place, row checksums", {"row_checksums": True}, rows_are_checked=True),
    Kind("log store", {"log_store": True}, rows_are_checked=True),
)


@dataclass(frozen=True)
class Life:
    """steps: so many, then maybe one that is not committed; then it is closed, or dies."""

    steps: int
    dense_interval: int = 1
    is_in_a_step: bool = False
    is_closed: bool = False


@dataclass(frozen=True)
class History:
    name: str
    lives: tuple[Life, ...]
    saves_dense: bool = True


HISTORIES = (
    History("closed", (Life(5, is_closed=True),)),
    History("closed, its log gone round", (Life(14, dense_interval=3, is_closed=True), Life(13, 2, is_closed=True))),
    History("closed, without dense states", (Life(5, is_closed=True),), saves_dense=False),
    History("new", (Life(0, is_closed=True),)),
    History("died in step 6", (Life(5, is_in_a_step=True),)),
    History("died two steps after its dense state", (Life(5, dense_interval=3, is_in_a_step=True),)),
    History("died in the first step of its second life", (Life(5, is_closed=True), Life(0, is_in_a_step=True))),
    History("died without dense states, its log gone round", (Life(19, is_in_a_step=True),), saves_dense=False),
    History("died twice", (Life(3), Life(2, dense_interval=2), Life(1, dense_interval=4))),
)


@dataclass(frozen=True)
class MadePool:
    """A whole pool, as it was at its end, and older: after each step before. good: the digest by step."""

    name: str
    kind: Kind
    files: Files
    older: list[Files]
    good: dict[int, str]
    expected_step: int
    is_clean: bool
    places: list[Place]
    excused: list[Excuse]


def make_pools(root: Path, histories: Sequence[History] = HISTORIES) -> list[MadePool]:
    pools = []
    for saves_dense in {history.saves_dense for history in histories}:
        good = _good_digests(root / f"good-{saves_dense}", saves_dense)
        for kind in KINDS:
            for number, history in enumerate(histories):
                if history.saves_dense == saves_dense:
                    directory = root / f"{kind.name}-{number}"
                    pools.append(_make(directory, kind, history, good))
                    shutil.rmtree(directory)
    return pools


def _good_digests(directory: Path, saves_dense: bool) -> dict[int, str]:
    """Of an uninterrupted run. Bits do not depend on the store."""
    writer = TwinTables(directory, saves_dense=saves_dense)
    good = {}
    for step in range(32):
        good[step] = digest_pool(_core.Reader(str(directory))).whole
        writer.step()
        writer.pool.flush()
    writer.pool.close()
    return good


def _make(directory: Path, kind: Kind, history: History, good: dict[int, str]) -> MadePool:
    images = []
    for life in history.lives:
        writer = TwinTables(
            directory,
            dense_interval=life.dense_interval,
            saves_dense=history.saves_dense,
            made_with=kind.made_with,
        )
        for _ in range(life.steps):
            images.append(files_of(directory))
            writer.step()
            writer.pool.flush()
        if life.is_in_a_step:
            writer.update()
        if not life.is_closed:
            images.append(files_of(directory))
        writer.pool.close()
        if life.is_closed:
            images.append(files_of(directory))
        else:
            _write(directory, images[-1])
    pool = Pool(directory)
    expected_step = pool.step
    pool.close()
    name = f"{kind.name}, {history.name}"
    is_clean = history.lives[-1].is_closed
    files = images[-1]
    excused = excuses_for(directory, files, kind, is_clean=is_clean)
    return MadePool(name, kind, files, images[:-1], good, expected_step, is_clean, places_of(files), excused)


def _write(directory: Path, files: Files) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# Cases.


@dataclass(frozen=True)
class Targets:
    """What may be struck: by name, the pools that have it."""

    pools: list[MadePool]
    by_name: dict[tuple[str, str], list[int]]

    @classmethod
    def of(cls, pools: list[MadePool]) -> Self:
        by_name: dict[tuple[str, str], list[int]] = {}
        for number, pool in enumerate(pools):
            for target in {place.target for place in pool.places} | {("file", kind_of_file(n)) for n in pool.files}:
                by_name.setdefault(target, []).append(number)
        return cls(pools, dict(sorted(by_name.items())))

    def case(self, seed: int, number: int) -> tuple[MadePool, Damage]:
        """Every target comes by turns; all else is drawn."""
        rng = random.Random(f"{seed} {number}")
        target = list(self.by_name)[number % len(self.by_name)]
        while True:
            pool = self.pools[rng.choice(self.by_name[target])]
            if target[0] == "file":
                names = [name for name in pool.files if kind_of_file(name) == target[1]]
                damage = strike_file(rng, pool.files, pool.older, rng.choice(names))
            else:
                place = rng.choice([place for place in pool.places if place.target == target])
                damage = strike(rng, pool.files, pool.older, place, pool.places)
            if damage is not None and damage.files != pool.files:
                return pool, damage


@dataclass
class Verdict:
    """outcome: in words, to be counted. problem: what is wrong with the product, or nothing."""

    pool: str
    damage: str
    kind: str
    target: tuple[str, str]
    outcome: str
    problem: str = ""
    found: list[str] = field(default_factory=list)


def judge(pool: MadePool, damage: Damage, directory: Path) -> Verdict:
    """Opens a damaged pool, and once more after a repair. Raises what is no error of holdfast's."""
    _write(directory, damage.files)
    if SUPERBLOCK not in damage.files:
        return _judge_no_pool(pool, damage, directory)
    verdict = _judge_opening(pool, damage, directory, problems_of(directory))
    if not verdict.found and must_be_found(pool, damage):
        verdict.problem = "it was closed cleanly, and verify finds nothing"
    if verdict.found and not verdict.problem:
        _write(directory, damage.files)
        report = repair_pool(directory)
        if report.backup is not None:
            report.backup.unlink()
        if not report.left:
            opened = _judge_opening(pool, damage, directory, [])
            verdict.problem = opened.problem and f"after {report.done}: {opened.problem}"
            verdict.outcome += f", repaired: {opened.outcome}"
        elif report.done and files_of(directory) == damage.files:
            verdict.problem = f"repaired nothing, and says {report.done}"
    return verdict


def _judge_no_pool(pool: MadePool, damage: Damage, directory: Path) -> Verdict:
    """What repairs make of a pool without a superblock: test_lost_superblock.py."""
    verdict = Verdict(pool.name, damage.words, damage.kind, damage.target, "refused: Corrupted")
    before = files_of(directory)
    for opening in (lambda: Pool(directory).core, lambda: open_reader(directory)):
        try:
            opening()
        except Corrupted:
            continue
        verdict.problem = "there is no superblock, and it is opened"
    if files_of(directory) != before:
        verdict.problem = "there is no superblock, and files changed"
    return verdict


def _judge_opening(pool: MadePool, damage: Damage, directory: Path, found: list[str]) -> Verdict:
    verdict = Verdict(pool.name, damage.words, damage.kind, damage.target, "", found=found)
    before = files_of(directory)
    try:
        with Pool(directory) as opened:
            step = opened.step
    except HoldfastError as error:
        verdict.outcome = f"refused: {type(error).__name__}"
        if files_of(directory) != before:
            verdict.problem = f"refused ({error}), and files changed"
        elif not found:
            verdict.problem = f"refused ({error}), and verify finds nothing"
        return verdict
    try:
        digest = digest_pool(_core.Reader(str(directory))).whole
    except Corrupted as error:
        verdict.outcome = "refused when it was read"
        if not found:
            verdict.problem = f"reading finds {error}, verify nothing"
        return verdict
    verdict.outcome = _outcome(pool, step, digest)
    excused = {excuse.outcome for excuse in pool.excused if excuse.covers(damage)}
    if verdict.outcome not in ("exact", *excused, *excuses_of_lost_writes(pool, damage)):
        verdict.problem = f"opened at step {step} instead of {pool.expected_step}: {verdict.outcome}"
    elif not found and (left := problems_of(directory)):
        verdict.problem = f"opened and closed, and still damaged: {left}"
    return verdict


def _outcome(pool: MadePool, step: int, digest: str) -> str:
    if digest != pool.good.get(step):
        return OTHER_ROWS
    return "exact" if step == pool.expected_step else OLDER_STEP


# The process that opens them.


class Opener:
    """Judges cases in a process of its own. Context manager."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        line = [sys.executable, __file__, str(self.seed)]
        one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **one, "PYTHONPATH": str(Path(__file__).parents[1])}  # what tests share
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert process.stdout is not None
        self.targets = {tuple(target) for target in json.loads(process.stdout.readline())}
        return process

    def judge(self, number: int) -> Verdict:
        """The verdict on a case. A crash and a hang are verdicts, too."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], SECONDS_PER_CASE)
        line = self._process.stdout.readline() if ready else ""
        if line:
            answer = json.loads(line)
            return Verdict(**{**answer, "target": tuple(answer["target"])})
        self._process.kill()
        status = self._process.wait()
        self._process = self._start()
        what = f"died of signal {-status}" if ready else f"hung for {SECONDS_PER_CASE} s"
        return Verdict("", "", "", ("", ""), what, f"the opening process {what}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # at its end it takes its directory away
        try:
            self._process.wait(timeout=SECONDS_PER_CASE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(seed: int, root: Path) -> None:
    targets = Targets.of(make_pools(root))
    print(json.dumps(list(targets.by_name)), flush=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        pool, damage = targets.case(seed, int(line))
        try:
            verdict = judge(pool, damage, root / "damaged")
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            verdict = Verdict(pool.name, damage.words, damage.kind, damage.target, "raised", f"raised {words}")
        print(json.dumps(asdict(verdict)), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    _core.set_num_threads(1)
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as root:
        match [int(word) for word in sys.argv[1:]]:
            case [seed]:
                serve(seed, Path(root))
            case [seed, number]:
                pool, damage = Targets.of(make_pools(Path(root))).case(seed, number)
                print(pool.name, damage.words, sep="\n")
                print(judge(pool, damage, Path(root) / "damaged"))


if __name__ == "__main__":
    main()
