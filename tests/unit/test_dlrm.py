"""DLRM computes what facebookresearch/dlrm computes, by faster ways whose gradients are exact."""

import math

import pytest
import torch
from torch import nn

from holdfast.models import DLRM
from holdfast.models import dlrm as module


class Pooled(nn.Module):
    """Stands in for embeddings: what comes in is pooled already."""

    def forward(self, sparse):
        return sparse


def make(**changes):
    sizes = {"num_dense": 5, "embedding_dim": 4, "num_features": 3, "bottom": [8, 4], "top": [6, 1]} | changes
    return DLRM(embeddings=Pooled(), **sizes)


def inputs(batch_size=7, num_dense=5, width=12, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    dense = torch.randn(batch_size, num_dense, generator=generator).to(dtype)
    return dense, torch.randn(batch_size, width, generator=generator).to(dtype).requires_grad_()


def reference(model, dense, pooled):
    """facebookresearch/dlrm's interact_features (arch_interaction_itself off), written as it is there."""

    def mlp(layers, x):
        for layer in layers:
            x = nn.functional.linear(x, layer.weight, layer.bias)
            x = torch.relu(x) if layer.relu else x
        return x

    x = mlp(model.bottom, dense)
    batch_size, dim = x.shape
    if model.interaction == "dot":
        vectors = torch.cat([x, pooled], dim=1).view((batch_size, -1, dim))
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        num_vectors = vectors.shape[1]
        rows = [i for i in range(num_vectors) for j in range(i)]
        columns = [j for i in range(num_vectors) for j in range(i)]
        x = torch.cat([x, products[:, rows, columns]], dim=1)
    else:
        x = torch.cat([x, pooled], dim=1)
    return mlp(model.top, x).squeeze(1)


def gradients(model, logits, pooled):
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype)
    return torch.autograd.grad((logits * weights).sum(), [pooled, *model.parameters()])


@pytest.mark.parametrize("interaction", ["dot", "concat"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_logits_and_gradients_are_those_of_the_reference(interaction, dtype, tolerance):
    model = make(interaction=interaction).to(dtype)
    dense, pooled = inputs(dtype=dtype)
    logits, expected = model(dense, pooled), reference(model, dense, pooled)
    assert logits.shape == (7,)
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)
    got = gradients(model, logits, pooled)
    for mine, theirs in zip(got, gradients(model, expected, pooled), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [{"num_dense": 70, "bottom": [8, 4]}, {"num_dense": 3, "bottom": [64, 4]}])
def test_both_orders_of_the_weight_gradient_are_those_of_the_reference(sizes):
    model = make(**sizes)
    dense, pooled = inputs(num_dense=sizes["num_dense"])
    got = gradients(model, model(dense, pooled), pooled)
    for mine, theirs in zip(got, gradients(model, reference(model, dense, pooled), pooled), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        assert mine.is_contiguous() or mine is got[0]


@pytest.mark.parametrize("x_width", [3, 0])
def test_the_dot_interaction_has_the_gradient_that_finite_differences_give(x_width):
    lower, symmetric = module._pair_indices(4 if x_width else 3, x_width)
    x = torch.randn(2, x_width, dtype=torch.float64, requires_grad=x_width > 0)
    pooled = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, p: module._DotInteraction.apply(x, p, lower, symmetric, 3), (x, pooled))


@pytest.mark.parametrize("interaction", ["dot", "concat"])
@pytest.mark.parametrize("bf16", [False, True])
def test_without_dense_columns_the_embeddings_interact_among_themselves(interaction, bf16):
    model = make(num_dense=0, bottom=[], interaction=interaction)
    dense, pooled = inputs(num_dense=0)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(dense, pooled)
    a, b, c = pooled.view(7, 3, 4).unbind(1)
    pairs = torch.stack([(b * a).sum(1), (c * a).sum(1), (c * b).sum(1)], dim=1)
    expected = nn.Sequential(model.top)(pairs if interaction == "dot" else pooled).squeeze(1)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if bf16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(logits.float(), expected, **tolerance)
    mine, theirs = (torch.autograd.grad(y.float().sum(), pooled)[0] for y in (logits, expected))
    torch.testing.assert_close(mine, theirs, **tolerance)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [({"num_dense": 0}, "must be empty"), ({"num_dense": 0, "bottom": [], "num_features": 1}, "two vectors")],
)
def test_sizes_that_do_not_fit_data_without_dense_columns_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        make(**sizes)


