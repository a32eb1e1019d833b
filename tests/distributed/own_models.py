"""A model of a user's own, as a rank's configuration names it: "own_models:build"."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from holdfast.models import ModelInputs


class Attentive(nn.Module):
    """Attention with dropout, batch statistics (which differ between ranks), and a counter."""

    def __init__(self, inputs: ModelInputs, embeddings: nn.Module, hidden: int) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.dim = inputs.embedding_dim
        self.attend = nn.MultiheadAttention(self.dim, 2, dropout=0.2, batch_first=True)
        self.over = nn.Sequential(
            nn.BatchNorm1d(self.dim + inputs.num_dense),
            nn.Linear(self.dim + inputs.num_dense, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 1),
        )
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, dense: Tensor, features: object) -> Tensor:
        tokens = self.embeddings(features).values().view(dense.shape[0], -1, self.dim)
        if self.training:
            self.seen += dense.shape[0]
        mixed, _ = self.attend(tokens, tokens, tokens)
        return self.over(torch.cat([mixed.mean(dim=1), dense], dim=1)).squeeze(1)


def build(inputs: ModelInputs, embeddings: nn.Module, *, hidden: int = 8) -> nn.Module:
    return Attentive(inputs, embeddings, hidden)


def narrow(inputs: ModelInputs, embeddings: nn.Module) -> nn.Module:
    """Its logits have one dimension too many."""

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings, self.top = embeddings, nn.Linear(inputs.pooled_width, 1)

        def forward(self, dense: Tensor, features: object) -> Tensor:
            return self.top(self.embeddings(features).values())

    return Narrow()
