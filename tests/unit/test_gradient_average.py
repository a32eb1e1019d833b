"""Averaging keeps its buffers, and nothing of a caller's lies in them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import ConfigError
from holdfast.group.gradients import GradientAverage


class TwoAlike:
    """A group whose other trainer has what this one has."""

    num_trainers = 2

    def device_of_sums(self, device: torch.device) -> torch.device:
        return torch.device("cpu")

    def sum_over_trainers(self, values: Tensor, what: str) -> TwoAlike:
        values.mul_(2)
        return self

    def wait(self) -> None:
        pass


def with_gradients(*sizes: int, seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


def test_models_that_are_averaged_one_after_the_other_keep_their_gradients() -> None:
    average = GradientAverage(TwoAlike())  # type: ignore[arg-type]
    first, larger, last = (with_gradients(*sizes, seed=n) for n, sizes in enumerate([(5, 3), (5, 30), (8,)]))
    expected = [[p.grad.clone() for p in model] for model in (first, larger, last)]
    places = [[p.grad.data_ptr() for p in model] for model in (first, larger, last)]
    anchor = with_gradients(1, seed=9)[0]
    for model in (first, larger, last):
        beside = torch.tensor([3.0, 4.0])
        average.take(model, [anchor], beside)
        assert beside.tolist() == [3.0, 4.0]
    for model, gradients, where in zip((first, larger, last), expected, places, strict=True):
        assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model, gradients, strict=True))
        assert [p.grad.data_ptr() for p in model] == where


def test_gradients_that_are_added_to_after_an_average_are_averaged_again() -> None:
    """As in a loop that sets them to zero in place, or accumulates on."""
    average = GradientAverage(TwoAlike())  # type: ignore[arg-type]
    model = with_gradients(4, 2, seed=1)
    anchor = with_gradients(1, seed=9)[0]
    once = [p.grad.clone() for p in model]
    average.take(model, [anchor])
    for parameter in model:
        parameter.grad += 1
    average.take(iter(model), [anchor])
    assert all(torch.equal(p.grad, gradient + 1) for p, gradient in zip(model, once, strict=True))


def test_what_has_no_gradient_anywhere_gets_none_and_frozen_parameters_are_left_alone() -> None:
    average = GradientAverage(TwoAlike())  # type: ignore[arg-type]
    used, unused, frozen = with_gradients(3, 3, 3, seed=2)
    unused.grad = None
    frozen.requires_grad_(False)
    kept = frozen.grad
    average.take([used, unused, frozen], [with_gradients(1, seed=9)[0]])
    assert unused.grad is None and frozen.grad is kept and used.grad is not None


def test_a_sparse_gradient_is_refused_by_the_name_of_its_parameter() -> None:
    average = GradientAverage(TwoAlike())  # type: ignore[arg-type]
    model = nn.ModuleDict({"dense": nn.Linear(2, 1), "place": nn.Embedding(5, 2, sparse=True)})
    model["dense"](model["place"](torch.tensor([1, 3]))).sum().backward()
    before = model["dense"].weight.grad.clone()
    for parameters, name in ((model, "'place.weight'"), (model.parameters(), r"of \(5, 2\)")):
        with pytest.raises(ConfigError, match=f"the gradient of parameter {name} is sparse"):
            average.take(parameters, [])
    assert torch.equal(model["dense"].weight.grad, before)
