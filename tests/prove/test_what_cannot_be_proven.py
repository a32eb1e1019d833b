"""What `holdfast prove` says where there is nothing to compare, and that it touches nothing of the user's."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import pytest

from holdfast import EmbeddingBagCollection, EmbeddingBagConfig, Pool
from proofs import PLANTED, prove, prove_planted, start

ONE = ("--steps", "3", "--runs", "1", "--kills", "0")


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        ("dies", "it ended with exit status 1 before it opened a pool\nits last lines:"),
        ("no pool", "it ended without opening a holdfast.Pool"),
        ("no checkpoint", "it ended without making a holdfast.Checkpoint"),
        ("no resume", "it commits without having called Checkpoint.resume()"),
        ("two pools", "it makes Checkpoints of two pools"),
    ],
)
def test_a_script_that_gives_nothing_to_compare_is_told_why(pool_root: Path, defect: str, words: str):
    found = prove_planted(defect, pool_root / "pool", *ONE)
    assert found.code == 2
    assert words in found.err
    assert list(pool_root.iterdir()) == []


def test_the_last_lines_of_a_script_that_dies_are_shown(pool_root: Path):
    found = prove_planted("dies", pool_root / "pool", *ONE)
    assert "RuntimeError: the data is not there" in found.err


def test_a_script_that_hangs_is_ended_and_says_where_it_was(pool_root: Path):
    found = prove_planted("hangs", pool_root / "pool", *ONE, "--timeout", "6")
    assert found.code == 2
    assert "it took no step for 6 s, before its first step" in found.err
    assert "planted.py" in found.err.partition("it is at:")[2]


def test_a_script_that_leaves_by_the_back_door_is_told_that_its_pool_cannot_be_compared(pool_root: Path):
    found = prove_planted("leaves by the back door", pool_root / "pool", "--steps", "50", "--runs", "1")
    assert found.code == 2
    assert "without an orderly exit" in found.err


def test_a_script_that_fails_only_after_a_resume_does_not_resume(pool_root: Path):
    found = prove_planted("dies after a resume", pool_root / "pool", *ONE[:-1], "1", "--seed", "3", "--steps", "6")
    assert found.code == 1
    assert "DOES NOT RESUME" in found.words
    assert "this file was to be new" in found.words


def test_a_pool_at_another_place_in_every_process_is_named(pool_root: Path):
    found = prove_planted("wandering pool", pool_root / "pool", *ONE[:-1], "1", "--seed", "3", "--steps", "6")
    assert found.code == 2
    assert "it opens its pool at another place in every process" in found.err


def test_a_script_that_ends_before_the_last_step_and_prints_a_lot_is_compared_as_far_as_it_goes(pool_root: Path):
    found = prove_planted("prints a lot", pool_root / "pool", "--steps", "50", "--runs", "1", "--kills", "1")
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


def test_a_pool_of_the_users_is_neither_read_nor_written(pool_root: Path):
    directory = pool_root / "pool"
    with Pool(directory, seed=77) as pool:
        EmbeddingBagCollection(
            pool, [EmbeddingBagConfig(name="item", num_embeddings=9, embedding_dim=4, feature_names=["item"])]
        )
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    found = prove_planted("none", directory, *ONE)  # its table has other sizes: opening that pool would be refused
    assert found.code == 0, found.err
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    assert list(pool_root.iterdir()) == [directory]


def test_what_the_user_did_not_set_is_said(pool_root: Path):
    found = prove_planted("none", pool_root / "pool", *ONE, MKL_CBWR="COMPATIBLE")
    assert found.code == 0
    assert "yet: MKL_CBWR=COMPATIBLE does not ask for a strict branch" in found.words


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_proof_that_is_broken_off_ends_its_children_and_cleans_up(pool_root: Path, number: int):
    marker = f"--life-file={pool_root}"
    process = start("--timeout", "60", "--", sys.executable, PLANTED, pool_root / "pool", "--defect", "hangs", marker)
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
