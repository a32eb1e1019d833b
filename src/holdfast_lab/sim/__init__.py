"""What a system would do that we do not have: time and energy of training steps, in discrete events.

From declarations to numbers: device: what hardware does · model: what a batch asks for · system: which stage runs on
which device, after what · work: how much a stage moves and computes · machine: the events · library: the declarations,
TOML files in library/ that a user can copy and change.
"""
