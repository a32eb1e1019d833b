"""The loops that people write: accumulation, clipping, loss scaling, thrown-away forwards, evaluation, schedules."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elsewhere import Elsewhere
from torch import Tensor, nn

from holdfast import (
    SGD,
    Adagrad,
    Adam,
    Checkpoint,
    DeviceConfig,
    EmbeddingBagCollection,
    Pool,
    RowWiseAdagrad,
    RowWiseAdam,
    clip_grad_norm_,
)
from holdfast.errors import BatchTooLarge, ConfigError, NonFiniteLoss, StateError, StepError
from holdfast.pools.directory import Medium
from holdfast.pools.optim import RowOptimizerSpec
from row_reference import Bags, f32
from twin import Twin, jagged, random_bags, random_weights, same_bits, table

TABLES = [table("t", ["a", "b"]), table("u", ["c"], dim=19, pooling="mean")]
OPTIMIZERS = [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adagrad(lr=0.1), Adam(lr=0.01), RowWiseAdam(lr=0.01)]


def bags_of(seed: int, samples: int = 5) -> Bags:
    return random_bags("abc", 20, samples, seed)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_of_micro_batches_are_summed_in_order_of_occurrence(
    pool_root: Path, optimizer: RowOptimizerSpec, dtype: str
):
    tables = [table("t", ["a", "b"], data_type=dtype), table("u", ["c"], dim=19, pooling="mean", data_type=dtype)]
    with Twin(pool_root / "pool", tables, optimizer) as twin:
        for step in range(3):
            sums = None
            for micro in range(3):
                bags = bags_of(10 * step + micro)
                weights = random_weights(bags, seed=micro) if micro == 1 else None
                coefficients = twin.coefficients(5, seed=micro)
                output = twin.emb(jagged(bags, weights)).values()
                assert same_bits(output, twin.forward(bags, weights))
                (output * coefficients).sum().backward()
                sums = twin.gradients(bags, coefficients, weights, into=sums)
            twin.emb.optimizer.step()
            twin.pool.commit(step)
            assert sums is not None
            twin.update(sums)
        twin.check()


def test_a_backward_pass_that_is_run_twice_counts_twice(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)
        loss = (twin.emb(jagged(bags)).values() * coefficients).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients, into=twin.gradients(bags, coefficients)))
        twin.check()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_graph_of_the_gradients_is_made_and_a_penalty_on_them_reaches_the_rows(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        head = nn.Linear(twin.emb.output_width, 1)
        peer, bags = DenseTwin(twin, head), bags_of(1)

        for out, dense in ((peer(bags), peer.head), (head(twin.emb(jagged(bags)).values()), head)):
            loss = out.square().mean()
            gradients = torch.autograd.grad(loss, list(dense.parameters()), create_graph=True)
            (loss + sum(gradient.square().sum() for gradient in gradients)).backward(create_graph=True)
        torch.testing.assert_close(head.weight.grad, peer.head.weight.grad)
        expected = [(bag.weight - 0.1 * bag.weight.grad).detach() for bag in peer.bags]
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        for number, wanted in enumerate(expected):
            torch.testing.assert_close(twin.emb.read(number, torch.arange(20)), wanted)


def test_zero_grad_forgets_the_gradients_of_the_rows(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, Adam(lr=0.1)) as twin:
        twin.emb(jagged(bags_of(1))).values().sum().backward()
        twin.emb.optimizer.zero_grad()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.check()
        twin.emb(jagged(bags_of(1))).values().sum().backward()
        twin.pool.commit(10)  # without an update: the step's gradients are over, too
        twin.emb.optimizer.step()
        twin.check()
        twin.step(bags_of(2), seed=2)
        twin.check()


class DenseTwin(nn.Module):
    """torch.nn.EmbeddingBag with the twin's rows, and the same dense part."""

    def __init__(self, twin: Twin, head: nn.Linear) -> None:
        super().__init__()
        self.bags = nn.ModuleList()
        self.features = []
        for reference in twin.tables:
            weights = reference.weights.clone()
            self.bags.append(nn.EmbeddingBag.from_pretrained(weights, freeze=False, mode=reference.config.pooling))
            self.features.append(reference.config.feature_names)
        self.head = nn.Linear(head.in_features, head.out_features)
        self.head.load_state_dict(head.state_dict())

    def forward(self, bags: Bags) -> Tensor:
        columns = []
        for of_table, features in zip(self.bags, self.features, strict=True):
            for feature in features:
                ragged = jagged({feature: bags[feature]})
                columns.append(of_table(ragged.values(), ragged.offsets()[:-1]))
        return self.head(torch.cat(columns, dim=1))


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_clipping_takes_the_norm_over_dense_and_row_gradients(pool_root: Path, max_norm: float, num_micro_batches: int):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.5)) as twin:
        head = nn.Linear(twin.emb.output_width, 3)
        dense = DenseTwin(twin, head)
        for micro in range(num_micro_batches):
            head(twin.emb(jagged(bags_of(micro))).values()).square().sum().backward()
            dense(bags_of(micro)).square().sum().backward()
        expected = nn.utils.clip_grad_norm_(dense.parameters(), max_norm)
        found = clip_grad_norm_(head.parameters(), twin.emb, max_norm)
        torch.testing.assert_close(found, expected)
        twin.emb.optimizer.step()
        torch.optim.SGD(dense.parameters(), lr=0.5).step()
        torch.optim.SGD(head.parameters(), lr=0.5).step()
        twin.pool.commit(5)
        torch.testing.assert_close(head.weight, dense.head.weight)
        for reference, of_table in zip(twin.tables, dense.bags, strict=True):
            reference.weights = of_table.weight.detach()
        torch.testing.assert_close(twin.emb(jagged(bags_of(0))).values(), twin.forward(bags_of(0)))


