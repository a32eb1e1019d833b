"""Our side of the comparison, on the peers' batches, model and loss; run with ``python -m ours`` from benchmarks/.

Modes: ``committed`` is holdfast as it is used, every batch durable; ``bare`` the same lookups and updates with nothing
durable; ``opened`` the loop of the README over a pool that is opened again; the others are steps of the ablation in
between, and measurements of memory and of recovery.
"""
