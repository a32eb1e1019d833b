"""Tries a wheel as somebody does who has only that: an environment of its own, no compiler, another directory.

The packages that it needs are those of the interpreter that runs this, so that no gigabyte is fetched; holdfast itself
is the wheel's. Where there is qemu-x86_64 (Debian: qemu-user), it trains once more on a processor without AVX.

Usage: try_wheel.py WHEEL
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

RUN = """
[data.criteo_shape]
num_samples = 2000
scale = 0.0001
[embedding]
dim = 8
[model]
bottom = [16, 8]
top = [16, 1]
[train]
batch_size = 64
steps = 10
"""
OLD_PROCESSOR = ("qemu-x86_64", "-cpu", "Nehalem")


class Environment:
    """A virtual environment in which nothing but the wheel is installed."""

    def __init__(self, root: Path, wheel: Path) -> None:
        self.root = root
        self._bin = root / "env/bin"
        venv.create(root / "env", with_pip=False)
        python = str(self._bin / "python")
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", str(wheel)],
            check=True,
        )
        packages = Path(self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        # A path alone: .pth files in it, as that of an editable install, are not read.
        (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (root / "run.toml").write_text(RUN)

    def run(self, program: str, *arguments: str | Path, before: tuple[str, ...] = ()) -> str:
        """What the program prints. Exits with what it said where it fails."""
        first = shutil.which(before[0]) if before else None
        command = [*([first, *before[1:]] if first else []), str(self._bin / program), *map(str, arguments)]
        environment = {"PATH": str(self._bin), "HOME": str(self.root), "TMPDIR": str(self.root)}
        done = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        return done.stdout


def main(wheel: Path) -> None:
    if "manylinux" not in wheel.name:
        raise SystemExit(f"{wheel.name} says nothing of the systems that it runs on")
    with tempfile.TemporaryDirectory() as temporary:
        bare = Environment(Path(temporary), wheel.absolute())
        asked = "import holdfast, holdfast_lab; print(holdfast.__file__, holdfast_lab.__file__)"
        where = bare.run("python", "-c", asked)
        for path in where.split():
            assert Path(path).is_relative_to(Path(temporary).resolve()), f"that is not the wheel's: {path}"
        out = bare.run("holdfast", "train", "run.toml", "--pool", "pool")
        assert "trained to step 10" in out, out
        bare.run("holdfast", "verify", "pool")
        assert '"step": 10' in bare.run("holdfast", "inspect", "pool", "--json"), "the pool is at another step"
        bare.run("holdfast", "plan", "run.toml", "--help")  # of the lab, by its entry point
        print(f"{wheel.name}: trains, verifies, inspects")
        if shutil.which(OLD_PROCESSOR[0]) is None:
            print(f"not tried on an old processor: no {OLD_PROCESSOR[0]} (Debian: qemu-user)")
            return
        script = ("-m", "holdfast", "train", "run.toml", "--pool", "old")
        assert "trained to step 10" in bare.run("python", *script, before=OLD_PROCESSOR), "the run ended early"
        print("trains on a processor without AVX")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    os.environ.pop("PYTHONPATH", None)
    main(Path(sys.argv[1]))
