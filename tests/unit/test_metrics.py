"""AUC and log-loss against their definitions."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.metrics import ScoreCollector, auc, evaluate_scores, log_loss

SCORED = st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=1, max_size=40)


def tensors(scored):
    scores, labels = zip(*scored, strict=True)
    return torch.tensor(scores, dtype=torch.float32), torch.tensor(labels, dtype=torch.float32)


@given(SCORED)
def test_auc_is_the_share_of_pairs_in_order_with_ties_counting_half(scored):
    positives = [score for score, clicked in scored if clicked]
    negatives = [score for score, clicked in scored if not clicked]
    got = auc(*tensors(scored))
    if not positives or not negatives:
        assert math.isnan(got)
    else:
        twice = sum(2 * (p > n) + (p == n) for p in positives for n in negatives)
        assert got == twice / (2 * len(positives) * len(negatives))


@given(SCORED, st.randoms())
def test_auc_does_not_depend_on_the_order_of_samples(scored, random):
    before = auc(*tensors(scored))
    random.shuffle(scored)
    after = auc(*tensors(scored))
    assert before == after or (math.isnan(before) and math.isnan(after))


@given(SCORED)
def test_log_loss_is_mean_binary_cross_entropy(scored):
    logits, labels = tensors(scored)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double())
    assert log_loss(logits, labels) == pytest.approx(float(expected), rel=1e-12)


def test_log_loss_of_an_extreme_logit_is_its_margin_not_infinity():
    assert log_loss(torch.tensor([-1e6, 1e6]), torch.tensor([1.0, 0.0])) == 1e6
    assert log_loss(torch.tensor([-1e6, 1e6]), torch.tensor([0.0, 1.0])) == 0.0


def test_a_nan_score_makes_both_metrics_nan():
    logits, labels = torch.tensor([0.0, math.nan]), torch.tensor([0, 1])
    assert math.isnan(auc(logits, labels))
    assert math.isnan(log_loss(logits, labels))


def test_scores_that_collapse_in_float32_are_told_apart_in_float64():
    scores = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
    assert auc(scores, torch.tensor([0, 1])) == 1.0


def test_a_collection_of_batches_equals_the_whole():
    logits, labels = torch.randn(1000), (torch.rand(1000) > 0.7).float()
    collector = ScoreCollector()
    for start in range(0, 1000, 128):
        collector.add(logits[start : start + 128], labels[start : start + 128])
    assert collector.evaluate() == evaluate_scores(logits, labels)
    assert collector.evaluate().positives == int(labels.sum())


def test_an_empty_evaluation_has_no_numbers():
    evaluation = ScoreCollector().evaluate()
    assert evaluation.samples == 0
    assert math.isnan(evaluation.auc)
    assert math.isnan(evaluation.log_loss)


def test_bfloat16_logits_and_bool_labels_are_taken():
    assert auc(torch.tensor([0.5, -0.5], dtype=torch.bfloat16), torch.tensor([True, False])) == 1.0


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        (torch.zeros(3), torch.zeros(2)),
        (torch.zeros(3, 1), torch.zeros(3, 1)),
        (torch.zeros(2), torch.tensor([0.0, 0.5])),
        (torch.zeros(2), torch.tensor([0.0, math.nan])),
        (torch.zeros(2), torch.tensor([-1, 1])),
    ],
)
def test_other_shapes_and_labels_are_refused(scores, labels):
    with pytest.raises(ValueError, match=r"must be"):
        evaluate_scores(scores, labels)
