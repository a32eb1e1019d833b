"""What `holdfast prove` says where there is nothing to compare, and that it touches nothing of the user's."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool
from proofs import PLANTED, Proof, prove, prove_planted, proving, start

pytestmark = pytest.mark.thorough

ONE = ("--steps", "3", "--runs", "1", "--kills", "0")
# By itself, before it commits step 28: earlier steps are durable then, however busy the machine is.
KILLED = ("--steps", "30", "--runs", "1", "--kills", "1", "--seed", "38")
OPTIONS = {
    "dies": ONE,
    "no pool": ONE,
    "no checkpoint": ONE,
    "no resume": ONE,
    "two pools": ONE,
    "hangs": (*ONE, "--timeout", "25"),
    "leaves by the back door": ("--steps", "50", "--runs", "1"),
    "dies after a resume": KILLED,
    "wandering pool": KILLED,
    "prints a lot": ("--steps", "50", "--runs", "1", "--kills", "0"),
}

Proofs = dict[str, "Future[Proof]"]


@pytest.fixture(scope="module")
def proofs(new_root: Callable[[], Path]) -> Iterator[Proofs]:
    with proving(new_root, OPTIONS) as running:
        yield running


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        ("dies", "it ended with exit status 1 before it opened a pool\nits last lines:"),
        ("dies", "RuntimeError: the data is not there"),
        ("no pool", "it ended without opening a holdfast.Pool"),
        ("no checkpoint", "it ended without making a holdfast.Checkpoint"),
        ("no resume", "it commits without having called Checkpoint.resume()"),
        ("two pools", "it makes Checkpoints of two pools"),
        ("hangs", "it took no step for 25 s, before its first step"),
        ("leaves by the back door", "without an orderly exit"),
        ("wandering pool", "it opens its pool at another place in every process"),
    ],
)
def test_a_script_that_gives_nothing_to_compare_is_told_why(proofs: Proofs, defect: str, words: str):
    found = proofs[defect].result()
    assert found.code == 2
    assert words in found.err
    assert not found.left


def test_a_script_that_hangs_is_told_where_it_was(proofs: Proofs):
    assert "planted.py" in proofs["hangs"].result().err.partition("it is at:")[2]


def test_a_script_that_fails_only_after_a_resume_does_not_resume(proofs: Proofs):
    found = proofs["dies after a resume"].result()
    assert found.code == 1
    assert "DOES NOT RESUME" in found.words
    assert "this file was to be new" in found.words


def test_a_script_that_ends_before_the_last_step_and_prints_a_lot_is_compared_as_far_as_it_goes(proofs: Proofs):
    found = proofs["prints a lot"].result()
    assert found.code == 0, found.out + found.err
    assert found.report["steps"] == 12
    assert "the script ends by itself at step 12, before --steps 50" in found.words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/no/such/python", "x.py"], "/no/such/python cannot be started"),
        (["torchrun", "x.py"], "started by torchrun"),
        ([sys.executable, "-m", "torch.distributed.run", "x.py"], "started by torchrun"),
    ],
)
def test_a_command_that_cannot_be_proven_is_refused(command: list[str], words: str):
    found = prove("--", *command)
    assert found.code == 2
    assert words in found.err


def test_a_pool_of_the_users_is_left_alone_and_what_is_not_set_is_said(pool_root: Path):
    directory = pool_root / "pool"
    with Pool(directory, seed=77) as pool:
        EmbeddingBagCollection(
            pool, [EmbeddingBagConfig(name="item", num_embeddings=9, embedding_dim=4, feature_names=["item"])]
        )
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    # The script's table has other sizes: opening that pool would be refused.
    found = prove_planted("none", directory, *ONE, MKL_CBWR="COMPATIBLE")
    assert found.code == 0, found.err
    assert "yet: MKL_CBWR=COMPATIBLE does not ask for a strict branch" in found.words
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    assert list(pool_root.iterdir()) == [directory]


@pytest.fixture
def sigint_is_heeded() -> Iterator[None]:
    """A shell's background job inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_is_heeded")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_proof_that_is_broken_off_ends_its_children_and_cleans_up(pool_root: Path, number: int):
    marker = f"--life-file={pool_root}"
    process = start(
        "--runs", "1", "--timeout", "60", "--", sys.executable, PLANTED, pool_root / "pool", "--defect", "hangs", marker
    )
    while len(list(pool_root.iterdir())) < 1:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    assert list(pool_root.iterdir()) == []
    assert not _running(marker)
    assert not [path for path in Path(tempfile.gettempdir()).glob("holdfast-prove-*") if _is_of(path, process.pid)]


def _running(marker: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "cmdline").read_bytes() and int(process.name) != os.getpid():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def _is_of(path: Path, pid: int) -> bool:
    return path.name.startswith(f"holdfast-prove-{pid}-")
