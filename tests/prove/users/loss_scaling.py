"""float16 rows, a GradScaler on the processor that skips steps when it must, and one thread."""

import sys

import torch
from torch import nn

import holdfast

torch.set_num_threads(1)
torch.manual_seed(2)
SIZE, BATCH = 4096, 100

pool = holdfast.Pool(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/scaled-pool")
rows = holdfast.EmbeddingBagCollection(
    pool,
    [
        holdfast.EmbeddingBagConfig(
            name=f"t{i}", num_embeddings=SIZE >> i, embedding_dim=8 << i, feature_names=[f"f{i}"], data_type="fp16"
        )
        for i in range(3)
    ],
    optimizer=holdfast.RowWiseAdagrad(lr=0.1, eps=1e-6),
)
model = nn.Sequential(nn.Linear(56, 300), nn.Hardswish(), nn.Linear(300, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer, scaler=scaler)
checkpoint.resume()
offsets = torch.arange(BATCH + 1)
while pool.step < 300:
    data = torch.Generator().manual_seed(pool.step)
    features = {f"f{i}": (torch.randint(SIZE >> i, (BATCH,), generator=data), offsets) for i in range(3)}
    label = (features["f0"][0] % 5 == 0).float()
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(model(rows(features).values()).squeeze(1), label)
    if pool.step % 7 == 6:
        loss = loss * float("inf")  # what fp16 does now and then
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.step(rows.optimizer)
    scaler.update()
    checkpoint.commit((pool.step + 1) * BATCH)
pool.close()
