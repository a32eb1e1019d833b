"""What is watched next: a transformer over sequences of many lengths, warmup, averaged weights, a DataLoader."""

import random
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import holdfast

holdfast.prepare_environment()
ITEMS, LONGEST, DIM, BATCH = 2500, 9, 24, 32
torch.manual_seed(3), random.seed(3), np.random.seed(3)
torch.set_num_threads(1)


class Histories(Dataset):
    def __len__(self):
        return BATCH * 500

    def __getitem__(self, number):
        draw = np.random.default_rng(number)
        return torch.from_numpy(np.minimum(draw.zipf(1.3, draw.integers(2, LONGEST + 2)), ITEMS - 1))


def collate(histories):
    lengths = torch.tensor([len(history) - 1 for history in histories])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    seen, following = (torch.cat([h[cut] for h in histories]) for cut in (slice(None, -1), slice(1, None)))
    return {"seen": (seen, offsets), "following": (following.int(), offsets.int()), "user": lengths * 7 % 50}


class NextItem(nn.Module):
    def __init__(self, items, users):
        super().__init__()
        self.items, self.users = items, users
        self.place = nn.Embedding(LONGEST, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 3, 48, dropout=0.2, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, batch):
        vectors = self.items(batch)
        lengths = vectors["seen"].lengths()
        x = vectors["seen"].to_padded_dense(LONGEST) + self.place.weight + self.users(batch)["user"][:, None]
        is_there = torch.arange(LONGEST) < lengths[:, None]
        mask = nn.Transformer.generate_square_subsequent_mask(LONGEST)
        state = self.encoder(x, mask=mask, src_key_padding_mask=~is_there, is_causal=True)[is_there]
        scores = state @ vectors["following"].values().T
        return functional.cross_entropy(scores, torch.arange(len(scores)), label_smoothing=0.1)


with holdfast.Pool(sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/next-item", seed=8, dense_interval=3) as pool:
    item = holdfast.EmbeddingBagConfig(
        name="item", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["seen", "following"], data_type="bf16"
    )
    user = holdfast.EmbeddingBagConfig(name="user", num_embeddings=50, embedding_dim=DIM, feature_names=["user"])
    items = holdfast.EmbeddingCollection(pool, [item], optimizer=holdfast.RowWiseAdam(lr=0.01))
    users = holdfast.EmbeddingBagCollection(pool, [user])
    model = NextItem(items, users)
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    checkpoint = holdfast.Checkpoint(
        pool, model=model, optimizer=optimizer, scheduler=warmup, extra={"average": average}
    )
    checkpoint.resume()
    order = torch.randperm(BATCH * 500, generator=torch.Generator().manual_seed(5))[pool.cursor :].tolist()
    batches = DataLoader(Histories(), BATCH, sampler=order, collate_fn=collate, generator=torch.Generator())
    for number, batch in enumerate(batches, pool.step + 1):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        holdfast.clip_grad_norm_(model.parameters(), [items, users], 1.0)
        optimizer.step()
        items.optimizer.step()
        users.optimizer.step()
        warmup.step()
        average.update_parameters(model)
        checkpoint.commit(number * BATCH, loss=loss)
        if number % 5 == 0:
            with torch.no_grad():
                print(number, loss.item(), average.eval()(batch).item())
        if number == 60:
            break
