"""Training by several processes over one pool that is cut into shards: ``torchrun -m holdfast train``.

Ranks are trainers, owners, or both. Trainers hold the dense part and take a slice of every batch; owners hold shards of
the tables, pool next to their rows, and update them. Only ids, pooled vectors and their gradients travel.

- `group`: torch.distributed with deadlines, and with errors that name the rank.
- `layout`, `manifest`: which row lies in which shard, and who owns it; what the pool's directory says of that.
- `dense_states`: kept by rank 0, or for it.
- `shared_pool`, `pool`: the pools of all ranks as one: recovered to one step, committed. `joining`, `founding`,
  `opening`, `relaxing`: how they come to be; `reading`, `inspection`: as others see them.
- `copying`, `restoring`: snapshots of them.
- `exchange`, `remote_rows`, `serving`: a batch's way from trainers to owners and back.
- `rank_states`, `gradients`: the dense state with every rank's random numbers, and the dense gradients' mean.
"""