def test_clipping_takes_a_parameter_by_itself(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        parameter = nn.Parameter(torch.ones(3, 4))
        (parameter.sum() * 5 + twin.emb(jagged(bags_of(1))).values().sum()).backward()
        total = clip_grad_norm_(parameter, twin.emb, max_norm=1.0)
        assert total > torch.full((3, 4), 5.0).norm()
        norms = torch.stack([parameter.grad.norm(), twin.emb.gradient_norm()])
        torch.testing.assert_close(norms.norm(), torch.tensor(1.0))


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("way", ["near_memory", "scratchpad"])
def test_pytorchs_clipping_takes_the_norm_of_the_rows_from_their_optimizer(pool_root: Path, way: Any, foreach: Any):
    """It took the anchor's own gradient, which is 1, for theirs: with a bound of 0.1 it cut them to a tenth."""
    found = []
    for name in ("ours", "PyTorch's"):
        with Pool(pool_root / name, seed=1) as pool:
            rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=DeviceConfig(rows=way))
            torch.manual_seed(1)
            head = nn.Linear(rows.output_width, 1)
            head(rows(jagged(bags_of(1))).values()).square().mean().backward()
            of_rows = [parameter for group in rows.optimizer.param_groups for parameter in group["params"]]
            if name == "ours":
                norm = clip_grad_norm_([*head.parameters(), *(of_rows if foreach else [])], rows, 0.1)
            else:
                norm = nn.utils.clip_grad_norm_([*head.parameters(), *of_rows], 0.1, foreach=foreach)
                torch.testing.assert_close(of_rows[0].grad.norm(), rows.gradient_norm())
                torch.testing.assert_close(of_rows[0].grad.data.norm(2), rows.gradient_norm())
            assert norm > 0.1
            gradient = of_rows[0].grad
            rows.optimizer.step()
            assert gradient.norm() == 0
            pool.commit(1)
            found.append((norm, rows.read(0, torch.arange(20))))
    torch.testing.assert_close(found[1], found[0])


def test_what_pytorch_clips_otherwise_is_refused_for_rows(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)
        (twin.emb(jagged(bags)).values() * coefficients).sum().backward()
        of_rows = twin.emb.optimizer.param_groups[0]["params"]
        for foreach in (False, True):
            with pytest.raises(StepError, match="are not clipped one by one"):
                nn.utils.clip_grad_value_(of_rows, 0.1, foreach=foreach)
            with pytest.raises(StepError, match="a norm of order inf"):
                nn.utils.clip_grad_norm_(of_rows, 0.1, norm_type=math.inf, foreach=foreach)
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients))
        twin.check()


