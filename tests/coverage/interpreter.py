"""Makes the interpreter that `make coverage` runs Python tests with: the packages of the one that runs this, without
its editable install of holdfast, and counted.py in every process that it starts, whatever that sets PYTHONPATH to.

Usage: interpreter.py DIRECTORY"""

from __future__ import annotations

import sys
import sysconfig
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent


def make(directory: Path) -> None:
    venv.EnvBuilder(symlinks=True, with_pip=False, clear=True).create(directory)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site_packages = directory / "lib" / version / "site-packages"
    # Path files of a directory that is named here are not read, so the editable install is not found.
    lines = [sysconfig.get_path("platlib"), str(HERE), "import counted"]
    (site_packages / "counted.pth").write_text("\n".join(lines) + "\n")
    script = directory / "bin" / "holdfast"  # the installed command, which tests look for beside the interpreter
    script.write_text(f"#!{directory.resolve()}/bin/python\nfrom holdfast.cli import main\n\nmain()\n")
    script.chmod(0o755)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
