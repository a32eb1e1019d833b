"""A model's scores on a source, in file order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from holdfast.data.loader import Loader
from holdfast.data.source import Source
from holdfast.train.metrics import Evaluation, ScoreCollector
from holdfast.train.options import TrainConfig


class EvaluationStopped(Exception):
    """The process was asked to stop while its model was being evaluated."""


def evaluate_model(
    model: nn.Module, source: Source, config: TrainConfig, on_batch: Callable[[int], None] | None = None
) -> Evaluation:
    """AUC and log-loss of a model, wherever it is, over all of `source`. on_batch: told the samples of every batch that
    is done."""
    return collect_scores(model, source, config, on_batch or (lambda samples: None), (0, 1)).evaluate()


@torch.no_grad()
def collect_scores(
    model: nn.Module, source: Source, config: TrainConfig, on_batch: Callable[[int], None], part: tuple[int, int]
) -> ScoreCollector:
    """Scores of a part of every batch of `source`."""
    was_training = model.training
    device = next(model.parameters()).device
    model.eval()
    scores = ScoreCollector()
    try:
        with Loader(source, batch_size=config.eval_batch_size, seed=0, part=part) as loader:
            for number, batch in enumerate(loader.once()):
                with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                    logits = model(batch.dense.to(device), batch.features)
                scores.add(logits, batch.labels)
                on_batch(min(config.eval_batch_size, source.num_samples - number * config.eval_batch_size))
    finally:
        model.train(was_training)
    return scores
