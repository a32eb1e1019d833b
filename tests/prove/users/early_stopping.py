"""A Trainer class that evaluates now and then, keeps the best score and an average of the weights, and stops early."""

import argparse
import copy

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast


class Patience:
    """What decides when to stop is state like any other."""

    def __init__(self, patience):
        self.patience, self.least, self.best, self.bad = patience, 2e-4, float("inf"), 0

    def is_over(self, score):
        self.bad = 0 if score < self.best - self.least else self.bad + 1
        self.best = min(score, self.best)
        return self.bad > self.patience

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


class Trainer:
    def __init__(self, directory, batch_size=150, eval_every=2):
        torch.manual_seed(77)
        self.batch_size, self.eval_every = batch_size, eval_every
        self.pool = holdfast.Pool(directory, seed=1)
        self.rows = holdfast.EmbeddingBagCollection(
            self.pool,
            [
                holdfast.EmbeddingBagConfig(
                    name="words", num_embeddings=1200, embedding_dim=20, feature_names=["query", "title"]
                )
            ],
            optimizer=holdfast.Adam(lr=0.002),
        )
        self.net = nn.Sequential(nn.Linear(40, 50), nn.ELU(), nn.AlphaDropout(0.05), nn.Linear(50, 1))
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.Adagrad(self.net.parameters(), lr=0.03)
        self.noise = torch.Generator().manual_seed(5)
        self.patience = Patience(2)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=2)
        self.checkpoint = holdfast.Checkpoint(
            self.pool,
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.plateau,
            extra={"average": self.average, "patience": self.patience, "noise": _Kept(self.noise)},
        )

    def batch(self, number, size):
        g = torch.Generator().manual_seed(number)
        query, title = torch.randint(1200, (2, size * 3), generator=g)
        offsets = torch.arange(0, size * 3 + 1, 3)
        label = ((query.view(-1, 3).sum(1) + title.view(-1, 3).sum(1)) % 7 < 3).float()
        return {"query": (query, offsets), "title": (title, offsets)}, label

    def loss(self, network, number, size):
        features, label = self.batch(number, size)
        return nn.functional.binary_cross_entropy_with_logits(network(self.rows(features).values()).squeeze(1), label)

    def evaluate(self):
        self.rows.eval()
        average = copy.deepcopy(self.average).eval()
        with torch.no_grad():
            score = sum(float(self.loss(average, 10_000_000 + i, 400)) for i in range(3)) / 3
        self.rows.train()
        return score

    def fit(self, last_step):
        self.checkpoint.resume()
        while self.pool.step < last_step:
            self.optimizer.zero_grad()
            self.loss(self.net, self.pool.step, self.batch_size).backward()
            for parameter in self.net.parameters():
                parameter.grad += torch.randn(parameter.shape, generator=self.noise) * 1e-3
            self.optimizer.step()
            self.rows.optimizer.step()
            self.average.update_parameters(self.net)
            is_over = False
            if (self.pool.step + 1) % self.eval_every == 0:
                score = self.evaluate()
                self.plateau.step(score)
                is_over = self.patience.is_over(score)
            self.checkpoint.commit((self.pool.step + 1) * self.batch_size)
            if is_over:
                break
        self.checkpoint.flush()
        self.pool.close()


class _Kept:
    """A generator with state_dict."""

    def __init__(self, generator):
        self.generator = generator

    def state_dict(self):
        return {"state": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["state"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool", default="/dev/shm/words-pool")
    Trainer(parser.parse_args().pool).fit(120)
