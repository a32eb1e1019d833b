"""Scripts of twelve strangers (users/), each in fresh processes, killed and resumed: all end with the same bits.

make soak proves every one with 20 kills; make test four of them with a few.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from proofs import USERS, Proof, prove

pytestmark = pytest.mark.thorough

SCRIPTS = sorted(path.stem for path in USERS.glob("*.py"))
ON_A_DISK = ("accumulation_in_bfloat16", "holdfast_loader_dlrm")


def prove_user(script: str, pools: Path, *options: object) -> Proof:
    place = ("--pools", pools) if script not in ON_A_DISK else ()
    environment = {"POOL": str(pools / "of-accumulation"), "HOME": str(pools)}
    return prove(*place, *options, "--", sys.executable, USERS / f"{script}.py", **environment)


def test_there_are_twelve():
    assert len(SCRIPTS) == 12


@pytest.mark.parametrize("script", ["movielens_two_layers", "next_item_transformer", "session_gru", "shop_with_keys"])
def test_a_users_script_ends_with_the_same_bits_after_a_few_kills(pool_root: Path, script: str):
    found = prove_user(script, pool_root, "--steps", "6", "--runs", "1", "--kills", "2")
    assert found.code == 0, found.out + found.err
    assert found.report["kills"] == 2
    assert list(pool_root.iterdir()) == []


@pytest.mark.soak
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_users_script_ends_with_the_same_bits_after_twenty_kills(tmp_path: Path, pool_root: Path, script: str):
    seed = int.from_bytes(os.urandom(3))
    print(f"replay with --seed {seed}")
    pools = tmp_path if script in ON_A_DISK else pool_root
    found = prove_user(script, pools, "--steps", "30", "--runs", "3", "--kills", "20", "--seed", seed)
    assert found.code == 0, found.out + found.err
    assert found.report["kills"] >= 20
    assert list(pools.iterdir()) == []
