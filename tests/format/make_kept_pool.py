"""Makes the kept pool of today's format version: pools/vN.tar.gz, and vN.json with what must be found in it.

Run it once for each released version, with the holdfast of that release: python tests/format/make_kept_pool.py
A pool that is there is never made anew: it is the only witness of what that version wrote.
"""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
import tempfile
from pathlib import Path

from format_doc import CONSTANTS
from holdfast import Pool
from pool_image import PoolImage
from tiny_pools import died_two_steps_after_its_dense_state, digest_of_rows, files_of

POOLS = Path(__file__).parent / "pools"


def main() -> None:
    version = CONSTANTS["version"]
    archive = POOLS / f"v{version}.tar.gz"
    if archive.exists():
        sys.exit(f"{archive} is there already")
    with tempfile.TemporaryDirectory() as root:
        pool = died_two_steps_after_its_dense_state(Path(root))
        POOLS.mkdir(exist_ok=True)
        with gzip.GzipFile(archive, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            for name in files_of(pool):
                info = tar.gettarinfo(pool / name, arcname=name)
                info.uid = info.gid = info.mtime = 0
                info.uname = info.gname = ""
                with (pool / name).open("rb") as file:
                    tar.addfile(info, file)
        image = PoolImage(pool)
        newest = image.newest_commit()[1]
        with Pool(pool) as recovered:
            expected = {
                "committed_step": newest["step"],
                "step": recovered.step,
                "cursor": recovered.core.cursor,
                "row_updates": recovered.core.row_updates,
            }
        expected["rows_sha256"] = digest_of_rows(pool)
    (POOLS / f"v{version}.json").write_text(json.dumps(expected, indent=2) + "\n")


if __name__ == "__main__":
    main()
