"""Four micro-batches a step under bf16 autocast, on a disk, with rows in half precision, committed now and then."""

import os
import tempfile

import torch
import torch.nn.functional as F

import holdfast

os.environ.setdefault("OMP_NUM_THREADS", "2")
torch.set_num_threads(1)
POOL = os.environ.get("POOL", os.path.join(tempfile.gettempdir(), "my-ads-pool"))
MICRO, ACCUMULATE, CATEGORIES = 96, 4, 20_000


def micro_batch(number):
    rng = torch.Generator().manual_seed(number)
    lengths = torch.randint(0, 6, (MICRO,), generator=rng)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    ids = (torch.rand(int(offsets[-1]), generator=rng) ** 3 * CATEGORIES).long()
    dense = torch.rand(MICRO, 24, generator=rng)
    return ids, offsets, dense, (dense.mean(1) * 4 + lengths * 0.2 > 2.4).float()


torch.manual_seed(0)
pool = holdfast.Pool(POOL, seed=99, medium="block", dense_interval=3, scratchpad_bytes=8 << 20, log_bytes=16 << 20)
emb = holdfast.EmbeddingBagCollection(
    pool,
    [
        holdfast.EmbeddingBagConfig(
            name="category",
            num_embeddings=CATEGORIES,
            embedding_dim=32,
            feature_names=["category"],
            pooling="mean",
            data_type="bf16",
        )
    ],
    optimizer=holdfast.SGD(lr=0.05),
)
net = torch.nn.Sequential(
    torch.nn.Linear(56, 256), torch.nn.SiLU(), torch.nn.Linear(256, 64), torch.nn.SiLU(), torch.nn.Linear(64, 1)
)
opt = torch.optim.NAdam(net.parameters(), lr=1e-3)
state = holdfast.Checkpoint(pool, model=net, optimizer=opt)
state.resume()
while pool.step < 500:
    opt.zero_grad()
    for micro in range(ACCUMULATE):
        ids, offsets, dense, label = micro_batch(pool.step * ACCUMULATE + micro)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logit = net(torch.cat([emb({"category": (ids, offsets)}).values(), dense], dim=1)).squeeze(1)
        (F.binary_cross_entropy_with_logits(logit.float(), label) / ACCUMULATE).backward()
    opt.step()
    emb.optimizer.step()
    state.commit((pool.step + 1) * ACCUMULATE * MICRO)
