"""Makes the kept pools of today's format version, one of each store: pools/vN-STORE.tar.gz, and .json with what must be
found in it.

Run it once for each version, with the holdfast that writes it: PYTHONPATH=tests python tests/format/make_kept_pool.py
A pool that is there is never made anew: it is the only witness of what that version wrote.
"""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from format_doc import CONSTANTS
from holdfast import Pool, _core
from tiny_pools import (
    died_in_a_log_store_after_merges,
    died_two_steps_after_its_dense_state,
    digest_of_rows,
    files_of,
)

POOLS = Path(__file__).parent / "pools"
MAKERS: dict[str, Callable[[Path], Path]] = {
    "in_place": died_two_steps_after_its_dense_state,
    "log": died_in_a_log_store_after_merges,
}


def main() -> None:
    for store, make in MAKERS.items():
        name = f"v{CONSTANTS['version']}-{store}"
        if (POOLS / f"{name}.tar.gz").exists():
            sys.exit(f"{name} is there already")
        with tempfile.TemporaryDirectory() as root:
            pool = make(Path(root))
            _pack(pool, POOLS / f"{name}.tar.gz")
            expected = {"committed_step": _core.Reader(str(pool)).commit["step"]}
            with Pool(pool) as recovered:
                expected |= {
                    "step": recovered.step,
                    "cursor": recovered.core.cursor,
                    "row_updates": recovered.core.row_updates,
                }
            found: dict[str, object] = {**expected, "rows_sha256": digest_of_rows(pool)}
        (POOLS / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")


def _pack(pool: Path, archive: Path) -> None:
    POOLS.mkdir(exist_ok=True)
    with gzip.GzipFile(archive, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name in files_of(pool):
            info = tar.gettarinfo(pool / name, arcname=name)
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            with (pool / name).open("rb") as file:
                tar.addfile(info, file)


if __name__ == "__main__":
    main()
