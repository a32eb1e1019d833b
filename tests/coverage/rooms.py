"""Branches of the durability rooms that the tests reach: one table, and the lines of what is left.

A branch is one of the two ways that a condition of the source goes: of an if, a loop, a case, ?:, and of each operand
of && and ||. clang counts them where it reads the source, so optimization changes nothing of them, and what the
compiler adds is none: calls that may throw, and what an exception would destroy. gcov counts the jumps of the code, and
cannot tell those from decisions. A condition that the compiler knows (if constexpr, while (true)) is none, and a
condition of a template is one, whichever of its instances goes which way.

In C++ what a process did that a test killed is counted, in Python it is not.

Usage: rooms.py DIRECTORY, of a build with counters in which `make coverage` has run the tests."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]

# By the names of files in core/, without .cpp or .h.
NATIVE_ROOMS = {
    "log": "undo_log undo undo_follower row_log row_log_scan row_log_follower log_record log_records log_index "
    "log_writer failure_latch store_parts log_store row_fetch store_sweep row_index row_image row_versions row_tag "
    "block_file block_queue sector_runs",
    "slots": "dense_slots dense_copy mapped_medium medium",
    "commit": "pool pool_files pool_commit background row_backend in_place_backend in_place_store log_backend "
    "pool_lock row_checksums",
    "recovery": "recovery pool_opening superblock superblock_repair repair unpublished label directory ground "
    "store_survey reader row_view live_copy",
    "merge": "log_merger log_merge logged_versions home_writer row_import homes home home_addresses home_bits "
    "numbered_checksum",
}
# Folders of core/ of which every file is in a room, so that a new one is not forgotten.
WHOLE_FOLDERS = ["commit", "in_place", "layout", "log_store", "pool", "readers"]
# By their names in src/holdfast/.
PYTHON_ROOMS = {
    "slots": ["train/checkpoint.py", "pools/dense_state.py", "state/*tree*.py", "files/durable.py"],
    "commit": ["pools/pool.py", "pools/directory.py", "files/locks.py"],
    "recovery": ["admin/repair.py", "admin/snapshot/*.py", "files/manifests.py"],
    "group": ["group/*.py"],
}


@dataclass
class Branches:
    """Of one file. left: the lines with a branch that was not taken."""

    total: int = 0
    covered: int = 0
    left: list[int] = field(default_factory=list)

    def __iadd__(self, other: Branches) -> Self:
        self.total += other.total
        self.covered += other.covered
        return self

    @property
    def percent(self) -> float:
        return 100.0 * self.covered / self.total if self.total else 100.0


# A condition in llvm-cov's text: its line and column, and how often it was true and false. One that the compiler knows
# has no numbers.
_CONDITION = re.compile(r"Branch \((\d+):(\d+)\): \[True: ([^,]+), False: ([^]]+)\]")


def native_branches(build: Path) -> dict[str, Branches]:
    """By the files' paths from the repository's root."""
    profile = build / "native.profdata"
    parts = sorted(str(part) for part in (build / "profiles").glob("*.profraw"))
    subprocess.run(["llvm-profdata", "merge", "-sparse", "-o", str(profile), *parts], check=True)
    # The core as a library, and as the module for what headers give to the binding alone.
    objects = [str(build / "libholdfast_core.a"), *(f"-object={module}" for module in build.glob("_core*.so"))]
    arguments = ["show", "-show-branches=count", f"-instr-profile={profile}", *objects]
    report = subprocess.run(["llvm-cov", *arguments], check=True, stdout=subprocess.PIPE, text=True)
    conditions: dict[Path, dict[tuple[str, str], list[bool]]] = {}
    of_file: dict[tuple[str, str], list[bool]] = {}
    for line in report.stdout.splitlines():
        if line.startswith("/"):
            of_file = conditions.setdefault(Path(line.removesuffix(":")), {})
        elif found := _CONDITION.search(line):
            ways = of_file.setdefault((found[1], found[2]), [False, False])
            for way, count in enumerate(found.groups()[2:]):
                ways[way] = ways[way] or count != "0"
    return {
        str(path.relative_to(ROOT)): _native(of_file)
        for path, of_file in conditions.items()
        if path.is_relative_to(ROOT / "core") and not path.is_relative_to(ROOT / "core/binding")
    }


def _native(conditions: dict[tuple[str, str], list[bool]]) -> Branches:
    left = sorted({int(line) for (line, _), ways in conditions.items() if not all(ways)})
    return Branches(2 * len(conditions), sum(map(sum, conditions.values())), left)


def _native(conditions: dict[tuple[str, str], list[bool]]) -> Branches:
    left = sorted({int(line) for (line, _), ways in conditions.items() if not all(ways)})
    return Branches(2 * len(conditions), sum(map(sum, conditions.values())), left)


def _tool(name: str) -> str:
    """LLVM's tool of that name, of the compiler's own version."""
    run = subprocess.run(["clang++", f"-print-prog-name={name}"], check=True, stdout=subprocess.PIPE, text=True)
    return run.stdout.strip()


def python_branches(build: Path) -> dict[str, Branches]:
    """Likewise. A file that no process imported is not in it."""
    # Beside what the processes left, so that a second look finds it, too.
    together = f"--data-file={build / 'python.data'}"
    report = build / "python.json"
    parts = sorted(str(part) for part in (build / "python").glob("data.*"))
    for arguments in (["combine", "-q", "--keep", together, *parts], ["json", "-q", together, "-o", str(report)]):
        subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=True)
    found = {}
    for name, file in json.loads(report.read_text())["files"].items():
        summary = file["summary"]
        left = sorted({max(line, 1) for line, _ in file["missing_branches"]})
        path = Path(name)
        relative = path.relative_to(ROOT) if path.is_absolute() else path
        found[str(relative)] = Branches(summary["num_branches"], summary["covered_branches"], left)
    return found


def rooms(native: dict[str, Branches], python: dict[str, Branches]) -> Iterator[tuple[str, str, dict[str, Branches]]]:
    """Each room, in each of the two languages, with its files."""
    named = {name for listed in NATIVE_ROOMS.values() for name in listed.split()}
    forgotten = [path for path in native if Path(path).parts[1] in WHOLE_FOLDERS and Path(path).stem not in named]
    assert not forgotten, f"in no room: {', '.join(forgotten)}"
    for room, listed in NATIVE_ROOMS.items():
        files = {path: found for path, found in native.items() if Path(path).stem in listed.split()}
        yield room, "C++", files
    for room, patterns in PYTHON_ROOMS.items():
        paths = [path for pattern in patterns for path in sorted((ROOT / "src/holdfast").glob(pattern))]
        names = [str(path.relative_to(ROOT)) for path in paths]
        missing = [name for name in names if name not in python]
        assert not missing, f"no test imports {', '.join(missing)}"
        yield room, "Python", {name: python[name] for name in names}


def spans(lines: list[int]) -> str:
    """Neighbours joined: 3, 7–9."""
    parts: list[list[int]] = []
    for line in lines:
        if parts and line == parts[-1][-1] + 1:
            parts[-1].append(line)
        else:
            parts.append([line])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def main(build: Path) -> None:
    table = list(rooms(native_branches(build), python_branches(build)))
    print("\nWhat is left, by file (lines):")
    for _, _, files in table:
        for name, branches in sorted(files.items()):
            if branches.left:
                print(f"  {name} {branches.percent:.1f} %: {spans(branches.left)}")
    print(f"\n{'room':<10} {'':<7} {'branches':>8} {'covered':>8} {'percent':>8}")
    everything = Branches()
    for room, language, files in table:
        whole = Branches()
        for branches in files.values():
            whole += branches
        everything += whole
        print(f"{room:<10} {language:<7} {whole.total:>8} {whole.covered:>8} {whole.percent:>8.1f}")
    print(f"{'all':<18} {everything.total:>8} {everything.covered:>8} {everything.percent:>8.1f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
