"""How good the scores of a click model are: exact AUC and log-loss, in float64, the same bits on every run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """auc: area under the ROC curve, NaN unless both classes occur. log_loss: mean, in nats. The rest are counts."""

    auc: float
    log_loss: float
    samples: int
    positives: int


class ScoreCollector:
    """Collects the scores of an evaluation batch by batch: 5 bytes a sample."""

    def __init__(self) -> None:
        self._logits: list[Tensor] = []
        self._labels: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """One batch: logits float ``[B]`` (kept as float32), labels ``[B]`` of 0 and 1. Copies both."""
        _check_shapes(logits, labels)
        self._logits.append(logits.detach().to(device="cpu", dtype=torch.float32, copy=True))
        self._labels.append(_as_bool(labels))

    def packed(self) -> bytes:
        """Float32 ``[N, 2]``, logits and labels, for `evaluate_packed`."""
        if not self._logits:
            return b""
        pairs = torch.stack((torch.cat(self._logits), torch.cat(self._labels).float()), dim=1)
        return pairs.numpy().tobytes()

    def evaluate(self) -> Evaluation:
        """Of all samples so far."""
        if not self._logits:
            return evaluate_scores(torch.empty(0, device="cpu"), torch.empty(0, device="cpu"))
        return evaluate_scores(torch.cat(self._logits), torch.cat(self._labels))


def evaluate_packed(parts: Sequence[bytes]) -> Evaluation:
    """Of what several collectors packed."""
    pairs = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.float32).view(-1, 2)
    return evaluate_scores(pairs[:, 0].contiguous(), pairs[:, 1].contiguous())


def evaluate_scores(logits: Tensor, labels: Tensor) -> Evaluation:
    """AUC and log-loss of logits, float ``[N]``, against labels ``[N]`` of 0 and 1 (any dtype).

    Raises ValueError for other shapes or labels.
    """
    _check_shapes(logits, labels)
    clicked = _as_bool(labels)
    return Evaluation(
        auc=auc(logits, clicked),
        log_loss=log_loss(logits, clicked),
        samples=logits.numel(),
        positives=int(clicked.sum()),
    )


def auc(scores: Tensor, labels: Tensor) -> float:
    """The probability that a random positive's score exceeds a random negative's, a tie counting one half: exact.

    scores: ``[N]``, of any monotone scale (logits or probabilities). NaN if a class is missing or a score is NaN.
    """
    _check_shapes(scores, labels)
    values = _float64(scores)
    clicked = _as_bool(labels).numpy()
    num_positives = int(clicked.sum())
    num_negatives = clicked.size - num_positives
    if num_positives == 0 or num_negatives == 0 or np.isnan(values).any():
        return float("nan")
    order = np.argsort(values, kind="stable")
    values, clicked = values[order], clicked[order]
    # Groups of equal scores; all counts are integers, so no order of summation can matter.
    ends = np.flatnonzero(np.append(values[1:] != values[:-1], True)) + 1
    positives_up_to = np.cumsum(clicked, dtype=np.int64)[ends - 1]
    positives = np.diff(positives_up_to, prepend=0)
    negatives = np.diff(ends, prepend=0) - positives
    negatives_below = np.cumsum(negatives) - negatives
    # Fits 63 bits up to 4e9 samples; the product below is Python's, of any size.
    pairs_times_2 = int(positives @ (2 * negatives_below + negatives))
    return pairs_times_2 / (2 * num_positives * num_negatives)


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean binary cross-entropy in nats, from logits ``[N]``: finite for every finite logit, NaN for none."""
    _check_shapes(logits, labels)
    values = _float64(logits)
    if values.size == 0:
        return float("nan")
    # log(1 + exp(z)) of the margin z towards the wrong side, so that exp cannot overflow.
    margins = np.where(_as_bool(labels).numpy(), -values, values)
    return float((np.maximum(margins, 0.0) + np.log1p(np.exp(-np.abs(margins)))).mean())


def _check_shapes(scores: Tensor, labels: Tensor) -> None:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(f"scores and labels must be [N] both: {list(scores.shape)}, {list(labels.shape)}")


def _as_bool(labels: Tensor) -> Tensor:
    labels = labels.detach().cpu()
    if labels.dtype == torch.bool:
        return labels
    clicked = labels != 0
    if not torch.equal(clicked.to(labels.dtype), labels):
        raise ValueError("labels must be 0 or 1")
    return clicked


def _float64(scores: Tensor) -> _Array:
    return scores.detach().to(device="cpu", dtype=torch.float64).numpy()
