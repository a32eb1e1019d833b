"""The systems that holdfast is measured against, each in its best known CPU setting; run with ``python -m peers``.

Runs in an environment of its own (benchmarks/requirements-peers.txt), which has no holdfast: the network is loaded
from src/holdfast/models/dlrm.py by its path. ``peers.shapes`` and ``peers.batches`` need numpy and torch alone, so that
a runner can give holdfast the same batches.
"""
