"""DensePart: the bits of the loop's own step, whatever runs it; and recordings that change nothing but who launches.

Recordings are replayed by calling here, so what holds on the CPU is everything but CUDA's own part of it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from holdfast.device.compiling import refuse_autotuning
from holdfast.errors import ConfigError
from holdfast.models.dlrm import DLRM
from holdfast.rows.row_access import LookedUp
from holdfast.train.dense_part import DenseOptions, DensePart, OnePart, in_parts

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
BATCH_SIZE = 32
SIZES = [32, 32, 32, 9, 32, 32]  # of batches; the fourth is the last of an epoch

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


class CallingRecorder:
    """Replays by calling. Counts, and like CUDA's does nothing when it records."""

    def __init__(self) -> None:
        self.warm_ups = self.recordings = self.replays = 0

    def warm_up(self, work: Callable[[], None]) -> None:
        self.warm_ups += 1
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def make_model(bottom: Sequence[int] = (16, 8), top: Sequence[int] = (24, 16, 1)) -> DLRM:
    torch.manual_seed(7)
    return DLRM(embeddings=nn.Identity(), num_dense=5, embedding_dim=8, num_features=3, bottom=bottom, top=top)


def batches(sizes: list[int] = SIZES) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each batch dense, labels and pooled."""
    generator = torch.Generator().manual_seed(11)
    return [
        (
            torch.randn(size, 5, generator=generator),
            torch.randint(0, 2, (size,), generator=generator).float(),
            torch.randn(size, 24, generator=generator),
        )
        for size in sizes
    ]


class Outcome:
    """What a training saw, in bits: losses, gradients of pooled, parameters and optimizer state."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def see(self, *tensors: Tensor | None) -> None:
        self.parts += [torch.zeros(0) if tensor is None else tensor.detach().clone() for tensor in tensors]

    def end(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Outcome:
        state = optimizer.state_dict()["state"]
        self.see(*model.state_dict().values())
        self.see(*(value for item in state.values() for value in item.values() if isinstance(value, Tensor)))
        return self

    def digest(self) -> str:
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(f"{part.dtype} {tuple(part.shape)}".encode())
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes() if part.dim() else repr(part).encode())
        return digest.hexdigest()


