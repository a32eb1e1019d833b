"""What is written down comes back the same, to the bit; what cannot be is named; what is malformed is refused."""

import collections
import contextlib
import enum
import json
import math
import pickle
import random
import struct
import threading
import types
import typing

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import Corrupted, FormatMismatch, StateError
from holdfast.state.generators import rng_state, set_rng_state
from holdfast.state.state_tree import describe_tensors, flatten, layout, unflatten, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.uint16, torch.float8_e4m3fn]


def packed(tensors):
    """The tensors' bytes as the pool keeps them."""
    offsets, total = layout(tensors)
    out = bytearray(total)
    for tensor, offset in zip(tensors, offsets, strict=True):
        content = (
            tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy().tobytes()
            if tensor.numel()
            else b""
        )
        out[offset : offset + tensor.nbytes] = content
    return bytes(out)


def through_bytes(tree):
    structure, tensors = flatten(tree)
    return unpack(structure, packed(tensors))


def same(a, b):
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and packed([a]) == packed([b])
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def make_tensor(dtype, shape, seed):
    num_bytes = math.prod(shape) * dtype.itemsize
    content = bytearray(random.Random(seed).randbytes(num_bytes))
    if dtype == torch.bool:
        content = bytearray(byte & 1 for byte in content)
    tensor = torch.frombuffer(content, dtype=torch.uint8).view(dtype) if num_bytes else torch.empty(0, dtype=dtype)
    return tensor.reshape(shape)


TENSORS = st.builds(
    make_tensor, st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 9)
)
ARRAYS = st.builds(
    lambda dtype, shape: np.arange(math.prod(shape)).astype(dtype).reshape(shape),
    st.sampled_from(["<f4", ">f4", "<i8", "|b1", "<u2", "<M8[ns]", "<U3", "|S2", "<c8"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
DOUBLES = st.binary(min_size=8, max_size=8).map(lambda bits: struct.unpack("<d", bits)[0])
KEYS = st.text(max_size=3) | st.integers() | st.booleans() | st.none() | st.binary(max_size=2) | st.just("$tensor")
KEYS |= st.tuples(st.integers(), st.text(max_size=1))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | DOUBLES
    | st.text(max_size=5)
    | st.binary(max_size=100)
    | TENSORS
    | ARRAYS
    | st.sampled_from([*DTYPES, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]), torch.Size([])])
    | st.sampled_from([np.float64(math.pi), np.int32(-5), np.bool_(True), np.float16(0.1), np.datetime64(5, "s")])
)
TREES = st.recursive(
    LEAVES,
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), children, max_size=4)
        | st.dictionaries(KEYS, children, max_size=4)
    ),
    max_leaves=20,
)


@given(TREES)
def test_a_tree_comes_back_the_same(tree):
    structure, tensors = flatten(tree)
    assert same(unflatten(structure, tensors), tree)


@given(TREES)
def test_a_tree_comes_back_the_same_from_bytes_and_is_written_again_as_before(tree):
    structure, tensors = flatten(tree)
    content = packed(tensors)
    back = unpack(structure, content)
    assert same(back, tree)
    again, tensors_again = flatten(back)
    assert (again, packed(tensors_again)) == (structure, content)


@given(TREES)
def test_the_structure_is_ascii_json_that_describes_the_tensors(tree):
    structure, tensors = flatten(tree)
    document = json.loads(structure.decode("ascii"))
    assert [(name, tuple(shape)) for name, shape in document["tensors"]] == [
        (str(dtype).removeprefix("torch."), shape) for dtype, shape in describe_tensors(tensors)
    ]


@given(st.lists(TENSORS))
def test_tensors_lie_aligned_without_overlap(tensors):
    offsets, total = layout(tensors)
    assert all(offset % 64 == 0 for offset in offsets)
    end = 0
    for tensor, offset in zip(tensors, offsets, strict=True):
        assert end <= offset < end + 64
        end = offset + tensor.nbytes
    assert total == end


def test_a_tensor_that_occurs_twice_stays_one():
    shared = torch.ones(3)
    array = np.ones(3)[::-1]
    structure, tensors = flatten({"a": shared, "b": [shared, torch.ones(3)], "c": array, "d": array})
    assert len(tensors) == 3
    back = unpack(structure, packed(tensors))
    assert back["a"] is back["b"][0]
    assert back["a"] is not back["b"][1]
    assert back["c"] is back["d"]


