"""Makes the swarm's modules importable, and those that they build on."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / name) for name in ("crash", "numerics", "distributed"))]