def as_the_loop_did(optimizer_name: str, *, bf16: bool = False, schedule: bool = False, clip: bool = False) -> Outcome:
    """The statements that `Trainer` had before there was a DensePart."""
    model, outcome = make_model(), Outcome()
    optimizer = OPTIMIZERS[optimizer_name](list(model.parameters()))
    for number, (dense, labels, pooled) in enumerate(batches()):
        pooled.requires_grad_()
        if schedule:
            optimizer.param_groups[0]["lr"] = lr_of(number)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model.from_pooled(dense, pooled)
        loss = nn.BCEWithLogitsLoss()(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        outcome.see(loss, pooled.grad)
    return outcome.end(model, optimizer)


def lr_of(step: int) -> float:
    return (0.1, 0.1, 0.05, 0.05, 0.02, 0.02)[step]


def by_dense_part(
    optimizer_name: str,
    options: DenseOptions,
    *,
    recorder: CallingRecorder | None = None,
    schedule: bool = False,
    clip: bool = False,
    bottom_first: bool = False,
    static: bool = False,
    leaf: bool = True,
) -> Outcome:
    model, outcome = make_model(), Outcome()
    optimizer = OPTIMIZERS[optimizer_name](list(model.parameters()))
    part = DensePart(model, optimizer, CPU, options, batch_size=BATCH_SIZE, recorder=recorder)

    def before_step(loss: Tensor) -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    for number, (dense, labels, pooled) in enumerate(batches()):
        if schedule:
            optimizer.param_groups[0]["lr"] = lr_of(number)
        if static and part.inputs is not None and len(dense) == BATCH_SIZE:
            part.inputs.dense.copy_(dense)
            part.inputs.labels.copy_(labels)
            part.inputs.pooled.copy_(pooled)
            dense, labels, pooled = part.inputs.dense, part.inputs.labels, part.inputs.pooled
        elif not leaf:
            source = pooled.clone().requires_grad_()
            pooled = source * 1.0
        loss = part.train(
            part.forward_bottom(dense) if bottom_first else dense, labels, pooled, before_step=before_step
        )
        assert loss.dim() == 0 and not loss.requires_grad
        outcome.see(loss, pooled.grad if leaf else source.grad)
    return outcome.end(model, optimizer)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_on_the_cpu_a_step_has_the_bits_of_the_loop(optimizer, bf16):
    assert by_dense_part(optimizer, DenseOptions(bf16=bf16)).digest() == as_the_loop_did(optimizer, bf16=bf16).digest()


def test_bottom_may_run_first_and_pooled_may_come_from_autograd():
    expected = as_the_loop_did("sgd").digest()
    assert by_dense_part("sgd", DenseOptions(), bottom_first=True).digest() == expected
    assert by_dense_part("sgd", DenseOptions(), leaf=False).digest() == expected


def test_gradients_can_be_clipped_before_the_step():
    expected = as_the_loop_did("sgd", clip=True).digest()
    assert expected != as_the_loop_did("sgd").digest()
    assert by_dense_part("sgd", DenseOptions(), clip=True).digest() == expected
    assert by_dense_part("sgd", DenseOptions(graphs=True), recorder=CallingRecorder(), clip=True).digest() == expected


@pytest.mark.parametrize("graphs", [False, True])
def test_what_is_raised_before_the_step_leaves_the_model_as_it_was(graphs):
    model = make_model()
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    part = DensePart(
        model, optimizer, CPU, DenseOptions(graphs=graphs), batch_size=BATCH_SIZE, recorder=CallingRecorder()
    )
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def refuse(loss: Tensor) -> None:
        raise ValueError(float(loss))

    with pytest.raises(ValueError, match=r"^\d\.\d+$"):
        part.train(*batches()[0], before_step=refuse)
    assert repr(before) == repr((model.state_dict(), optimizer.state_dict()))


@pytest.mark.parametrize("how", [{}, {"bottom_first": True}, {"static": True}, {"leaf": False}, {"schedule": True}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_recorded_steps_have_the_bits_of_steps_as_written(optimizer, how):
    recorder = CallingRecorder()
    recorded = by_dense_part(optimizer, DenseOptions(graphs=True), recorder=recorder, **how)
    assert recorded.digest() == as_the_loop_did(optimizer, schedule="schedule" in how).digest()
    assert recorder.replays >= 2 * SIZES.count(BATCH_SIZE)


def test_every_whole_batch_is_replayed_and_no_other():
    recorder = CallingRecorder()
    by_dense_part("sgd", DenseOptions(graphs=True), recorder=recorder)
    # Bottom and rest of five whole batches; of their updates all but the first two, which make state and read it.
    assert (recorder.recordings, recorder.replays) == (3, 2 * 5 + 3)


def test_a_step_is_recorded_anew_where_the_learning_rate_has_changed_and_stands_still():
    recorder = CallingRecorder()
    by_dense_part("sgd", DenseOptions(graphs=True), recorder=recorder, schedule=True)
    # Whole batches are steps 0, 1, 2, 4, 5. 0 and 1 come first; 2 and 4 find another rate than the step before.
    assert (recorder.recordings, recorder.replays) == (2 + 1, 2 * 5 + 1)


def test_a_step_is_recorded_anew_where_the_state_was_loaded():
    recorder = CallingRecorder()
    model = make_model()
    optimizer = OPTIMIZERS["momentum"](list(model.parameters()))
    part = DensePart(model, optimizer, CPU, DenseOptions(graphs=True), batch_size=BATCH_SIZE, recorder=recorder)
    for batch in batches([BATCH_SIZE] * 3):
        part.train(*batch)
    assert recorder.recordings == 3
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for batch in batches([BATCH_SIZE] * 3):
        part.train(*batch)
    assert recorder.recordings == 4


def test_recording_draws_no_random_numbers_and_changes_nothing():
    model = make_model()
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    recorder = CallingRecorder()
    part = DensePart(model, optimizer, CPU, DenseOptions(graphs=True), batch_size=BATCH_SIZE, recorder=recorder)
    part.model.bottom.append(nn.Dropout(0.0))
    part.model.bottom.append(DrawsOne())
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict())), torch.get_rng_state()
    part.forward_bottom(batches()[0][0])
    drawn = torch.get_rng_state()
    assert recorder.warm_ups > 0
    assert repr(before[0]) == repr((model.state_dict(), optimizer.state_dict()))
    torch.set_rng_state(before[1])
    torch.rand(1)  # by the replay, once
    assert torch.equal(torch.get_rng_state(), drawn)


class DrawsOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * torch.rand(1)


class OfOnePart(nn.Module):
    """A user's model: batch statistics, dropout, a counter that is added to or replaced."""

    def __init__(self, *, replaces: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)
        self.top = nn.Sequential(nn.Linear(29, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(1))
        self.replaces = replaces

    def forward(self, dense: Tensor, features: LookedUp) -> Tensor:
        if self.replaces:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        return self.top(torch.cat([dense, self.norm(features.values)], dim=1)).squeeze(1)


def by_one_part(options: DenseOptions, *, with_part: bool = True) -> str:
    torch.manual_seed(7)
    model, outcome = OfOnePart(), Outcome()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    part = DensePart(
        OnePart(model, num_dense=5, pooled_width=24), optimizer, CPU, options,
        batch_size=BATCH_SIZE, recorder=CallingRecorder(), scheduler=schedule,
    )  # fmt: skip
    for dense, labels, pooled in batches():
        pooled.requires_grad_()
        if with_part:
            loss = part.train(dense, labels, pooled)
        else:
            loss = nn.BCEWithLogitsLoss()(model(dense, LookedUp(pooled)), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        outcome.see(loss, pooled.grad)
    return outcome.end(model, optimizer).digest()


def test_a_model_of_one_part_has_the_bits_of_a_plain_loop_recorded_or_not():
    expected = by_one_part(DenseOptions(), with_part=False)
    assert by_one_part(DenseOptions()) == expected
    assert by_one_part(DenseOptions(graphs=True)) == expected


def test_a_buffer_that_forward_replaces_is_refused_where_steps_are_recorded():
    model = OfOnePart(replaces=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part = DensePart(
        OnePart(model, num_dense=5, pooled_width=24), optimizer, CPU, DenseOptions(graphs=True),
        batch_size=BATCH_SIZE, recorder=CallingRecorder(),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="forward replaces its buffer seen"):
        part.train(*batches()[0])


def test_a_class_that_is_derived_from_dlrm_is_computed_by_its_own_forward():
    class Mine(DLRM):
        def forward(self, dense: Tensor, sparse: LookedUp) -> Tensor:
            return super().forward(dense, sparse.values) + 1.0

    mine = Mine(embeddings=nn.Identity(), num_dense=5, embedding_dim=8, num_features=3, bottom=(8,), top=(1,))
    part = in_parts(mine, num_dense=5, pooled_width=24)
    dense, _, pooled = batches()[0]
    assert torch.equal(part.from_bottom(part.bottom(dense), pooled), mine.from_pooled(dense, pooled) + 1.0)
    assert in_parts(make_model(), num_dense=5, pooled_width=24).bottom is not None


class _Foreign(torch.optim.SGD):
    """An optimizer that is not torch.optim's own: what else its step does is not known."""


class _Hooked:
    """torch.optim's own, with a hook, which a replay would not call."""

    def __new__(cls, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


@pytest.mark.parametrize("make", [functools.partial(_Foreign, lr=0.1), _Hooked])
def test_an_optimizer_that_cannot_be_recorded_steps_as_written(make, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "made", make)
    recorder = CallingRecorder()
    outcome = by_dense_part("made", DenseOptions(graphs=True), recorder=recorder)
    assert outcome.digest() == as_the_loop_did("sgd").digest()
    assert (recorder.recordings, recorder.replays) == (2, 2 * 5)


def test_a_state_that_was_saved_with_graphs_goes_on_without_them():
    model = make_model()
    optimizer = OPTIMIZERS["adam"](list(model.parameters()))
    part = DensePart(model, optimizer, CPU, DenseOptions(), batch_size=BATCH_SIZE)
    part.train(*batches()[0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["capturable"] = True
    optimizer.load_state_dict(saved)
    part.train(*batches()[1])
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_a_loss_is_the_callers_to_keep():
    model = make_model()
    part = DensePart(
        model,
        OPTIMIZERS["sgd"](list(model.parameters())),
        CPU,
        DenseOptions(graphs=True),
        batch_size=BATCH_SIZE,
        recorder=CallingRecorder(),
    )
    losses = [part.train(*batch) for batch in batches([BATCH_SIZE] * 3)]
    assert len({float(loss) for loss in losses}) == 3


def test_graphs_are_refused_on_the_cpu():
    model = make_model()
    with pytest.raises(ConfigError, match=r"device\.graphs: CUDA graphs need a CUDA device, and this run's is cpu"):
        DensePart(model, OPTIMIZERS["sgd"](list(model.parameters())), CPU, DenseOptions(graphs=True), batch_size=4)


@pytest.mark.parametrize("setting", ["max_autotune", "max_autotune_gemm", "coordinate_descent_tuning"])
def test_autotuning_is_refused(setting, monkeypatch):
    import torch._inductor.config as config

    refuse_autotuning()
    monkeypatch.setattr(config, setting, True)
    model = make_model()
    with pytest.raises(ConfigError, match=rf"device\.compile: torch\._inductor\.config\.{setting} is on"):
        DensePart(model, OPTIMIZERS["sgd"](list(model.parameters())), CPU, DenseOptions(compile=True), batch_size=4)


# A whole training, or the rest of it from the state that another process left after two steps. Prints what it saw of
# each step, at the end of all parameters, and how often the compiler ran.
COMPILED = """
import sys
sys.path.insert(0, {tests!r})
from holdfast.state.reproducibility import prepare_environment
prepare_environment()
import torch
import test_dense_part as t

first = int(sys.argv[1])
model = t.make_model([8], [8, 1])  # few kernels, because the C++ compiler takes seconds for each
optimizer = t.OPTIMIZERS["adagrad"](list(model.parameters()))
part = t.DensePart(model, optimizer, t.CPU, t.DenseOptions(compile=True), batch_size=t.BATCH_SIZE)
if first:
    saved = torch.load(sys.argv[2])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
for number, (dense, labels, pooled) in enumerate(t.batches()):
    if number < first:
        continue
    outcome = t.Outcome()
    outcome.see(part.train(dense, labels, pooled), pooled.grad)
    print(number, outcome.end(model, optimizer).digest())
    if number == 1:
        torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, sys.argv[2])
print("compiled", torch._dynamo.utils.counters["stats"]["unique_graphs"], file=sys.stderr)
"""


def compiled_run(first: int, state: Path, cache: Path) -> tuple[list[str], str]:
    # The code is made anew in every process; what is shared is the binary of one and the same C++ source.
    caches = {f"TORCHINDUCTOR_{name}_CACHE": "0" for name in ("FX_GRAPH", "AUTOGRAD")}
    environment = os.environ | caches | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "2"}
    script = COMPILED.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, str(first), str(state)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines(), process.stderr


@pytest.mark.thorough
@pytest.mark.timeout(300)  # half a minute where nothing else runs, most of it the C++ compiler
@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="TorchInductor has no C++ compiler here"
)
def test_compiled_training_has_the_same_bits_when_another_process_goes_on(tmp_path):
    state, cache = tmp_path / "state.pt", tmp_path / "cache"
    whole, said = compiled_run(0, state, cache)
    assert len(whole) == len(SIZES)
    assert "compiled 2" in said, said  # bottom and rest, for whole batches; the smaller one runs as written
    resumed, said = compiled_run(2, state, cache)
    assert "compiled 2" in said, said
    assert resumed == whole[2:]