def test_the_structure_stays_the_same_while_only_tensors_and_long_bytes_change():
    first = flatten({"w": torch.zeros(4), "rng": rng_state(), "long": bytes(100)})[0]
    random.random()
    torch.rand(3)
    assert flatten({"w": torch.ones(4), "rng": rng_state(), "long": bytes(range(100))})[0] == first


def test_special_dicts_become_dicts_in_order_and_counters_stay_counters():
    tree = {
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {3: [1]}),
        "counter": collections.Counter({30: 1, 80: 2}),
    }
    back = unflatten(*flatten(tree))
    assert same(back["ordered"], {"b": 1, "a": 2})
    assert same(back["default"], {3: [1]})
    assert same(back["counter"], tree["counter"])


def test_conjugate_views_are_written_as_the_values_they_show():
    tensor = torch.tensor([1 + 2j]).conj()
    assert through_bytes(tensor).tolist() == [1 - 2j]
    imaginary = torch.tensor([1 + 2j]).conj().imag
    assert imaginary.is_neg()
    assert through_bytes(imaginary).tolist() == [-2.0]


def test_unpacked_tensors_are_apart_from_the_bytes_and_can_be_written():
    structure, tensors = flatten([torch.ones(2), torch.ones(2)])
    content = packed(tensors)
    first, second = unpack(structure, content)
    first += 1
    assert second.tolist() == [1, 1]
    assert packed(tensors) == content


LR = torch.optim.lr_scheduler
OPTIMIZERS = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.1), amsgrad=True),
    lambda parameters: torch.optim.Adagrad(parameters),
    lambda parameters: torch.optim.RMSprop(parameters, centered=True),
]
SCHEDULERS = [
    lambda optimizer: LR.StepLR(optimizer, 2),
    lambda optimizer: LR.MultiStepLR(optimizer, [2, 2, 5]),
    lambda optimizer: LR.CosineAnnealingWarmRestarts(optimizer, 3),
    lambda optimizer: LR.ReduceLROnPlateau(optimizer),
    lambda optimizer: LR.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    lambda optimizer: LR.OneCycleLR(optimizer, 1.0, total_steps=9, cycle_momentum=False),
    lambda optimizer: LR.SequentialLR(optimizer, [LR.LinearLR(optimizer), LR.ExponentialLR(optimizer, 0.9)], [2]),
    lambda optimizer: LR.CyclicLR(optimizer, 0.1, 1.0, cycle_momentum=False),
]


@pytest.mark.parametrize("which", range(8))
def test_training_goes_on_to_the_bit_from_what_was_written_down(which):
    def make():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 1))
        optimizer = OPTIMIZERS[which % 4](model.parameters())
        return model, optimizer, SCHEDULERS[which](optimizer)

    def train(model, optimizer, scheduler):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 3)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step(*[loss.detach()] * isinstance(scheduler, LR.ReduceLROnPlateau))

    parts = make()
    train(*parts)
    structure, tensors = flatten([part.state_dict() for part in parts] + [rng_state()])
    content = packed(tensors)
    train(*parts)

    resumed = make()
    *states, rng = unpack(structure, content)
    for part, state in zip(resumed, states, strict=True):
        part.load_state_dict(state)
    set_rng_state(rng)
    train(*resumed)
    for mine, theirs in zip(resumed[0].state_dict().values(), parts[0].state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


class Colour(enum.IntEnum):
    RED = 1


class Pair(typing.NamedTuple):
    a: int
    b: int


class Wrapping(torch.Tensor):
    """As DTensor and torchao's quantized tensors: it has a shape, and what it stands for is elsewhere."""

    @staticmethod
    def __new__(cls, size: int) -> typing.Self:
        wrapping: typing.Self = torch.Tensor._make_wrapper_subclass(cls, (size,))
        return wrapping

    @classmethod
    def __torch_dispatch__(cls, *called: typing.Any, **named: typing.Any) -> typing.Any:
        raise NotImplementedError

    def __repr__(self, **named: typing.Any) -> str:
        return "Wrapping"


def freed() -> torch.Tensor:
    """As FSDP frees a parameter between two forward passes."""
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"schedulers[0]": {"lr_lambdas": [lambda epoch: epoch]}}, r"^schedulers\[0\]\.lr_lambdas\[0\]: a function "),
        ({"a": {"b c": {3: print}}}, r"^a\['b c'\]\[3\]: a function \(print\) cannot be written down; leave it out"),
        ({"extra": (math,)}, r"^extra\[0\]: the module math cannot"),
        ([Colour.RED], r"^\[0\]: the enum member .*keep its value \(1\)"),
        ({"p": Pair(1, 2)}, r"^p: a .*Pair would come back as a plain tuple"),
        ({"t": nn.Linear}, r"^t: the class Linear"),
        ({"g": random.SystemRandom()}, r"^g: a SystemRandom has no state .*use a random\.Random"),
        ({"g": np.random.PCG64(1)}, r"^g: a .*PCG64 cannot be written down; keep the numpy\.random\.Generator that"),
        ({"g": torch.Generator()}, r"^g: a Generator inside another value .*extra by its own name"),
        ({"m": nn.Linear(1, 1)}, r"^m: .*Linear cannot be written down; keep its state_dict\(\)"),
        ({"x": threading.Event()}, r"^x: a threading\.Event cannot"),
        ({"x": {1, 2}}, r"^x: a builtins\.set cannot"),
        ({"x": 1j}, r"^x: a builtins\.complex cannot"),
        ({"x": torch.eye(2).to_sparse()}, r"^x: a tensor of .*sparse.* cannot"),
        ({"x": torch.empty(2, device="meta")}, r"^x: a tensor of .* on meta cannot"),
        (
            {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)},
            r"^x: a NestedTensor of dtype torch.float32, layout nested on cpu cannot",
        ),
        ({"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, r"^x: a tensor .*layout nested .* cannot"),
        ({"x": Wrapping(3)}, r"^x: a Wrapping of .* cannot"),
        ({"x": freed()}, r"^x: a tensor of .* cannot be written down; only dense tensors with memory of their own"),
        ({"x": np.array([object()])}, r"^x: a numpy value of dtype object cannot"),
        ({"x": np.zeros(1, dtype=[("a", "i4")])}, r"^x: a numpy value of dtype"),
        ({"x": np.ma.array([1])}, r"^x: a numpy.*MaskedArray cannot"),
        (types.SimpleNamespace(), r"^the state: a types\.SimpleNamespace"),
    ],
)
def test_what_cannot_be_written_down_is_named_with_its_place(tree, message):
    with pytest.raises(StateError, match=message):
        flatten(tree)


