"""Loops that belong to somebody else's trainer (Lightning, Accelerate, Transformers), which wraps what it is given."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast import Checkpoint, EmbeddingBagCollection, EmbeddingBagConfig, Pool, _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import ConfigError, StateError, StepError
from twin import jagged, random_bags
from user_loop import Life, Parts, adam, small_model, trained

pytestmark = pytest.mark.dear


class WrappedAsAccelerateDoes(torch.optim.Optimizer):
    """Of the optimizer, with everything that it holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


def test_optimizers_that_a_trainer_wrapped_go_on_to_the_bit_those_of_rows_among_them(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        optimizers = [WrappedAsAccelerateDoes(adam(model)), WrappedAsAccelerateDoes(rows.optimizer)]
        return Parts(model, optimizers[0], {"optimizer": optimizers})

    def plain(rows: EmbeddingBagCollection) -> Parts:
        model = small_model()
        return Parts(model, adam(model))

    whole = trained(pool_root / "whole", make)
    assert whole == trained(pool_root / "stopped", make, stops=(2, 5, 6)) == trained(pool_root / "plain", plain)


def test_an_optimizer_of_the_dense_part_that_steps_what_stands_for_rows_is_named(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        model = nn.Linear(8, 1)
        of_rows = rows.optimizer.param_groups[0]["params"]
        return Parts(model, torch.optim.SGD([*model.parameters(), *of_rows], lr=0.1))

    with pytest.raises(StateError, match=r"parameter 2 is that of a row optimizer.*rows.optimizer.step\(\) alone"):
        Life(pool_root / "pool", make, life=1)


def test_a_commit_that_drops_gradients_which_no_row_had_says_so_once(pool_root: Path) -> None:
    life = Life(pool_root / "pool", lambda rows: Parts(model := small_model(), adam(model)), life=1)

    def step(value: float = 1.0) -> None:
        (life.rows(jagged(random_bags(["f"], 20, 4, seed=1))).values().sum() * value).backward()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
        life.rows.optimizer.step()
        life.checkpoint.commit()
        step()
        life.rows.optimizer.zero_grad()  # rows that are frozen, said in words
        life.checkpoint.commit()
        step(float("inf"))  # as where a GradScaler leaves the step out
        life.checkpoint.commit()
        assert not told
        for _ in range(2):
            step()
            life.checkpoint.commit()
    assert [(warning.category, warning.filename) for warning in told] == [(RuntimeWarning, __file__)]
    assert "(table 't') that no rows.optimizer.step() had" in str(told[0].message)
    life.pool.close()


@pytest.mark.parametrize(("by", "says"), [("itself", True), ("the scaler", False), ("itself, unscaled", False)])
def test_rows_that_are_updated_with_the_gradients_of_a_scaled_loss_are_named(
    by: str, says: bool, pool_root: Path
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    life = Life(pool_root / "pool", lambda rows: Parts(model := small_model(), adam(model), {"scaler": scaler}), life=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(3):
            pooled = life.rows(jagged(random_bags(["f"], 20, 4, seed=step))).values()
            overflows = step == 0 and by == "the scaler"  # the first step that says something is a later one
            scaler.scale(life.parts.model(pooled).sum() * (torch.inf if overflows else 1.0)).backward()
            scaler.step(life.parts.optimizer)
            if by == "the scaler":
                scaler.step(life.rows.optimizer)
            else:
                if by == "itself, unscaled":
                    scaler.unscale_(life.rows.optimizer)
                life.rows.optimizer.step()
            scaler.update()
            life.parts.optimizer.zero_grad()
            life.checkpoint.commit()
    assert [(warning.category, warning.filename) for warning in told] == [(RuntimeWarning, __file__)] * says
    if says:
        assert "rows of table 't' are updated with gradients that are 1024 times too large" in str(told[0].message)
        assert "scaler.step(rows.optimizer) in place of rows.optimizer.step()" in str(told[0].message)
    life.pool.close()


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", 1.0)])
def test_rows_of_a_loss_that_nothing_scales_are_stepped_in_silence(scaler: Any, pool_root: Path) -> None:
    life = Life(
        pool_root / "pool",
        lambda rows: Parts(model := small_model(), adam(model), {"scaler": scaler}),
        life=1,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        life.rows(jagged(random_bags(["f"], 20, 4, seed=1))).values().sum().backward()
        life.rows.optimizer.step()
        life.checkpoint.commit()
    life.pool.close()


def test_a_loop_without_a_checkpoint_is_told_which_of_its_lines_drops_gradients(pool_root: Path) -> None:
    with Pool(pool_root / "pool") as pool:
        rows = EmbeddingBagCollection(
            pool, [EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=4, feature_names=["f"])]
        )
        rows(jagged(random_bags(["f"], 20, 4, seed=1))).values().sum().backward()
        with pytest.warns(RuntimeWarning, match="a commit drops gradients") as told:
            pool.commit(4)
    assert told[0].filename == __file__


def test_a_parameter_that_an_optimizer_is_given_on_the_way_and_nothing_holds_ends_the_step_in_an_error(
    pool_root: Path,
) -> None:
    life = Life(pool_root / "pool", lambda rows: Parts(model := small_model(), adam(model)), life=1)
    life.train(1)
    life.parts.optimizer.add_param_group({"params": nn.Linear(2, 3).parameters()})
    with pytest.raises(StateError, match=r"optimizers\[0\].param_groups\[1\]: parameter 0, of shape \(3, 2\).*extra"):
        life.train(2)
    assert life.pool.step == 1
    life.pool.close()


def test_a_layer_that_is_replaced_on_the_way_ends_the_step_in_an_error(pool_root: Path) -> None:
    """Its optimizer steps the one that was there, which nothing saves any more."""
    life = Life(pool_root / "pool", lambda rows: Parts(model := small_model(), adam(model)), life=1)
    life.train(1)
    life.parts.model[3] = nn.Linear(5, 1)
    with pytest.raises(StateError, match=r"optimizers\[0\].param_groups\[0\]: parameter 4, of shape \(1, 5\)"):
        life.train(2)
    assert life.pool.step == 1
    life.pool.close()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": {"deep": nn.Linear(1, 1)}}, "model: a dict; it must be an nn.Module.*ModuleDict"),
        ({"optimizer": None}, r"optimizer: a NoneType has no param_groups.*none \(\[\]\)"),
        ({"optimizer": {"deep": adam(nn.Linear(1, 1))}}, "optimizer: a dict has no param_groups"),
        ({"scheduler": {"scheduler": None, "interval": "step"}}, "scheduler: a dict has no state_dict"),
        ({"loader": torch.utils.data.DataLoader([1, 2])}, "loader: a DataLoader has no position.*pool.step"),
    ],
    ids=lambda given: next(iter(given), None) if isinstance(given, dict) else None,
)
def test_what_trainers_keep_in_other_forms_is_named_with_the_form_that_is_wanted(
    given: dict[str, Any], says: str, pool_root: Path
) -> None:
    with Pool(pool_root / "pool") as pool, pytest.raises(ConfigError, match=says):
        Checkpoint(pool, **{"model": nn.Identity(), "optimizer": [], **given})


def test_a_loss_where_the_cursor_belongs_and_losses_by_name_are_step_errors_and_commit_nothing(pool_root: Path) -> None:
    life = Life(pool_root / "pool", lambda rows: Parts(model := small_model(), adam(model)), life=1)
    with pytest.raises(StepError, match=r"cursor: tensor\(1\.\).*commit\(loss=loss\)"):
        life.checkpoint.commit(torch.tensor(1.0))  # type: ignore[arg-type]
    with pytest.raises(StepError, match=r"loss: \{'click': 1.0\}; a step has one"):
        life.checkpoint.commit(loss={"click": 1.0})  # type: ignore[arg-type]
    assert life.pool.step == 0
    life.pool.close()


def test_a_model_of_tables_alone_trains_without_an_optimizer_of_a_dense_part(pool_root: Path) -> None:
    def make(rows: EmbeddingBagCollection) -> Parts:
        return Parts(rows, rows.optimizer, {"optimizer": []})

    def life(directory: Path, number: int, last_step: int) -> str:
        run = Life(directory, make, life=number)
        while run.pool.step < last_step:
            loss = run.rows(jagged(random_bags(["f"], 20, 4, seed=run.pool.step))).values().square().mean()
            loss.backward()
            run.rows.optimizer.step()
            run.checkpoint.commit(loss=loss)
        run.pool.close()
        return digest_pool(_core.Reader(str(directory))).whole

    life(pool_root / "stopped", 1, 3)
    assert life(pool_root / "stopped", 2, 5) == life(pool_root / "whole", 1, 5)