@pytest.mark.parametrize("interaction", ["dot", "concat"])
def test_bfloat16_autocast_stays_near_float32(interaction):
    model = make(interaction=interaction)
    dense, pooled = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(dense, pooled)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), model(dense, pooled), rtol=0.1, atol=0.1)
    got = gradients(model, logits.float(), pooled)
    assert [gradient.dtype for gradient in got] == [torch.float32] * len(got)
    for mine, theirs in zip(got, gradients(model, model(dense, pooled), pooled), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)


def test_a_build_without_the_onednn_operator_computes_the_same(monkeypatch):
    model = make()
    dense, pooled = inputs()
    monkeypatch.setattr(module, "_LEAST_WORK_FOR_ONEDNN", 0)
    fast = model(dense, pooled)
    fast_gradients = gradients(model, fast, pooled)
    monkeypatch.setattr(module, "_HAS_ONEDNN_LINEAR", False)
    plain = model(dense, pooled)
    torch.testing.assert_close(fast, plain)
    for mine, theirs in zip(fast_gradients, gradients(model, plain, pooled), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("processor", "onednn"),
    [
        (["AuthenticAMD", "26"], [(13, 512), (512, 256), (128, 64)]),
        (["AuthenticAMD", "25"], [(13, 512), (512, 256)]),
        (["GenuineIntel", "6"], []),
        ([], []),  # as on ARM
    ],
)
def test_onednn_takes_the_layers_that_it_is_faster_at(processor, onednn, monkeypatch, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    lines = [f"{name}\t: {value}\n" for name, value in zip(["vendor_id", "cpu family"], processor, strict=False)]
    cpuinfo.write_text("processor\t: 0\n" + "".join(lines) + "\nprocessor\t: 1\n")
    monkeypatch.setattr(module, "_LEAST_WORK_FOR_ONEDNN", module._least_work_for_onednn(cpuinfo))
    taken = []
    monkeypatch.setattr(module, "_HAS_ONEDNN_LINEAR", True)
    monkeypatch.setattr(module._OneDnnLayer, "apply", lambda x, weight, *_: taken.append((x.shape[1], len(weight))))
    for num_inputs, num_outputs in [(13, 512), (512, 256), (128, 64), (64, 16), (64, 1)]:
        module._Layer(num_inputs, num_outputs, relu=False)(torch.ones(4, num_inputs))
    assert taken == onednn


def test_a_machine_that_says_nothing_of_its_processor_uses_mkl(tmp_path):
    assert module._least_work_for_onednn(tmp_path / "missing") == math.inf


def test_embeddings_may_give_an_object_with_values():
    class Keyed(nn.Module):
        def forward(self, sparse):
            class KeyedTensor:
                def values(self):
                    return sparse

            return KeyedTensor()

    model = make()
    dense, pooled = inputs()
    expected = model(dense, pooled)
    model.embeddings = Keyed()
    assert torch.equal(model(dense, pooled), expected)


def test_steps_are_deterministic():
    model = make()
    dense, pooled = inputs(batch_size=513)
    first = gradients(model, model(dense, pooled), pooled)
    for _ in range(5):
        again = gradients(model, model(dense, pooled), pooled)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_weights_start_with_the_spread_of_the_reference():
    torch.manual_seed(0)
    model = make(bottom=[400, 300, 4])
    weight, bias = model.bottom[1].weight.detach(), model.bottom[1].bias.detach()
    assert float(weight.std()) == pytest.approx(math.sqrt(2 / 700), rel=0.02)
    assert float(bias.std()) == pytest.approx(math.sqrt(1 / 300), rel=0.15)


def test_the_state_dict_holds_weights_and_nothing_else():
    assert list(make().state_dict()) == [
        f"{mlp}.{layer}.{name}" for mlp in ("bottom", "top") for layer in (0, 1) for name in ("weight", "bias")
    ]


def test_inference_and_empty_batches_work():
    model = make()
    with torch.no_grad():
        assert model(*inputs()).requires_grad is False
    dense, pooled = inputs(batch_size=0)
    logits = model(dense, pooled)
    assert logits.shape == (0,)
    assert all(not gradient.any() for gradient in gradients(model, logits, pooled))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bottom": [8, 5]}, r"last size of bottom must equal embedding_dim.*bottom=\[8, 5\], embedding_dim=4"),
        ({"bottom": []}, "last size of bottom must equal embedding_dim"),
        ({"top": [4, 2]}, "last size of top must be 1"),
        ({"interaction": "sum"}, "interaction must be"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)
