"""The guest carries what its run uses and a plain installation has: its archive is unpacked to memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from guest_files import of_extras

MOST_BYTES = 900 << 20  # half of the guest's memory less the archive itself


@pytest.fixture(scope="module")
def files() -> list[Path]:
    listing = subprocess.run(
        [sys.executable, Path(__file__).with_name("guest_files.py")], check=True, stdout=subprocess.PIPE, text=True
    )
    return [Path(line) for line in listing.stdout.splitlines()]


@pytest.mark.thorough
def test_the_guest_has_no_package_that_only_extras_bring(files: list[Path]) -> None:
    names = {part for file in files for part in file.parts}
    assert {"torch", "numpy", "holdfast"} <= names
    assert not {"triton", "matplotlib", "hypothesis", "pytest"} & names


@pytest.mark.thorough
def test_the_guest_fits_its_memory(files: list[Path]) -> None:
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


def test_a_plain_installation_is_what_holdfasts_own_requirements_reach() -> None:
    owners = {
        "torch": ["torch"],
        "sympy": ["sympy"],
        "triton": ["triton"],
        "google": ["protobuf"],
        "holdfast": ["holdfast"],
    }
    assert of_extras(owners) == {"triton", "google"}
