"""Which cells there are: workloads, and the systems of each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scratchpipe.batches import SKEWS, Workload
from scratchpipe.systems import Log

_BESIDE_ALL = ("dram", "none", "static", "static-beside", "lru", "straw", "forward")
_CACHED = ("static", "lru", "straw", "forward")
_DURABLE = ("static", "forward")
_SWEPT = Workload(skew="medium")
SWEEPS: dict[str, tuple[Workload, ...]] = {
    "cache": tuple(replace(_SWEPT, cache=share) for share in (0.02, 0.05, 0.1)),
    "dim": tuple(replace(_SWEPT, dim=dim) for dim in (16, 64, 128)),
    "lookups": tuple(replace(_SWEPT, lookups=lookups) for lookups in (1, 20, 80)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    workload: Workload
    mode: str
    log: Log = Log.WRITE_BACK

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.mode}" + ("" if self.log is Log.WRITE_BACK else "/every row")


def cells(sections: tuple[str, ...], *, quick: bool) -> list[Cell]:
    """sections: of SECTIONS. quick: one skew, a system of each kind."""
    if quick:
        return [Cell(workload=_SWEPT, mode=mode) for mode in ("dram", *_CACHED)]
    found: list[Cell] = []
    for section in sections:
        found += SECTIONS[section]
    return list(dict.fromkeys(found))


def _of_skew() -> list[Cell]:
    return [Cell(workload=Workload(skew=skew), mode=mode) for skew in SKEWS for mode in _BESIDE_ALL]


def _durable() -> list[Cell]:
    return [Cell(workload=Workload(skew=skew), mode=mode, log=Log.EVERY_ROW) for skew in SKEWS for mode in _DURABLE]


def _sweep(varied: str) -> list[Cell]:
    return [Cell(workload=workload, mode=mode) for workload in SWEEPS[varied] for mode in ("dram", *_CACHED)]


SECTIONS = {"skew": _of_skew(), **{varied: _sweep(varied) for varied in SWEEPS}, "durable": _durable()}
