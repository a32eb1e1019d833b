"""What autograd may ask of a lookup: gradients of the weights alone, transforms of it, a gradient in a buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holdfast import SGD, DeviceConfig, EmbeddingBagCollection, Pool, RowWiseAdagrad, clip_grad_norm_
from holdfast.data.batch import JaggedFeatures
from holdfast.errors import StepError
from row_reference import Bags
from twin import Twin, jagged, random_bags, random_weights, same_bits, table

TABLES = [table("t", ["a", "b"]), table("u", ["c"], dim=19, pooling="mean")]


def bags_of(seed: int) -> Bags:
    return random_bags("abc", 20, 5, seed)


def test_the_gradient_of_weights_alone_leaves_the_rows_without_one(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)
        ragged = jagged(bags, weights := random_weights(bags, seed=2))
        of_ids = ragged.weights_or_none().requires_grad_()
        loss = (twin.emb(ragged).values() * coefficients).sum()
        (alone,) = torch.autograd.grad(loss, of_ids, retain_graph=True)
        assert twin.emb.gradient_norm() == 0
        loss.backward()
        assert torch.equal(of_ids.grad, alone)
        assert of_ids.grad.abs().max() > 0
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients, weights))
        twin.check()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_the_gradient_of_weights_is_not_differentiated_again_and_says_so(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        ragged = jagged(bags_of(1), random_weights(bags_of(1), seed=2))
        of_ids = ragged.weights_or_none().requires_grad_()
        loss = twin.emb(ragged).values().square().sum()
        loss.backward(create_graph=True)
        assert of_ids.grad.abs().max() > 0
        with pytest.raises(StepError, match="gradient of per-sample weights is not differentiated again"):
            of_ids.grad.sum().backward()


def test_transforms_of_torch_func_are_refused_by_name_where_they_would_reach_rows(pool_root: Path):
    head = nn.Linear(8 + 8 + 19, 1)
    parameters = {name: parameter.detach() for name, parameter in head.named_parameters()}
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        ragged = jagged(bags_of(1))

        def loss_of(values: dict[str, Tensor], vectors: Tensor | None = None) -> Tensor:
            vectors = twin.emb(ragged).values() if vectors is None else vectors
            return torch.func.functional_call(head, values, (vectors,)).square().mean()

        transformed = [
            lambda: torch.func.grad(loss_of)(parameters),
            lambda: torch.func.jacrev(loss_of)(parameters),
            lambda: torch.func.jvp(loss_of, (parameters,), (parameters,)),
            lambda: torch.func.vmap(lambda factor: factor * twin.emb(ragged).values())(torch.arange(3.0)),
        ]
        for call in transformed:
            with pytest.raises(StepError, match="look them up outside and give the function their vectors"):
                call()

        # What the message says to do gives rows the gradient of the plain backward.
        vectors = twin.emb(ragged).values()
        _, gradient = torch.func.grad(loss_of, argnums=(0, 1))(parameters, vectors)
        (plain,) = torch.autograd.grad(loss_of(dict(head.named_parameters()), vectors), vectors, retain_graph=True)
        torch.testing.assert_close(gradient, plain)
        vectors.backward(gradient)
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags_of(1), gradient))
        twin.check()


def test_several_gradients_at_once_and_forward_mode_are_refused_by_name(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        ragged = jagged(bags_of(1), random_weights(bags_of(1), seed=2))
        of_ids = ragged.weights_or_none().requires_grad_()
        vectors = twin.emb(ragged).values()
        several = torch.ones(3, *vectors.shape)
        with pytest.raises(StepError, match="rows take one at a time"):
            torch.autograd.grad(vectors, of_ids, several, is_grads_batched=True, retain_graph=True)
        with pytest.raises(StepError, match="rows take one at a time"):
            torch.func.vmap(lambda one: torch.autograd.grad(vectors, of_ids, one, retain_graph=True)[0])(several)
        assert twin.emb.gradient_norm() == 0
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(of_ids.detach(), torch.ones_like(of_ids))
            with pytest.raises(StepError, match="no forward-mode derivative"):
                twin.emb(JaggedFeatures(ragged.keys(), ragged.values(), ragged.offsets(), dual))


def test_pooled_vectors_with_weights_to_learn_may_be_changed_in_place(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        bags = bags_of(1)
        ragged = jagged(bags, weights := random_weights(bags, seed=2))
        ragged.weights_or_none().requires_grad_()
        pooled = twin.emb(ragged)
        pooled["a"].mul_(2.0)
        pooled.values().sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        gradient = torch.cat([torch.full((5, 8), 2.0), torch.ones(5, 8 + 19)], dim=1)
        twin.update(twin.gradients(bags, gradient, weights))
        twin.check()


@pytest.mark.parametrize("ways", ["near_memory", "scratchpad"])
def test_a_gradient_that_is_written_over_before_the_rows_have_it_is_refused(pool_root: Path, ways: Any):
    """A buffer that is used again: rows would be updated with what is in it then."""
    with Pool(pool_root / "pool", seed=1) as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=1.0), device=DeviceConfig(rows=ways))
        before, buffer = rows.read(0, torch.arange(20)), torch.ones(5, rows.output_width)
        pooled = rows(jagged(bags_of(1))).values()
        pooled.backward(buffer, retain_graph=True)
        buffer.zero_()
        with pytest.raises(StepError, match=r"changed in place after its backward.*gradient.clone\(\)"):
            rows.optimizer.step()
        rows.optimizer.zero_grad()
        pooled.backward(buffer.fill_(1.0).clone())
        buffer.zero_()
        rows.optimizer.step()
        pool.commit(1)
        times = torch.bincount(torch.tensor([i for f in "ab" for bag in bags_of(1)[f] for i in bag]), minlength=20)
        torch.testing.assert_close(before - rows.read(0, torch.arange(20)), times[:, None].expand(-1, 8).float())


def test_a_backward_after_the_gradients_were_clipped_is_refused_until_these_are_dropped(pool_root: Path):
    """What clipping multiplied the first gradients with would be the factor of the later ones, too."""
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)

        def backward() -> None:
            (twin.emb(jagged(bags)).values() * coefficients).sum().backward()

        backward()
        clip_grad_norm_([], twin.emb, max_norm=1e9)  # which leaves them as they are
        backward()
        clip_grad_norm_([], twin.emb, max_norm=0.01)
        with pytest.raises(StepError, match="once, after the last backward pass"):
            backward()
        twin.emb.optimizer.zero_grad()
        backward()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients))
        twin.check()


def test_what_is_added_to_the_gradients_of_rows_is_refused_and_may_be_added_to_those_of_vectors(pool_root: Path):
    """What stands for them is their factor: noise of 0.1 made every row's gradient 1.1 times as large."""
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)
        vectors = twin.emb(jagged(bags)).values()
        vectors.register_hook(lambda gradient: gradient + 0.5)
        (vectors * coefficients).sum().backward()
        (parameter,) = twin.emb.optimizer.param_groups[0]["params"]
        additions = [
            lambda: parameter.grad.add_(0.1),
            lambda: parameter.grad + 0.1,
            lambda: parameter.grad - parameter.grad.mean(),
            lambda: torch._foreach_add_([parameter.grad], 0.1),
        ]
        for add in additions:
            with pytest.raises(StepError, match="nothing be added to them"):
                add()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients + 0.5))
        twin.check()


