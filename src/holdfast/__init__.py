"""holdfast: recommendation models whose tables outgrow memory, every batch durable, every resume exact to the bit."""

from holdfast.batch import Batch, JaggedFeatures
from holdfast.dense import Checkpoint
from holdfast.embedding import EmbeddingBagCollection, PooledFeatures, clip_grad_norm_
from holdfast.errors import HoldfastError
from holdfast.optim import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam
from holdfast.pool import Pool
from holdfast.tables import EmbeddingBagConfig

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Batch",
    "Checkpoint",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "HoldfastError",
    "JaggedFeatures",
    "Pool",
    "PooledFeatures",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "clip_grad_norm_",
]
