"""Branches of the durability rooms that the tests reach: one table, and the lines of what is left.

A branch is where the code decides: what only an exception takes is none, in C++, nor is the call that may throw it.
What a process did that a test killed is not counted.

Usage: rooms.py DIRECTORY, of a build with counters in which `make coverage` has run the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[2]

# By the names of files in core/, without .cpp or .h.
NATIVE_ROOMS = {
    "log": "undo_log undo undo_follower row_log row_log_follower log_record log_store log_store_append "
    "log_store_follow row_index row_image block_file block_queue sector_runs",
    "slots": "dense_slots dense_copy mapped_medium medium",
    "commit": "pool pool_commit background row_backend in_place_backend in_place_store log_backend pool_lock "
    "row_checksums",
    "recovery": "recovery pool_opening superblock superblock_repair repair unpublished label directory ground "
    "log_store_survey reader row_view live_copy",
    "merge": "log_merger log_store_merge log_store_home home_bits",
}
# By their names in src/holdfast/.
PYTHON_ROOMS = {
    "slots": ["train/checkpoint.py", "state/state_tree.py", "files/durable.py"],
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


def native_branches(build: Path) -> dict[str, Branches]:
    """By the files' paths from the repository's root."""
    report = build / "native.json"
    objects = build / "CMakeFiles/holdfast_core.dir"
    subprocess.run(
        [
            *(sys.executable, "-m", "gcovr", "--root", str(ROOT), "--object-directory", str(build), str(objects)),
            *("--filter", f"{ROOT}/core/.*", "--exclude", f"{ROOT}/core/(binding|kernels)/.*"),
            *("--exclude-unreachable-branches", "--merge-mode-functions", "separate"),
            *("-j", str(os.cpu_count() or 1), "--json", str(report)),
        ],
        check=True,
    )
    return {file["file"]: _native(file) for file in json.loads(report.read_text())["files"]}


def _native(file: dict[str, Any]) -> Branches:
    taken: dict[tuple[int, int], bool] = {}
    for line in file["lines"]:
        for number, branch in enumerate(_decisions(line.get("branches", []))):
            key = (line["line_number"], number)
            taken[key] = taken.get(key, False) or branch["count"] > 0
    left = sorted({line for (line, _), is_taken in taken.items() if not is_taken})
    return Branches(len(taken), sum(taken.values()), left)


def _decisions(branches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The branches of a line but for those of its calls: to gcov each call that may throw is two, on and out."""
    decisions: list[dict[str, Any]] = []
    at = 0
    while at < len(branches):
        pair = branches[at : at + 2]
        is_pair = len(pair) == 2 and pair[0]["branchno"] + 1 == pair[1]["branchno"]
        if is_pair and pair[0]["throw"] != pair[1]["throw"]:
            at += 2
        elif is_pair and pair[0]["fallthrough"] != pair[1]["fallthrough"] and not pair[0]["throw"]:
            decisions += pair
            at += 2
        else:
            decisions += [branch for branch in pair[:1] if not branch["throw"]]
            at += 1
    return decisions


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
    for room, names in NATIVE_ROOMS.items():
        files = {path: found for path, found in native.items() if Path(path).stem in names.split()}
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