def test_gradients_of_rows_that_are_set_to_none_are_dropped(pool_root: Path):
    """As of any parameter: the next ones had a factor of 0, and rows stayed as they were."""
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)
        twin.emb(jagged(bags_of(2))).values().sum().backward()
        for parameter in twin.emb.optimizer.param_groups[0]["params"]:
            parameter.grad = None
        assert twin.emb.gradient_norm() == 0
        (twin.emb(jagged(bags)).values() * coefficients).sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients))
        twin.check()


def test_how_the_processor_takes_subnormal_numbers_changes_no_bit(pool_root: Path):
    """A weight over the length of its bag may be one: it must not vanish because of who planned the batch."""
    rows = []
    for flushed in (False, True):
        with Pool(pool_root / f"flushed {flushed}", medium="memory") as pool:
            emb = EmbeddingBagCollection(pool, [table("t", ["f"], pooling="mean")], optimizer=SGD(lr=1.0))
            assert torch.set_flush_denormal(flushed)
            try:
                vectors = emb(jagged({"f": [[1, 2]]}, {"f": [[1.2e-38, -1.2e-38]]})).values()
                vectors.backward(torch.full_like(vectors, 1e38))
                emb.optimizer.step()
            finally:
                torch.set_flush_denormal(False)
            pool.commit(1)
            rows.append(emb.read(0, torch.tensor([1, 2])))
    assert same_bits(*rows)
    assert abs(float(rows[0][0, 0]) - float(rows[0][1, 0])) > 0.5  # they had gradients
