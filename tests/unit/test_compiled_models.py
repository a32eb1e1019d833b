"""A whole model under torch.compile: rows are looked up as without it, and nothing of the verbs is traced."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast import _core
from holdfast.admin.digest import digest_pool
from holdfast.errors import StepError


class Model(nn.Module):
    def __init__(self, rows: Any) -> None:
        super().__init__()
        self.rows = rows
        self.over = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, bags: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
        found = self.rows(bags)["f"]
        return self.over(found if isinstance(found, Tensor) else found.to_padded_dense(4).sum(1)).squeeze(1)


def train(directory: Path, collection: str, *, is_compiled: bool) -> str:
    """With another number of ids in every batch."""
    torch.manual_seed(0)
    with holdfast.Pool(directory, seed=1, medium="memory") as pool:
        tables = [holdfast.EmbeddingBagConfig(name="t", num_embeddings=90, embedding_dim=6, feature_names=["f"])]
        model = Model(getattr(holdfast, collection)(pool, tables, optimizer=holdfast.Adam(lr=0.02)))
        called = torch.compile(model, backend="eager") if is_compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        checkpoint = holdfast.Checkpoint(pool, model=model, optimizer=optimizer)
        checkpoint.resume()
        for number in range(12):
            draw = torch.Generator().manual_seed(number)
            offsets = torch.cat(
                [torch.zeros(1, dtype=torch.int64), torch.randint(0, 5, (8,), generator=draw).cumsum(0)]
            )
            ids = torch.randint(0, 90, (int(offsets[-1]),), generator=draw)
            optimizer.zero_grad()
            (called({"f": (ids, offsets)}) - 1).square().mean().backward()
            optimizer.step()
            model.rows.optimizer.step()
            checkpoint.commit()
    return digest_pool(_core.Reader(str(directory))).whole


@pytest.mark.dear
@pytest.mark.parametrize("collection", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_a_compiled_model_trains_the_same_rows_and_none_of_the_verbs_is_traced(tmp_path: Path, collection: str) -> None:
    expected = train(tmp_path / "plain", collection, is_compiled=False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Dynamo does not know how to trace")
        assert train(tmp_path / "compiled", collection, is_compiled=True) == expected
    counters = torch._dynamo.utils.counters
    assert 0 < counters["stats"]["unique_graphs"] < 20
    assert not [reason for reason in counters["graph_break"] if "holdfast._core" in reason or "nb_method" in reason]


def test_what_is_compiled_of_a_step_clips_and_updates_the_same_rows(tmp_path: Path) -> None:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        with holdfast.Pool(tmp_path / str(is_compiled), seed=1) as pool:
            tables = [holdfast.EmbeddingBagConfig(name="t", num_embeddings=90, embedding_dim=6, feature_names=["f"])]
            rows = holdfast.EmbeddingBagCollection(pool, tables, optimizer=holdfast.SGD(lr=0.1))
            model = Model(rows)

            def end_step(model: Model = model) -> None:
                parameters = [*model.parameters(), *model.rows.optimizer.param_groups[0]["params"]]
                nn.utils.clip_grad_norm_(parameters, 0.01)
                model.rows.optimizer.step()

            model({"f": torch.arange(8)}).square().mean().backward()
            torch._dynamo.reset()
            (torch.compile(end_step, backend="eager") if is_compiled else end_step)()
            pool.commit(1)
            assert pool.core.row_updates == 1
            found.append(rows.read(0, torch.arange(90)))
    torch.testing.assert_close(found[1], found[0])


def symbolic_trace(model: nn.Module, _: Any) -> Any:
    return torch.fx.symbolic_trace(model)


def script(model: nn.Module, _: Any) -> Any:
    return torch.jit.script(model)


@pytest.mark.parametrize("record", [torch.jit.trace, torch.export.export, symbolic_trace, script])
@pytest.mark.parametrize("trains", [True, False])
def test_what_is_recorded_to_run_without_the_pool_is_refused(tmp_path: Path, record: Any, trains: bool) -> None:
    """A trace of TorchScript held whatever lay in the memory of the looked up vectors, and only warned."""
    with holdfast.Pool(tmp_path / "pool", seed=1, medium="memory") as pool:
        tables = [holdfast.EmbeddingBagConfig(name="t", num_embeddings=90, embedding_dim=6, feature_names=["f"])]
        model = Model(holdfast.EmbeddingBagCollection(pool, tables)).train(trains)
        bags = {"f": (torch.arange(4), torch.arange(4))}
        with pytest.raises(StepError, match=r"torch\.jit, torch\.export.*outside"):
            record(model, (bags,))
        vectors = model.rows(bags).values().detach()
        assert torch.jit.trace(model.over, (vectors,))(vectors).shape == (4, 1)


def test_who_wants_one_graph_of_all_is_told_what_to_compile(tmp_path: Path) -> None:
    with holdfast.Pool(tmp_path / "pool", seed=1, medium="memory") as pool:
        tables = [holdfast.EmbeddingBagConfig(name="t", num_embeddings=90, embedding_dim=6, feature_names=["f"])]
        model = Model(holdfast.EmbeddingBagCollection(pool, tables))
        bags = {"f": (torch.arange(4), torch.arange(4))}
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile the module that is given their vectors"):
            torch.compile(model, backend="eager", fullgraph=True)(bags)