def test_a_row_optimizer_that_is_copied_says_what_to_keep_instead(pool_root: Path):
    with Pool(pool_root / "pool") as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1))
        for call in (copy.deepcopy, pickle.dumps):
            with pytest.raises(StateError, match=r"neither copied nor pickled, .*keep its state_dict"):
                call(rows.optimizer)
        assert copy.deepcopy(rows.optimizer.state_dict())["param_groups"][0]["lr"] == 0.1


@pytest.mark.parametrize("call", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pool_that_is_copied_says_what_to_give_another_process_instead(pool_root: Path, call: Any):
    with Pool(pool_root / "pool") as pool, pytest.raises(StateError, match=r"a pool is neither.*module.*its directory"):
        call(pool)


def test_a_row_optimizer_takes_no_other_parameters(pool_root: Path):
    with Pool(pool_root / "pool") as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1))
        with pytest.raises(ConfigError, match="give parameters of the dense part to an optimizer of torch"):
            rows.optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})


def test_clipping_multiplies_the_summed_gradient_once(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)
        (twin.emb(jagged(bags)).values() * coefficients).sum().backward()
        norm = clip_grad_norm_([], twin.emb, max_norm=0.25)
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients), gradient_scale=float(f32(0.25) / (norm + 1e-6)))
        twin.check()


def test_a_norm_within_the_bound_changes_no_bit(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        bags, coefficients = bags_of(1), twin.coefficients(5, seed=1)
        (twin.emb(jagged(bags)).values() * coefficients).sum().backward()
        clip_grad_norm_([], twin.emb, max_norm=1e9)
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(bags, coefficients))
        twin.check()


@pytest.mark.parametrize("optimizer", [RowWiseAdagrad(lr=0.1), Adam(lr=0.01)], ids=lambda spec: type(spec).__name__)
def test_a_step_whose_scaled_loss_overflows_is_skipped(pool_root: Path, optimizer: RowOptimizerSpec):
    with Twin(pool_root / "pool", TABLES, optimizer) as twin:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        for step, overflows in enumerate([False, True, False, False]):
            bags, coefficients = bags_of(step), twin.coefficients(5, seed=step)
            loss = (twin.emb(jagged(bags)).values() * coefficients).sum()
            scaler.scale(loss * float("inf") if overflows else loss).backward()
            scaler.step(twin.emb.optimizer)
            scaler.update()
            assert twin.pool.commit(5 * step) == step + 1, "a skipped step is a step"
            if not overflows:
                twin.update(twin.gradients(bags, coefficients))  # a scale of 16 or 8 cancels exactly
            twin.check()
        assert scaler.get_scale() == 8.0
        assert twin.pool.core.row_updates == twin.num_updates == 3, "Adam's t counts updates, not steps"


def test_a_loss_that_is_not_finite_takes_the_rows_back_that_were_updated_with_it(pool_root: Path):
    def open_rows() -> tuple[Pool, EmbeddingBagCollection, Checkpoint]:
        pool = Pool(pool_root / "pool", seed=7)
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1))
        return pool, rows, Checkpoint(pool, model=nn.Identity(), optimizer=[])

    def step(factor: float) -> int:
        loss = factor * rows(jagged(bags_of(1))).values().sum()
        loss.backward()
        rows.optimizer.step()
        return checkpoint.commit(loss=loss)

    pool, rows, checkpoint = open_rows()
    checkpoint.resume()
    assert step(1.0) == 1
    with torch.no_grad():
        before = rows(jagged(bags_of(1))).values()
    with pytest.raises(NonFiniteLoss, match=r"of step 2 is nan: the pool stays at step 1, .* when it is opened again"):
        step(float("nan"))
    with pytest.raises(StepError, match=r"step 2 has updated its rows already.*open the pool again to take it back"):
        step(1.0)
    pool.close()
    pool, rows, checkpoint = open_rows()
    assert checkpoint.resume() == 1
    with torch.no_grad():
        assert same_bits(rows(jagged(bags_of(1))).values(), before)
    assert step(1.0) == 2
    pool.close()


