"""What every rank finds of the group's pool on its storage, before any of them writes: all ranks say it, and all decide
alike.

Invariants
- A pool is founded only where no rank has a manifest, and no rank a part that is not marked as unpublished.
- Whatever else does not fit together ends all ranks with one error, which says which rank lacks what; nothing is
  changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast import _core
from holdfast.errors import Corrupted, PoolExists, PoolNotFound
from holdfast.group import manifest as manifests
from holdfast.group.founding import check_newest
from holdfast.group.group import Group
from holdfast.group.manifest import MANIFEST, Manifest
from holdfast.pools.directory import exists as is_plain_pool
from holdfast.pools.directory import refuse_snapshot, some_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Of one rank. manifest: the text of its `group.json`. parts: names of files of a pool. unpublished: they are
    marked as those of a pool that is being made."""

    directory: str
    manifest: str | None
    is_plain_pool: bool
    unpublished: bool
    parts: tuple[str, ...]

    @classmethod
    def on(cls, directory: Path) -> Finding:
        """Raises Corrupted, FormatMismatch where the manifest cannot be read; PoolNotFound of a snapshot."""
        refuse_snapshot(directory)
        parts = _core.pool_parts(str(directory)) if directory.is_dir() else []
        return cls(
            directory=str(directory),
            manifest=manifests.read(directory).to_json() if manifests.exists(directory) else None,
            is_plain_pool=is_plain_pool(directory),
            unpublished=_core.is_unpublished(str(directory)),
            parts=tuple(parts[:8]),
        )


def find_pool(directory: Path, group: Group) -> Manifest | None:
    """The manifest in force, which is the keeper's; None where no rank has anything of a pool that was published.

    Raises PoolExists, PoolNotFound, Corrupted, FormatMismatch, on all ranks.
    """
    finding = group.all_or_none(lambda: Finding.on(directory), "the pool's manifest")
    everyones = group.gather(asdict(finding), "what everyone has of the pool")
    findings = [Finding(**{**said, "parts": tuple(said["parts"])}) for said in everyones]
    manifest = manifest_in_force(findings, group.roles.keeper)
    if manifest is not None:
        group.all_or_none(lambda: check_newest(directory, manifest), "everyone's parts of the pool")
    return manifest


def manifest_in_force(findings: Sequence[Finding], keeper: int = 0) -> Manifest | None:
    """Of what all ranks have found, by rank. Others may have nothing, or an older copy."""
    for rank, finding in enumerate(findings):
        if finding.is_plain_pool:
            raise PoolExists(
                f"{finding.directory} of rank {rank} holds a pool that one process made, which is not cut into shards; "
                "train it without torchrun, or cut a copy: holdfast snapshot, then holdfast restore --shards 64"
            )
    known = {
        rank: Manifest.from_json(finding.manifest, f"{finding.directory}/{MANIFEST} of rank {rank}")
        for rank, finding in enumerate(findings)
        if finding.manifest is not None
    }
    if keeper in known:
        _check_same_pool(findings, known, keeper)
        return known[keeper]
    if known:
        rank, manifest = next(iter(known.items()))
        raise PoolNotFound(
            f"rank {keeper} has no {MANIFEST} in {findings[keeper].directory}, but rank {rank} has one, of a pool of "
            f"{manifest.num_writers} writers: if rank {keeper}'s storage is not mounted or not the right one, bring it "
            f"back; if only {MANIFEST} is lost there, copy rank {rank}'s; if its parts are lost, too, the pool is, but "
            "for a copy that you may have. Nothing was changed; for a new pool name another directory"
        )
    for rank, finding in enumerate(findings):
        if finding.parts and not finding.unpublished:
            raise Corrupted(
                f"{finding.directory} of rank {rank} has parts of a pool ({some_of(finding.parts)}), and no rank has a "
                f"{MANIFEST}: it is lost, and they may hold the pool's rows, so nothing was changed. Put it back from "
                "a copy; for a new pool name another directory, or remove these files"
            )
    return None


def _check_same_pool(findings: Sequence[Finding], known: dict[int, Manifest], keeper: int) -> None:
    in_force = known[keeper]
    for rank, manifest in known.items():
        where = f"{findings[rank].directory}/{MANIFEST} of rank {rank}"
        if manifest.uuid != in_force.uuid:
            raise Corrupted(
                f"{where} is of another pool than rank {keeper}'s: bring the right storage to each rank. Nothing was "
                "changed"
            )
        if manifest.generation > in_force.generation:
            raise Corrupted(
                f"{where} is of generation {manifest.generation}, rank {keeper}'s of {in_force.generation}, an older "
                f"copy: put the newer {MANIFEST} on rank {keeper}'s storage, with the parts that it names. Nothing was "
                "changed"
            )