def test_an_open_file_is_refused(tmp_path):
    with (tmp_path / "x").open("w") as file, pytest.raises(StateError, match=r"^log: an open file cannot"):
        flatten({"log": file})


def test_a_tree_that_contains_itself_is_refused():
    tree = []
    tree.append(tree)
    with pytest.raises(StateError, match="contains itself"):
        flatten(tree)


def document(tree, tensors=(), version=1):
    return json.dumps({"format": version, "tensors": list(tensors), "tree": tree}).encode()


@pytest.mark.parametrize(
    "structure",
    [
        b"",
        b"\xff",
        b"null",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"format":1,"tensors":[],"tree":' + b"[" * 3000 + b"]" * 3000 + b"}",
        b'{"format":1,"tensors":[],"tree":NaN}',
        b'{"format":1,"tensors":[],"tree":{"a":1,"a":2}}',
        b'{"format":1,"tensors":[],"tree":' + b"9" * 5000 + b"}",
        b'{"format":1,"tensors":[]}',
        b'{"format":1,"tensors":{},"tree":1}',
        b'{"format":1,"tensors":[],"tree":1,"more":1}',
        document({"$tensor": 0}),
        document({"$tensor": -1}),
        document({"$tensor": True}),
        document({"$tensor": "0"}),
        document({"$array": 7}),
        document({"$bytes": 7}),
        document({"$bytes": "%%"}),
        document({"$float": "7ff"}),
        document({"$float": 1}),
        document({"$int": "zz"}),
        document({"$int": 5}),
        document({"$tuple": 5}),
        document({"$tuple": {"0": 1}}),
        document({"$dict": [[1]]}),
        document({"$dict": [[[], 1]]}),
        document({"$dict": [[1, 1], [1, 2]]}),
        document({"$counter": 1}),
        document({"$size": [-1]}),
        document({"$size": ["1"]}),
        document({"$size": [2**62, 2**62]}),
        document({"$dtype": "load"}),
        document({"$dtype": []}),
        document({"$device": "nowhere"}),
        document({"$device": 0}),
        document({"$array": ["O", [1], {"$bytes": "AAAAAAAAAAA="}]}),
        document({"$array": ["<f4", [2], {"$bytes": "AAAA"}]}),
        document({"$array": ["<f4", [1]]}),
        document({"$array": ["<f4,<f4", [1], {"$bytes": "AAAAAAAAAAA="}]}),
        document({"$array": ["(2,)<f4", [1], {"$bytes": "AAAAAAAAAAA="}]}),
        document({"$array": ["<U0", [2**40], {"$bytes": ""}]}),
        document({"$scalar": ["<f4", 5]}),
        document({"$scalar": ["__import__('os')", "AAAA"]}),
        document({"$pickle": "gASVAAAA"}),
        document({"$a": 1, "$b": 2}),
        document(None, [["float32"]]),
        document(None, [["float33", [1]]]),
        document(None, [["float32", [-1]]]),
        document(None, [["float32", [2**40, 2**40]]]),
        document(None, [["float32", [0, 2**62]]]),
        document(None, [["float32", [1.0]]]),
        document(None, [["float32", [1]]]),
    ],
)
def test_a_malformed_structure_is_corrupted(structure):
    with pytest.raises(Corrupted, match=r"^state: "):
        unpack(structure, b"")


