"""What strangers keep beside their configuration: a two-tower model with attention and buffers, and a source."""

from __future__ import annotations

MODEL = '''
import torch
from torch import nn

from layers import Score


class TwoTower(nn.Module):
    """Attention among a sample's embeddings (with dropout), batch statistics, a counter of its own."""

    def __init__(self, inputs, embeddings, hidden, heads):
        super().__init__()
        self.embeddings = embeddings
        self.dim = inputs.embedding_dim
        self.names = [feature.name for feature in inputs.features]
        self.attend = nn.MultiheadAttention(self.dim, heads, dropout=0.2, batch_first=True)
        self.norm = nn.BatchNorm1d(self.dim)
        self.query = nn.Linear(self.dim + inputs.num_dense, hidden)
        self.candidate = nn.Linear(self.dim, hidden)
        self.score = Score()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, dense, features):
        pooled = self.embeddings(features)
        if self.training:
            self.seen += dense.shape[0]
        tokens = pooled.values().view(dense.shape[0], len(self.names), self.dim)
        mixed, _ = self.attend(tokens, tokens, tokens)
        query = self.query(torch.cat([self.norm(mixed.mean(dim=1)), dense], dim=1))
        return self.score(query, self.candidate(pooled[self.names[-1]]))


def build(inputs, embeddings, *, hidden: int, heads: int = 2, note: str = ""):
    return TwoTower(inputs, embeddings, hidden, heads)


def warm(step):
    return min(1.0, (step + 1) / 10)


NOT_A_FUNCTION = 3
'''

LAYERS = """
from torch import nn


class Score(nn.Module):
    def forward(self, query, candidate):
        return (query * candidate).sum(dim=1)
"""

CLICKS = '''
from pathlib import Path

import numpy as np

from holdfast.data import Feature
from holdfast.data.block import FixedBags, JaggedBags, SampleBlock


class Clicks:
    """Samples of a seed: a user, an item, and a list of words."""

    num_dense = 0
    sample_bytes = 40
    features = (Feature(name="user", num_embeddings=60), Feature(name="words", num_embeddings=30))

    def __init__(self, seed, num_samples):
        self.seed, self.num_samples = seed, num_samples
        self.block_sizes = np.array([100] * (num_samples // 100), np.int64)

    def read_block(self, index):
        rng = np.random.default_rng([self.seed, index])
        user = rng.integers(0, 60, 100)
        offsets = np.concatenate([[0], rng.integers(0, 4, 100).cumsum()])
        labels = (rng.random(100) < 0.2 + 0.6 * (user % 2)).astype(np.float32)
        words = JaggedBags(rng.integers(0, 30, offsets[-1]), offsets)
        return SampleBlock(labels=labels, dense=np.zeros((100, 0), np.float32), bags=(FixedBags(user[:, None]), words))

    def fingerprint(self):
        return {"kind": "clicks", "seed": self.seed, "num_samples": self.num_samples}


def make(path: Path, num_samples: int = 600):
    return Clicks(int(path.read_text()), num_samples)
'''

CONFIG = """
[data.synthetic]
num_samples = 640
rows = [50, 7, 400]
num_dense = 3

[validation]
num_samples = 200

[embedding]
dim = 4
lr = 0.05

[model]
build = "towers:build"
hidden = 6

[optimizer]
name = "RAdam"
lr = 0.01

[train]
batch_size = 32
"""

OWN_DATA = """
[data]
source = "clicks:make"
path = "train.seed"

[validation]
path = "valid.seed"
num_samples = 300
"""


def with_own_data(config: str = CONFIG) -> str:
    return OWN_DATA + config[config.index("[embedding]") :]


def without(section: str, config: str = CONFIG) -> str:
    """The configuration without a section."""
    parts = config.split("\n\n")
    return "\n\n".join(part for part in parts if f"[{section}]" not in part)