@pytest.mark.parametrize(
    "of",
    [float, lambda loss: loss.double().numpy()[()], lambda loss: loss.reshape(1, 1)],
    ids=["a float", "NumPy's", "a tensor"],
)
def test_a_loss_may_be_a_number(pool_root: Path, of: Any):
    with Pool(pool_root / "pool", seed=1) as pool:
        EmbeddingBagCollection(pool, TABLES)
        checkpoint = Checkpoint(pool, model=nn.Linear(1, 1), optimizer=[])
        checkpoint.resume()
        assert checkpoint.commit(loss=of(torch.tensor(0.5))) == 1
        with pytest.raises(NonFiniteLoss, match="the loss of step 2 is nan"):
            checkpoint.commit(loss=of(torch.tensor(math.nan)))
        with pytest.raises(StepError, match="a loss of 2 elements"):
            checkpoint.commit(loss=torch.ones(2))
        assert checkpoint.commit() == 2


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_a_step_that_was_interrupted_leaves_no_gradient_where_its_process_resumes(pool_root: Path, medium: Medium):
    def ends(name: str, interrupted: int | None) -> list[Tensor]:
        with Pool(pool_root / name, medium=medium) as pool:
            rows = EmbeddingBagCollection(pool, TABLES, optimizer=Adagrad(lr=0.1))
            torch.manual_seed(1)
            head = nn.Linear(rows.output_width, 1)
            dense = torch.optim.Adam(head.parameters(), lr=0.1)
            checkpoint = Checkpoint(pool, model=head, optimizer=dense)
            checkpoint.resume()
            while pool.step < 4:
                dense.zero_grad()
                head(rows(jagged(bags_of(pool.step))).values()).square().sum().backward()
                dense.step()
                if pool.step == interrupted:  # by Ctrl-C in a notebook, whose cell is run again
                    interrupted = None
                    checkpoint.resume()
                    continue
                rows.optimizer.step()
                checkpoint.commit()
            return [*(rows.read(number, torch.arange(20)) for number in range(2)), *head.parameters()]

    assert all(same_bits(a, b) for a, b in zip(ends("whole", None), ends("interrupted", 2), strict=True))


def test_unscaling_before_clipping_clips_the_true_norm(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        bags, coefficients = bags_of(3), twin.coefficients(5, seed=3)
        scaler.scale((twin.emb(jagged(bags)).values() * coefficients).sum()).backward()
        scaler.unscale_(twin.emb.optimizer)
        norm = clip_grad_norm_([], twin.emb, max_norm=1e9)
        scaler.step(twin.emb.optimizer)
        scaler.update()
        twin.pool.commit(5)
        sums = twin.gradients(bags, coefficients)
        squares = [g.double().square().sum() for of_table in sums for g in of_table.values()]
        torch.testing.assert_close(norm.double(), torch.stack(squares).sum().sqrt(), rtol=1e-6, atol=0)
        twin.update(sums)
        twin.check()


def test_a_gradient_that_is_not_finite_makes_the_anchors_gradient_nan(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=0.1)) as twin:
        (twin.emb(jagged(bags_of(1))).values() * float("nan")).sum().backward()
        assert twin.emb.anchor.grad is not None
        assert twin.emb.anchor.grad.isnan()


def test_thousands_of_forwards_without_backward_do_not_fill_the_log(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1), log_bytes=1 << 14) as twin:
        planned = twin.emb.plan(jagged(bags_of(1)))
        for _ in range(2000):
            output = twin.emb(planned).values()
        assert same_bits(output, twin.forward(bags_of(1)))
        twin.step(bags_of(2), seed=2)
        twin.check()


def test_a_forward_whose_result_is_dropped_between_two_that_are_kept_leaves_no_trace(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        first, second = bags_of(1), bags_of(2)
        coefficients = twin.coefficients(5, seed=1)
        kept = twin.emb(jagged(first)).values()
        twin.emb(jagged(bags_of(3)))
        later = twin.emb(jagged(second)).values()
        twin.emb(jagged(bags_of(4)))
        (kept * coefficients).sum().backward()
        (later * coefficients).sum().backward()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        twin.update(twin.gradients(second, coefficients, into=twin.gradients(first, coefficients)))
        twin.check()


def test_forwards_that_are_all_kept_end_in_a_typed_error_and_the_step_can_go_on(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1), log_bytes=1 << 14) as twin:
        kept = []
        with pytest.raises(BatchTooLarge, match=r"forward passes of this step; make the pool with a larger log_bytes"):
            kept.extend(twin.emb(jagged(bags_of(1))).values() for _ in range(1000))
        assert len(kept) > 1
        kept.clear()
        twin.step(bags_of(2), seed=2)
        twin.check()