def test_the_order_of_dimensions_in_memory_comes_back_where_it_is_asked_for():
    turned, last, gaps = (
        torch.arange(6.0).view(2, 3).T,
        torch.rand(2, 3, 4, 5).permute(0, 2, 3, 1),
        torch.rand(4, 6)[:, ::2],
    )
    tree = {"turned": turned, "again": [turned], "last": last, "gaps": gaps, "wide": torch.zeros(3, 1).expand(3, 2)}
    structure, tensors = flatten(tree, ordered=True)
    found = unpack(structure, packed(tensors))
    assert same(found, tree)
    assert found["again"][0] is found["turned"]
    assert [found[name].stride() for name in ("turned", "last")] == [turned.stride(), last.stride()]
    assert found["gaps"].is_contiguous()
    assert flatten(found)[0] == flatten(tree)[0]
    for body, words in (([0, [0, 0]], "no order"), ([0, [1]], "no order"), ([0, "10"], "no order"), ([9, [0, 1]], "9")):
        with pytest.raises(Corrupted, match=words):
            unflatten(document({"$ordered": body}, [["float32", [3, 2]]]), [torch.zeros(3, 2)])


def test_a_later_format_is_told_apart_from_a_corrupted_one():
    with pytest.raises(FormatMismatch, match="format 2; this build knows 1"):
        unpack(document(None, version=2), b"")


def test_tensors_that_do_not_fit_the_structure_are_refused():
    structure, _ = flatten([torch.zeros(2), torch.zeros(3)])
    for tensors in ([], [torch.zeros(2)], [torch.zeros(2), torch.zeros(4)], [torch.zeros(2), torch.zeros(3).int()]):
        with pytest.raises(Corrupted, match=r"^state: "):
            unflatten(structure, tensors)
    with pytest.raises(Corrupted, match="should have 76 bytes, there are 75"):
        unpack(structure, bytes(75))


@given(st.data())
@settings(max_examples=300)
def test_a_damaged_structure_is_read_or_refused_and_nothing_else(data):
    structure, tensors = flatten(
        {"a": [1, 2.5, (None, b"x")], 3: {"w": torch.ones(2), "n": np.float32(1)}, "d": torch.float32, "x": bytes(99)}
    )
    damaged = bytearray(structure)
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0123456789[]{}",:$')))
    with contextlib.suppress(Corrupted, FormatMismatch):
        unflatten(bytes(damaged), tensors)


def test_a_pickle_is_not_read():
    with pytest.raises(Corrupted):
        unpack(pickle.dumps({"a": 1}), b"")


def test_random_streams_go_on_where_they_were():
    np.random.seed(1)  # noqa: NPY002
    random.gauss(0, 1)
    tree = through_bytes(rng_state())

    def draw():
        return torch.rand(3).tolist(), torch.randn(20).tolist(), random.random(), random.gauss(0, 1), np.random.rand()  # noqa: NPY002

    first = draw()
    set_rng_state(tree)
    assert draw() == first


@pytest.mark.parametrize("damage", [{"torch": torch.zeros(3)}, {"python": None}, {"python": {}}, {"numpy": {"key": 1}}])
def test_a_state_that_is_none_of_the_generators_is_refused(damage):
    with pytest.raises(StateError, match="random number generators"):
        set_rng_state(rng_state() | damage)
    with pytest.raises(StateError, match="random number generators"):
        set_rng_state({})


def test_cuda_states_without_the_devices_are_left_out_with_a_warning():
    num_devices = torch.cuda.device_count()
    with pytest.warns(UserWarning, match="CUDA devices"):
        set_rng_state(rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * (num_devices + 1)})
