"""A loop with parts of the user's own, stopped and gone on with, ends with the bits of one that never stopped; or the
Checkpoint says what stands in the way."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

from holdfast import Checkpoint, EmbeddingBagCollection, Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import StateError, StepError
from twin import jagged, random_bags, table
from user_loop import SAMPLES, STEPS, Life, Parts, adam, small_model, trained

pytestmark = pytest.mark.dear

Make = Callable[[EmbeddingBagCollection], Parts]


def is_exact(root: Path, make: Make) -> bool:
    return trained(root / "whole", make) == trained(root / "stopped", make, stops=(2, 5, 6))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda of: torch.optim.SGD(of, lr=0.05, momentum=0.9),
    "adam": lambda of: torch.optim.Adam(of, lr=0.01),
    "adam foreach": lambda of: torch.optim.Adam(of, lr=0.01, foreach=True),
    "adam fused amsgrad": lambda of: torch.optim.Adam(of, lr=0.01, fused=True, amsgrad=True),
    "adamw with a tensor as lr": lambda of: torch.optim.AdamW(of, lr=torch.tensor(0.01)),
    "adagrad": lambda of: torch.optim.Adagrad(of, lr=0.05),
    "rmsprop": lambda of: torch.optim.RMSprop(of, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda of: torch.optim.NAdam(of, lr=0.01),
    "radam": lambda of: torch.optim.RAdam(of, lr=0.01),
    "adamax": lambda of: torch.optim.Adamax(of, lr=0.01),
    "adadelta": lambda of: torch.optim.Adadelta(of, lr=0.5),
    "asgd": lambda of: torch.optim.ASGD(of, lr=0.05),
    "rprop": lambda of: torch.optim.Rprop(of, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_dense_optimizer_goes_on_to_the_bit(name: str, pool_root: Path) -> None:
    dtype = torch.bfloat16 if "foreach" in name or "fused" in name else torch.float32

    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model(dtype)
        return Parts(model, OPTIMIZERS[name](model.parameters()))

    assert is_exact(pool_root, make)


class ByEigenvectors(torch.optim.Optimizer):
    """Keeps a matrix of eigenvectors, which lies by columns, as Shampoo and SOAP do: a product with it has other bits
    where it lies by rows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state, of = self.state[parameter], parameter.grad.reshape(len(parameter), -1)
            if not state:
                symmetric = of @ of.T + torch.eye(len(of))
                state["vectors"] = [torch.linalg.eigh(symmetric).eigenvectors]
            (vectors,) = state["vectors"]
            parameter.sub_((vectors @ (vectors.T @ of).tanh()).reshape(parameter.shape), alpha=0.05)


def test_state_that_lies_by_columns_comes_back_so(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 1))
        return Parts(model, ByEigenvectors(model.parameters()))

    life = Life(pool_root / "one", make, life=1)
    life.train(1)
    assert not life.parts.optimizer.state_dict()["state"][0]["vectors"][0].is_contiguous()
    life.pool.close()
    life = Life(pool_root / "one", make, life=2)
    assert life.parts.optimizer.state_dict()["state"][0]["vectors"][0].stride() == (1, 33)
    life.pool.close()
    assert is_exact(pool_root, make)


class Transposed(nn.Module):
    """Has parameters that lie in memory as a transposed matrix, and channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 8).t())
        self.conv = nn.Conv2d(5, 3, 2).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        image = (x @ self.matrix)[:, :, None, None] * torch.linspace(0.0, 1.0, 9).view(1, 1, 3, 3)
        return self.conv(image).sum((1, 2, 3)).unsqueeze(1)


FUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda of: torch.optim.Adam(of, lr=0.01, fused=True),
    "adagrad": lambda of: torch.optim.Adagrad(of, lr=0.01, fused=True),
    "sgd with momentum": lambda of: torch.optim.SGD(of, lr=0.001, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_of_parameters_in_another_order_in_memory_goes_on_to_the_bit(
    name: str, pool_root: Path
) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = Transposed()
        return Parts(model, FUSED[name](model.parameters()))

    assert is_exact(pool_root, make)


class FloatMoments(torch.optim.Optimizer):
    """Keeps its state in float32 whatever the parameters are, as optimizers for bf16 networks do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    state["master"] = parameter.detach().float().clone()
                    state["parts"] = [torch.zeros(3), {"seen": torch.zeros((), dtype=torch.float64)}]
                state["moment"].mul_(0.9).add_(parameter.grad.float())
                state["parts"][1]["seen"].add_(0.1)
                parameter.copy_(state["master"].sub_(state["moment"], alpha=group["lr"]))