def leaves_no_trace(twin: Twin, evaluate: bool) -> None:
    """A forward without gradients: the values of a training forward, no log, no row, no random number."""
    bags = bags_of(5)
    free = twin.pool.core.log_bytes_free
    random_before = torch.get_rng_state()
    files_before = {path: path.read_bytes() for path in twin.pool.directory.rglob("*") if path.is_file()}
    if evaluate:
        twin.emb.eval()
        output = twin.emb(jagged(bags)).values()
        twin.emb.train()
    else:
        with torch.no_grad():
            output = twin.emb(jagged(bags)).values()
    assert same_bits(output, twin.forward(bags))
    assert not output.requires_grad
    assert twin.pool.core.log_bytes_free == free
    assert torch.equal(torch.get_rng_state(), random_before)
    assert files_before == {path: path.read_bytes() for path in twin.pool.directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("evaluate", [True, False], ids=["eval-mode", "no-grad"])
def test_evaluation_in_the_middle_of_training_leaves_no_trace(pool_root: Path, evaluate: bool):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        leaves_no_trace(twin, evaluate)
        twin.step(bags_of(1), seed=1)
        twin.pool.flush()
        leaves_no_trace(twin, evaluate)
        bags, coefficients = bags_of(2), twin.coefficients(5, seed=2)
        output = twin.emb(jagged(bags)).values()
        twin.pool.flush()
        leaves_no_trace(twin, evaluate)  # between forward and backward
        (output * coefficients).sum().backward()
        twin.emb.optimizer.step()
        twin.update(twin.gradients(bags, coefficients))
        leaves_no_trace(twin, evaluate)  # between update and commit: the new rows
        twin.pool.commit(10)
        twin.check()


def test_a_copy_of_a_model_has_the_same_rows_and_a_mode_of_its_own(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        model = nn.Sequential(twin.emb, nn.Identity())
        kept = copy.deepcopy(model).eval()
        seen: list[str] = []
        kept[0].register_forward_hook(lambda *_: seen.append("the copy"))
        assert model[0].training
        for step in range(3):
            twin.step(bags_of(step), seed=step)
            assert same_bits(kept[0](jagged(bags_of(9))).values(), twin.forward(bags_of(9)))
        assert seen == ["the copy"] * 3
        twin.check()


def test_a_collection_that_is_pickled_says_what_to_save_instead(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        model = nn.Sequential(twin.emb, nn.Linear(2, 1))
        with pytest.raises(StateError, match=r"save model.state_dict\(\)"):
            torch.save(model, pool_root / "model.pt")
        torch.save(model.state_dict(), pool_root / "state.pt")


def test_a_scheduler_drives_the_row_optimizers_learning_rate(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, RowWiseAdagrad(lr=0.1)) as twin:
        scheduler = torch.optim.lr_scheduler.StepLR(twin.emb.optimizer, step_size=1, gamma=0.5)
        for step, lr in enumerate([0.1, 0.05, 0.025]):
            bags, coefficients = bags_of(step), twin.coefficients(5, seed=step)
            (twin.emb(jagged(bags)).values() * coefficients).sum().backward()
            twin.emb.optimizer.step()
            scheduler.step()
            twin.pool.commit(5 * step)
            twin.update(twin.gradients(bags, coefficients), lr=lr)
        twin.check()


def test_rows_are_no_parameters_so_any_dense_optimizer_takes_the_module(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD()) as twin:
        model = nn.Sequential(twin.emb, nn.Linear(twin.emb.output_width, 1))
        assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
        assert list(model.state_dict()) == ["1.weight", "1.bias"]


def test_under_autocast_rows_get_float32_gradients_of_bfloat16_layers(pool_root: Path):
    with Twin(pool_root / "pool", TABLES, SGD(lr=1.0)) as twin:
        head = nn.Linear(twin.emb.output_width, 2)
        bags = bags_of(1)
        output = twin.emb(jagged(bags)).values()
        output.retain_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = head(output).float().sum()
        loss.backward()
        twin.emb.optimizer.step()
        twin.pool.commit(5)
        assert output.grad is not None
        twin.update(twin.gradients(bags, output.grad))
        twin.check()


def test_rows_of_a_collection_of_many_tables_are_read_in_small_pieces(pool_root: Path, monkeypatch: pytest.MonkeyPatch):
    """An evaluation has columns for every table, so one of all ids would take as much memory for each of them."""
    tables = [table(f"t{number}", [f"f{number}"], rows=2000, dim=16) for number in range(100)]
    with Pool(pool_root / "pool", seed=1) as pool:
        rows = EmbeddingBagCollection(pool, tables)
        evaluate, sizes = rows._access.evaluate, []

        def counted(planned: Any) -> Tensor:
            sizes.append(evaluate(planned).nbytes)
            return evaluate(planned)

        monkeypatch.setattr(rows._access, "evaluate", counted)
        ids = torch.arange(20_000) % 2000
        found = rows.read(7, ids)
        assert max(sizes) <= 16 << 20
        monkeypatch.undo()
        with torch.no_grad():
            everything = rows({f"f{number}": torch.arange(2000) for number in range(100)})
        assert same_bits(found, everything["f7"][ids])


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("ways", ["near_memory", "scratchpad"])
@pytest.mark.usefixtures("default_dtype")
def test_pytorchs_default_dtype_changes_no_bit_of_a_row(pool_root: Path, ways: Any):
    """As whoever trains a network in bfloat16 may set it: the factor of a clipped gradient was rounded to that."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        device = DeviceConfig(rows=ways)
        with Pool(pool_root / str(dtype), seed=1) as pool:
            rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1), device=device)
            rows(jagged(bags_of(1))).values().sum().backward()
            clip_grad_norm_([], rows, 1.7)
            rows.optimizer.step()
            pool.commit(1)
            found.append(rows.read(0, torch.arange(20)))
        assert found[-1].dtype == torch.float32
        assert same_bits(found[-1], found[0])


@pytest.mark.parametrize("medium", ["memory", "block"])
def test_pytorchs_default_device_is_none_of_holdfasts(pool_root: Path, medium: Any):
    """As a script that trains its network on a GPU may set it: resume took its tensors for the host's."""
    found = []
    for mode in (contextlib.nullcontext(), Elsewhere()):
        directory = pool_root / type(mode).__name__
        for steps in (2, 4):
            with mode, Pool(directory, seed=1, medium=medium) as pool:
                rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1))
                head = nn.Linear(rows.output_width, 1)
                checkpoint = Checkpoint(pool, model=head, optimizer=torch.optim.SGD(head.parameters()))
                checkpoint.resume()
                while pool.step < steps:
                    loss = rows(jagged(bags_of(pool.step))).values().square().sum()
                    loss.backward()
                    clip_grad_norm_([], rows, 1.7)
                    rows.optimizer.step()
                    checkpoint.commit(loss=1.0)
                found.append(rows.read(0, torch.arange(20)))
    assert same_bits(found[2], found[0]) and same_bits(found[3], found[1])


@pytest.mark.parametrize("setting", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_setting_that_a_schedule_made_no_number_updates_no_row(setting: str, value: float, pool_root: Path):
    with Pool(pool_root / "pool") as pool:
        rows = EmbeddingBagCollection(pool, TABLES, optimizer=SGD(lr=0.1))
        before = rows.read(0, torch.arange(20))
        rows(jagged(bags_of(0))).values().sum().backward()
        group = rows.optimizer.param_groups[0]
        good = group[setting]
        group[setting] = value
        with pytest.raises(StepError, match=rf"is {value}: every row"):
            rows.optimizer.step()
        assert same_bits(rows.read(0, torch.arange(20)), before)
        group[setting] = good
        rows.optimizer.step()
        pool.commit(1)
        found = rows.read(0, torch.arange(20))
        assert found.isfinite().all() and not same_bits(found, before)
