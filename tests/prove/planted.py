"""A small training script with one planted defect, by name: what `holdfast prove` has to catch."""

import argparse
import os
import sys
import tempfile
import time

BATCH, ROWS, DIM, LAST_STEP = 16, 200, 8, 12

parser = argparse.ArgumentParser()
parser.add_argument("pool")
parser.add_argument("--defect", default="none")
parser.add_argument("--life-file", help="counts the processes")
args = parser.parse_args()
defect = args.defect

if defect == "dies":
    raise RuntimeError("the data is not there")
if defect == "no pool":
    sys.exit(0)

import numpy as np  # noqa: E402  (dying above takes no second)
import torch  # noqa: E402
from torch import nn  # noqa: E402

import holdfast  # noqa: E402

torch.manual_seed(1)
where = tempfile.mkdtemp() if defect == "wandering pool" else args.pool
pool = holdfast.Pool(where, seed=1)
rows = holdfast.EmbeddingBagCollection(
    pool,
    [holdfast.EmbeddingBagConfig(name="item", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["item"])],
    optimizer=holdfast.RowWiseAdagrad(lr=0.05),
)
if defect == "no checkpoint":
    sys.exit(0)
model = nn.Sequential(nn.Linear(DIM, 12), nn.ReLU(), nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
noise = np.random.default_rng(5)
average = torch.zeros(DIM)

if defect == "optimizer left out":
    watched, schedules = [], ()
else:
    watched, schedules = optimizer, schedule


class Forgetful:
    """Loads something else than it saved."""

    count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"] // 2


forgetful = Forgetful()
extra = {"forgetful": forgetful} if defect == "forgetful" else {}
counts = {"steps": 0}
if defect in ("none", "counts not put back"):
    extra["counts"] = counts
checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=watched, scheduler=schedules, extra=extra)
if defect == "two pools":
    other = holdfast.Pool(f"{args.pool}-other")
    holdfast.EmbeddingBagCollection(
        other, [holdfast.EmbeddingBagConfig(name="x", num_embeddings=2, embedding_dim=1, feature_names=["x"])]
    )
    holdfast.Checkpoint(other, model=model, optimizer=watched)
if defect != "no resume":
    resumed = checkpoint.resume()
    if defect == "dies after a resume" and resumed > 0:
        raise ValueError("this file was to be new")
if defect == "none":
    counts |= checkpoint.saved("counts")
if defect == "hangs":
    time.sleep(600)

words = {f"word{i}" for i in range(40)}
offsets = torch.arange(BATCH + 1)
while pool.step < LAST_STEP:
    data = torch.Generator().manual_seed(pool.step)
    ids = torch.randint(ROWS, (BATCH,), generator=data)
    if defect == "order of hashes":
        ids[0] = int(next(iter(words))[4:])
    label = (ids % 3 == 0).float()
    optimizer.zero_grad()
    vectors = rows({"item": (ids, offsets)}).values()
    if defect == "unseeded mask":
        vectors = vectors * torch.tensor([byte < 200 for byte in os.urandom(BATCH * DIM)]).view(BATCH, DIM)
    if defect == "generator not captured":
        vectors = vectors + torch.from_numpy(noise.normal(0, 0.1, (BATCH, DIM))).float()
    if defect == "average outside":
        average = 0.9 * average + 0.1 * vectors.detach().mean(0)
        vectors = vectors - average
    loss = nn.functional.binary_cross_entropy_with_logits(model(vectors).squeeze(1), label)
    loss.backward()
    if defect == "rate by the clock":
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + time.time() % 60)
    optimizer.step()
    rows.optimizer.step()
    if defect not in ("schedule after commit", "rate by the clock"):
        schedule.step()
    forgetful.count += 1
    counts["steps"] += 1
    if defect == "prints a lot":
        print("x" * (2 << 20))
    checkpoint.commit((pool.step + 1) * BATCH)
    if defect == "schedule after commit":
        schedule.step()
if defect == "leaves by the back door":
    os._exit(0)
