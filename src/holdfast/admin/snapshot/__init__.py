"""Snapshots: a pool as it was at the end of one step, in a directory of its own, taken while a run goes on.

A pool is trained in place: a run that diverges has overwritten the model of yesterday. A snapshot is that model, whole
or as what changed since an earlier snapshot, and `restore_snapshot` makes a pool of it that goes on to the bit.

The core copies rows as they are at that instant and follows the log (core/readers/live_copy.h); what was copied and
what corrects it lie in two layers of files here. docs/FORMAT.md has the bytes.

- `form`: names, records and checksums of its files; `rows`: rows of a table that are on their way.
- `chain`: a snapshot that is there, what it is based on, and the rows that they have together.
- `output`: files and directories that are whole and durable, or not there.
- `copying`: a pool's rows while a run changes them; of a group's pool, `group_copying` and `group_restoring`.
- `taking`, `restoring`, `inspection`: what the commands do.

Invariants
- A snapshot is a directory that was renamed when everything in it was durable; until then it has another name.
- Files are data. Every byte is under a checksum, every number is checked before it is used, nothing is unpickled.
- Of a row that several layers have, the newest layer's counts: corrections before rows, a snapshot before its parent.
- A restored pool has its name when every file of the chain was read and holds.
"""

from holdfast.admin.snapshot.chain import Snapshot, open_chain
from holdfast.admin.snapshot.restoring import RestoreSummary, restore_snapshot
from holdfast.admin.snapshot.taking import SnapshotSummary, take_snapshot

__all__ = ["RestoreSummary", "Snapshot", "SnapshotSummary", "open_chain", "restore_snapshot", "take_snapshot"]
