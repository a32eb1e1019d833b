"""How rows are cut into the tiles of programs.

A function of shapes alone, without autotuning: what that finds may differ from one run to the next. (No result depends
on a tile, but what is compiled does, and a run should not wait for that twice.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NUM_WARPS = 4
LAUNCH: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
# Told that it may use 64 registers, ptxas issues all loads of an unrolled pass before the first addition. Left alone it
# aims at full occupancy with half as many, and has two loads in flight.
LAUNCH_SUMS: dict[str, Any] = LAUNCH | {"maxnreg": 64}


def block_of(width: int) -> int:
    """The columns of a tile that holds rows of `width` elements: the next power of two."""
    return 1 << max(0, width - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Tile:
    """rows × block elements; a loop over what is summed reads `unroll` of each row at a time."""

    rows: int
    block: int
    unroll: int = 1

    def programs(self, num_rows: int) -> int:
        return -(-num_rows // self.rows)


def tile_of(width: int, elements_per_thread: int, unroll: int = 1, *, least_block: int = 1) -> Tile:
    """A tile of rows of `width` elements: whole rows, about `elements_per_thread` of their elements a thread."""
    block = block_of(width)
    return Tile(max(1, 32 * NUM_WARPS * elements_per_thread // max(block, least_block)), block, unroll)