def test_float32_state_of_a_bf16_network_comes_back_as_float32(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model(torch.bfloat16)
        return Parts(model, FloatMoments(model.parameters()))

    assert is_exact(pool_root, make)


def doubling(step: int) -> float:
    return 1.0 + step % 3


class WarmUp:
    """A callable with state, as LambdaLR keeps it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, self.calls / 4)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda of: lr_scheduler.StepLR(of, 2, 0.7),
    "multi-step": lambda of: lr_scheduler.MultiStepLR(of, [2, 3, 6], 0.5),
    "exponential": lambda of: lr_scheduler.ExponentialLR(of, 0.9),
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, 5),
    "warm restarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 3, 2),
    "one cycle": lambda of: lr_scheduler.OneCycleLR(of, 0.1, total_steps=20),
    "cyclic": lambda of: lr_scheduler.CyclicLR(of, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
    "cyclic with a function": lambda of: lr_scheduler.CyclicLR(
        of, 0.001, 0.1, step_size_up=3, cycle_momentum=False, scale_fn=doubling, scale_mode="iterations"
    ),
    "polynomial": lambda of: lr_scheduler.PolynomialLR(of, 12),
    "linear": lambda of: lr_scheduler.LinearLR(of, total_iters=4),
    "constant": lambda of: lr_scheduler.ConstantLR(of, total_iters=4),
    "lambda": lambda of: lr_scheduler.LambdaLR(of, doubling),
    "lambda with state": lambda of: lr_scheduler.LambdaLR(of, WarmUp()),
    "multiplicative": lambda of: lr_scheduler.MultiplicativeLR(of, doubling),
    "sequential": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of, total_iters=3), lr_scheduler.ExponentialLR(of, 0.9)], milestones=[3]
    ),
    "chained": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(of, total_iters=4), lr_scheduler.ExponentialLR(of, 0.9)]
    ),
    "SWA": lambda of: swa_utils.SWALR(of, swa_lr=0.001, anneal_epochs=4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_any_schedule_goes_on_to_the_bit(name: str, pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        of_tensors = name in ("cosine", "one cycle", "sequential", "chained")
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01) if of_tensors else 0.01)
        schedules = [SCHEDULERS[name](optimizer), lr_scheduler.StepLR(rows.optimizer, 3, 0.5)]

        def after(loss: float) -> None:
            for schedule in schedules:
                schedule.step()

        return Parts(model, optimizer, {"scheduler": schedules}, after=after)

    assert is_exact(pool_root, make)


def test_a_schedule_that_waits_for_the_loss_goes_on_to_the_bit(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        optimizer = adam(model)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1, cooldown=1)
        return Parts(model, optimizer, {"scheduler": schedule}, after=schedule.step)

    assert is_exact(pool_root, make)


def test_averaged_weights_go_on_to_the_bit(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        ema = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        swa = swa_utils.AveragedModel(model, use_buffers=True)

        def after(loss: float) -> None:
            ema.update_parameters(model)
            swa.update_parameters(model)

        return Parts(model, adam(model), {"extra": {"ema": ema, "swa": swa}}, after=after)

    assert is_exact(pool_root, make)


def test_averaged_weights_of_a_model_that_holds_its_rows_go_on_to_the_bit(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        network = small_model()
        model = nn.ModuleDict({"rows": rows, "network": network})
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

        def after(loss: float) -> None:
            average.update_parameters(model)
            average.eval()  # for a score now and then; the rows of the other go on training

        return Parts(network, adam(network), {"extra": {"average": average}}, after=after)

    assert is_exact(pool_root, make)


def test_a_row_optimizer_may_be_given_among_the_networks(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        optimizers = [rows.optimizer, adam(model)]
        return Parts(model, optimizers[1], {"optimizer": optimizers})

    assert is_exact(pool_root, make)


def small_training(rows: EmbeddingBagCollection) -> Parts:
    model = small_model()
    return Parts(model, adam(model))


def test_a_commit_without_a_resume_is_refused_and_the_pool_stays_as_it_was(pool_root: Path) -> None:
    life = Life(pool_root / "pool", small_training, life=100)
    life.train(3)
    life.checkpoint = Checkpoint(life.pool, model=small_model(), optimizer=[])  # which has learnt nothing
    with pytest.raises(StepError, match=r"commit without resume.*call checkpoint.resume\(\) once"):
        life.train(4)
    life.pool.close()
    life = Life(pool_root / "pool", small_training, life=2)
    assert life.pool.step == 3
    life.train(STEPS)
    life.pool.close()
    assert digest_pool(_core.Reader(str(pool_root / "pool"))).whole == trained(pool_root / "whole", small_training)


def looks_up_first(rows: EmbeddingBagCollection) -> Parts:
    rows(jagged(random_bags(["f"], 20, SAMPLES, seed=77)))
    return small_training(rows)


def test_a_lookup_before_a_new_pool_is_resumed_is_named(pool_root: Path) -> None:
    kept = []

    def keeps_what_it_looks_up(rows: EmbeddingBagCollection) -> Parts:
        kept.append(rows(jagged(random_bags(["f"], 20, SAMPLES, seed=77))).values())
        return small_training(rows)

    with pytest.raises(StepError, match=r"with a lookup.*a new pool is resumed \(checkpoint.resume\(\)\) before"):
        Life(pool_root / "pool", keeps_what_it_looks_up, life=1)


@pytest.mark.parametrize("first", [small_training, looks_up_first])
def test_a_lookup_before_a_resume_whose_result_is_thrown_away_changes_no_bit(first: Any, pool_root: Path) -> None:
    life = Life(pool_root / "pool", first, life=100)
    life.train(3)
    life.pool.close()
    life = Life(pool_root / "pool", looks_up_first, life=2)
    life.train(STEPS)
    life.pool.close()
    assert digest_pool(_core.Reader(str(pool_root / "pool"))).whole == trained(pool_root / "whole", small_training)


def test_two_checkpoints_by_turns_are_refused_and_the_pool_stays_as_it_was(pool_root: Path) -> None:
    """A pool has one dense state: with two models by turns, a resume would give both of them that of one."""
    life = Life(pool_root / "pool", small_training, life=100)
    life.train(3)
    model = small_model()
    other = Checkpoint(life.pool, model=model, optimizer=adam(model))
    other.resume()
    with pytest.raises(StepError, match=r"another Checkpoint of this pool was made since.*resume\(\)"):
        life.train(4)
    with pytest.raises(StepError, match="another Checkpoint of this pool"):
        life.checkpoint.flush()
    life.pool.close()
    life = Life(pool_root / "pool", small_training, life=2)
    assert life.pool.step == 3
    life.pool.close()


def test_objects_that_are_made_again_beside_an_open_pool_go_on_to_the_bit(pool_root: Path) -> None:
    """As the cells of a notebook are run once more. The former Checkpoint may go on, too, once it has resumed."""
    life = Life(pool_root / "pool", small_training, life=100)
    life.train(3)
    former = life.checkpoint, life.parts
    life.parts = small_training(life.rows)
    given = {"optimizer": life.parts.optimizer, **life.parts.given}
    life.checkpoint = Checkpoint(life.pool, model=life.parts.model, **given)
    assert life.checkpoint.resume() == 3
    life.train(5)
    life.checkpoint, life.parts = former
    assert life.checkpoint.resume() == 5
    life.train(STEPS)
    life.pool.close()
    assert digest_pool(_core.Reader(str(pool_root / "pool"))).whole == trained(pool_root / "whole", small_training)


def test_a_collection_that_is_made_after_the_checkpoint_is_named(pool_root: Path) -> None:
    """The settings of its row optimizer would begin anew in the next life."""
    with Pool(pool_root / "pool", medium="memory") as pool:
        EmbeddingBagCollection(pool, [table("t", ["f"])])
        checkpoint = Checkpoint(pool, model=small_model(), optimizer=[])
        EmbeddingBagCollection(pool, [table("u", ["g"])])
        with pytest.raises(StateError, match=r"collection of table 'u' was made after the Checkpoint"):
            checkpoint.resume()


def test_a_gradient_scaler_goes_on_to_the_bit(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)  # the first steps overflow
        return Parts(model, adam(model), {"scaler": scaler}, scaler=scaler)

    assert is_exact(pool_root, make)


def generators() -> dict[str, Any]:
    return {
        "torch": torch.Generator().manual_seed(random.randrange(1000)),
        "python": random.Random(random.randrange(1000)),
        "pcg64": np.random.default_rng(random.randrange(1000)),
        "philox": np.random.Generator(np.random.Philox(random.randrange(1000))),
        "mt19937": np.random.Generator(np.random.MT19937(random.randrange(1000))),
        "sfc64": np.random.Generator(np.random.SFC64(random.randrange(1000))),
        "legacy": np.random.RandomState(random.randrange(1000)),
    }


def test_generators_of_the_users_own_go_on_where_they_were(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        mine = generators()

        def noise() -> float:
            drawn = [mine["python"].gauss(), float(torch.rand((), generator=mine["torch"]))]
            drawn += [generator.standard_normal(dtype=np.float32) for generator in (mine["pcg64"], mine["philox"])]
            drawn += [mine["mt19937"].random(), mine["sfc64"].random(), mine["legacy"].standard_normal()]
            return float(sum(drawn))

        return Parts(model, adam(model), {"extra": mine}, noise=noise)

    assert is_exact(pool_root, make)


def test_a_generator_is_put_back_in_place(pool_root: Path) -> None:
    mine = generators()

    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        return Parts(model, adam(model), {"extra": mine})

    life = Life(pool_root / "pool", make, life=1)
    wanted = [str(copy.deepcopy(generator)) for generator in mine.values()]
    before = mine["torch"].get_state(), mine["python"].getstate(), mine["pcg64"].bit_generator.state
    life.pool.close()
    torch.rand(3, generator=mine["torch"]), mine["python"].random(), mine["pcg64"].random()
    Life(pool_root / "pool", make, life=2).pool.close()
    assert len(wanted) == len(mine)
    assert torch.equal(mine["torch"].get_state(), before[0])
    assert (mine["python"].getstate(), mine["pcg64"].bit_generator.state) == before[1:]


def test_a_generator_of_another_kind_is_refused_by_name(pool_root: Path) -> None:
    def make_with(generator: Any) -> Make:
        def make(rows: EmbeddingBagCollection) -> Parts:
            model = small_model()
            return Parts(model, adam(model), {"extra": {"noise": generator}})

        return make

    Life(pool_root / "pool", make_with(torch.Generator()), life=1).pool.close()
    for other, wanted in (
        (random.Random(), r"noise.*it is a random.Random, and was saved as torch.Generator"),
        (np.random.default_rng(), r"noise.*saved as torch.Generator"),
    ):
        with pytest.raises(StateError, match=wanted):
            Life(pool_root / "pool", make_with(other), life=2)


def test_without_a_loader_the_cursor_counts_steps(pool_root: Path) -> None:
    life = Life(pool_root / "pool", small_training, life=1)
    life.train(4)
    life.pool.close()
    life = Life(pool_root / "pool", small_training, life=2)
    assert (life.pool.step, life.pool.core.cursor) == (4, 4)
    life.train(5)
    assert life.pool.core.cursor == 5
    life.pool.close()


class Unfaithful(nn.Module):
    """Loads something else than it saved."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner = small_model()
        self.what = what
        self.register_buffer("seen", torch.zeros(3), persistent=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def load_state_dict(self, state: Any, *args: Any, **options: Any) -> Any:
        if self.what == "leaves a buffer out":
            state = {name: value for name, value in state.items() if name != "seen"}
            return super().load_state_dict(state, strict=False)
        if self.what == "is of another dtype":
            self.to(torch.bfloat16)
        return super().load_state_dict(state, *args, **options)


def test_a_buffer_that_loading_leaves_out_is_put_back(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = Unfaithful("leaves a buffer out")
        return Parts(model, adam(model), after=lambda loss: model.seen.add_(loss))

    assert is_exact(pool_root, make)


def test_a_tensor_that_cannot_be_given_back_is_named(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = Unfaithful("is of another dtype")
        return Parts(model, torch.optim.SGD(model.parameters(), lr=0.1))

    Life(pool_root / "pool", make, life=1).pool.close()
    with pytest.raises(StateError, match=r"model.seen: saved as torch.float32.*loaded as torch.bfloat16"):
        Life(pool_root / "pool", make, life=2)


def test_a_network_of_another_dtype_than_saved_is_refused_by_name(pool_root: Path) -> None:
    def make_with(dtype: torch.dtype) -> Make:
        def make(rows: EmbeddingBagCollection) -> Parts:
            model = small_model(dtype)
            return Parts(model, torch.optim.SGD(model.parameters(), lr=0.1))

        return make

    Life(pool_root / "pool", make_with(torch.float32), life=1).pool.close()
    with pytest.raises(StateError, match=r"model\['0.weight'\].*float32.*bfloat16"):
        Life(pool_root / "pool", make_with(torch.bfloat16), life=2)


def test_a_network_whose_layers_changed_places_is_refused_by_name(pool_root: Path) -> None:
    """An optimizer knows parameters by their order alone."""

    class Two(nn.Module):
        def __init__(self, names: str) -> None:
            super().__init__()
            for name in names:
                setattr(self, name, nn.Linear(8, 8))

    def make_with(names: str) -> Make:
        def make(rows: EmbeddingBagCollection) -> Parts:
            model = Two(names)
            return Parts(model, adam(model))

        return make

    Life(pool_root / "pool", make_with("ab"), life=1).pool.close()
    with pytest.raises(StateError, match=r"model: 'a.weight' was saved where 'b.weight' is now"):
        Life(pool_root / "pool", make_with("ba"), life=2)


def test_an_optimizer_of_another_kind_is_refused_by_name(pool_root: Path) -> None:
    def make_with(kind: Any) -> Make:
        def make(rows: EmbeddingBagCollection) -> Parts:
            model = small_model()
            return Parts(model, kind(model.parameters(), lr=0.01))

        return make

    Life(pool_root / "pool", make_with(torch.optim.Adam), life=1).pool.close()
    with pytest.raises(StateError, match=r"optimizers\[0\].param_groups\[0\] was saved without 'momentum_decay'"):
        Life(pool_root / "pool", make_with(torch.optim.NAdam), life=2)


def test_a_setting_that_a_later_optimizer_has_is_warned_of(pool_root: Path) -> None:
    class Later(torch.optim.SGD):
        def __setstate__(self, state: Any) -> None:
            super().__setstate__(state)
            for group in self.param_groups:
                group.setdefault("novelty", 3)

    def make_with(kind: Any) -> Make:
        def make(rows: EmbeddingBagCollection) -> Parts:
            model = small_model()
            return Parts(model, kind(model.parameters(), lr=0.01))

        return make

    Life(pool_root / "pool", make_with(torch.optim.SGD), life=1).pool.close()
    with pytest.warns(RuntimeWarning, match=r"optimizers\[0\].param_groups\[0\].novelty"):
        life = Life(pool_root / "pool", make_with(Later), life=2)
    life.train(2)
    life.pool.close()


class Rewarm(lr_scheduler.StepLR):
    """Sets the learning rate anew when it is loaded, as some schedules do."""

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5


def test_what_loading_one_object_changes_in_another_is_put_back(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        optimizer = adam(model)
        schedule = Rewarm(optimizer, 2)
        return Parts(model, optimizer, {"scheduler": schedule}, after=lambda loss: schedule.step())

    assert is_exact(pool_root, make)


def test_a_parameter_that_nothing_holds_is_named(pool_root: Path) -> None:
    temperature = nn.Linear(1, 1)

    def make_with(extra: dict[str, Any]) -> Make:
        def make(rows: EmbeddingBagCollection) -> Parts:
            model = small_model()
            return Parts(model, torch.optim.SGD([*model.parameters(), *temperature.parameters()], lr=0.1), extra)

        return make

    with pytest.raises(StateError, match=r"optimizers\[0\].*parameter 6, of shape \(1, 1\).*extra"):
        Life(pool_root / "pool", make_with({}), life=1)
    Life(pool_root / "other", make_with({"extra": {"temperature": temperature}}), life=1).pool.close()


def test_a_lazy_layer_that_has_not_met_its_input_is_named(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = nn.Sequential(nn.LazyLinear(3))
        return Parts(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(StateError, match=r"model\['0.weight'\].*forward"):
        Life(pool_root / "pool", make, life=1)


def test_parameters_that_come_in_another_order_are_named(pool_root: Path) -> None:
    """As from a set: each would go on with the moments of the other one of its shape."""

    def make_with(order: slice) -> Make:
        def make(rows: EmbeddingBagCollection) -> Parts:
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            layers = [{"params": layer.parameters()} for layer in model]
            return Parts(model, torch.optim.Adam(layers[order], lr=0.01))

        return make

    Life(pool_root / "pool", make_with(slice(None)), life=1).pool.close()
    with pytest.raises(StateError, match=r"optimizers\[0\].*0 is model.1.weight, where model.0.weight was.*sort it"):
        Life(pool_root / "pool", make_with(slice(None, None, -1)), life=2)
    Life(pool_root / "pool", make_with(slice(None)), life=3).pool.close()
