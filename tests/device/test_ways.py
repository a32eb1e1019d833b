"""The ways in which a device reaches rows, on the processor as the device: the same model whichever way, the same bits
the same way, and whatever happens on the way the pool is at the end of a good step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Adam, Checkpoint, EmbeddingBagCollection, Pool, RowWiseAdagrad, clip_grad_norm_
from holdfast.admin.digest import PoolDigest, digest_pool
from holdfast.data import SyntheticConfig
from holdfast.data.batch import JaggedFeatures
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError, DeviceLost, NonFiniteLoss, OutOfDeviceMemory, StepError, WindowTooLarge
from holdfast.pools.read_only import at_rest
from holdfast.pools.tables import EmbeddingBagConfig
from holdfast.run.assembly import open_trainer
from holdfast.run.network import ModelConfig
from holdfast.run.optimizers import OptimizerConfig
from holdfast.run.sections import DataConfig, EmbeddingConfig, PoolConfig, RunConfig, ValidationConfig
from holdfast.run.sources import open_validation
from holdfast.train.options import TrainConfig
from holdfast.train.step_report import StepReport

pytestmark = pytest.mark.dear

STEPS = 12
ROWS = (700, 40, 300)
WAYS: dict[str, DeviceConfig] = {
    "near_memory": DeviceConfig(),
    "relaxed": DeviceConfig(relaxed_lookup=True),
    "scratchpad": DeviceConfig(rows="scratchpad"),
    "small_scratchpad": DeviceConfig(rows="scratchpad", scratchpad_bytes=12_000),
    "direct": DeviceConfig(rows="direct"),
}


@pytest.fixture
def root() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-ways-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def config_of(
    device: DeviceConfig,
    *,
    optimizer: Any = "rowwise_adagrad",
    dtype: Any = "fp32",
    pooling: Any = "sum",
    medium: Any = "memory",
    dense_interval: int = 1,
    **train: Any,
) -> RunConfig:
    return RunConfig(
        data=DataConfig(synthetic=SyntheticConfig(num_samples=500, rows=ROWS, lookups=3, num_dense=4)),
        validation=ValidationConfig(num_samples=300),
        embedding=EmbeddingConfig(dim=6, optimizer=optimizer, dtype=dtype, pooling=pooling, lr=0.05),
        model=ModelConfig(bottom=(8, 6), top=(8, 1)),
        optimizer=OptimizerConfig(name="adam", lr=0.01),
        pool=PoolConfig(medium=medium, dense_interval=dense_interval, log_bytes=1 << 20),
        train=TrainConfig(**{"batch_size": 32, "steps": STEPS, "window": 3, **train}),
        device=device,
    )


def train(directory: Path, config: RunConfig, *, until: int | None = None) -> list[StepReport]:
    """To step `until`; then the pool is closed."""
    if until is not None:
        config = replace(config, train=replace(config.train, steps=until))
    with open_trainer(config, directory) as trainer:
        reports = list(trainer.steps())
        trainer.flush()
    return reports


def bits(directory: Path) -> PoolDigest:
    """Of rows, their state, and all that is dense."""
    with at_rest(directory) as (reader, _):
        return digest_pool(reader)


def rows_of(directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    """float32 weights of every table."""
    found = {}
    with at_rest(directory) as (reader, _):
        for number, table in enumerate(reader.tables):
            size = (4, 2, 2)[table.dtype]
            weights = np.zeros(table.num_embeddings * table.embedding_dim * size, np.uint8)
            width = {0: 0, 1: 1, 2: table.embedding_dim, 3: 2 * table.embedding_dim, 4: table.embedding_dim + 1}
            state = np.zeros(table.num_embeddings * width[table.optimizer] * 4, np.uint8)
            reader.read_rows(number, 0, table.num_embeddings, weights, state)
            dtype = (torch.float32, torch.float16, torch.bfloat16)[table.dtype]
            found[table.name] = torch.from_numpy(weights).view(dtype).float().numpy()
            found[f"{table.name}.state"] = state.view(np.float32)
    return found


def assert_close(left: Path, right: Path, *, rtol: float = 2e-4, atol: float = 2e-6) -> None:
    expected = rows_of(right)
    for name, values in rows_of(left).items():
        np.testing.assert_allclose(values, expected[name], rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam", "rowwise_adam"])
@pytest.mark.parametrize("way", [name for name in WAYS if name != "near_memory"])
def test_every_way_trains_the_same_model(way: str, optimizer: str, root: Path) -> None:
    train(root / "near", config_of(WAYS["near_memory"], optimizer=optimizer))
    train(root / "other", config_of(WAYS[way], optimizer=optimizer))
    assert_close(root / "other", root / "near")


@pytest.mark.parametrize("options", [{"pooling": "mean"}, {"max_grad_norm": 0.05}, {"medium": "block"}], ids=str)
@pytest.mark.parametrize("way", ["relaxed", "scratchpad"])
def test_also_with_means_clipped_gradients_and_a_row_log(way: str, options: dict[str, Any], root: Path) -> None:
    train(root / "near", config_of(WAYS["near_memory"], **options))
    train(root / "other", config_of(WAYS[way], **options))
    assert_close(root / "other", root / "near")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_rows_round_alike_but_where_sums_differ_in_their_last_bits(dtype: str, root: Path) -> None:
    train(root / "near", config_of(WAYS["near_memory"], dtype=dtype))
    train(root / "other", config_of(WAYS["scratchpad"], dtype=dtype))
    expected = rows_of(root / "near")
    for name, values in rows_of(root / "other").items():
        np.testing.assert_allclose(values, expected[name], rtol=3e-2, atol=2e-3)
        assert np.mean(values == expected[name]) > 0.9 or name.endswith("state")


SAME_BITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "window 1": ({}, {"window": 1}),
    "window 8": ({}, {"window": 8}),
    "no window": ({}, {"window": 0}),
    "few slots": ({"scratchpad_bytes": 12_000}, {}),
    "direct": ({"rows": "direct"}, {}),
    "direct, few slots": ({"rows": "direct", "scratchpad_bytes": 12_000}, {"window": 5}),
    "dense every 4 steps": ({}, {"dense_interval": 4}),
    "over a row log": ({}, {"medium": "block"}),
    "evaluated in between": ({}, {"eval_every": 5}),
}


@pytest.mark.parametrize("name", SAME_BITS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_bits_do_not_depend_on_window_slots_or_where_rows_come_from(name: str, dtype: str, root: Path) -> None:
    device, others = SAME_BITS[name]
    train(root / "one", config_of(WAYS["scratchpad"], dtype=dtype))
    train(root / "other", config_of(replace(WAYS["scratchpad"], **device), dtype=dtype, **others))
    assert bits(root / "one") == bits(root / "other")


@pytest.mark.parametrize("stops", [(1,), (5,), (2, 3, 9)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_stopped_ends_with_the_bits_of_one_that_was_not(
    way: str, stops: tuple[int, ...], root: Path
) -> None:
    config = config_of(WAYS[way], dense_interval=2)
    train(root / "through", config)
    for until in (*stops, STEPS):
        train(root / "stopped", config, until=until)
    assert bits(root / "stopped") == bits(root / "through")


def test_every_step_is_reported_once_in_order_and_says_what_the_device_did(root: Path) -> None:
    reports = train(root / "pool", config_of(WAYS["small_scratchpad"], eval_every=5))
    assert [report.step for report in reports] == list(range(1, STEPS + 1))
    for report in reports:
        assert set(report.device) == {"rows in", "lookup", "train", "update", "rows back"}
        assert all(span.ended >= span.began for span in report.device.values())
        assert report.logged_bytes > 0
    assert reports[-1].traffic is not None
    assert sum(report.traffic["device_rows_missed"] for report in reports if report.traffic) > 0


def test_after_a_step_that_is_evaluated_no_later_one_has_begun(root: Path) -> None:
    config = config_of(WAYS["scratchpad"], eval_every=4)
    with open_trainer(config, root / "pool") as trainer:
        for report in trainer.steps():
            if report.step % 4 == 0:
                assert trainer.pool.step == report.step


def test_evaluation_gives_what_the_other_way_gives_and_leaves_no_trace(root: Path) -> None:
    results = []
    for way in ("near_memory", "scratchpad"):
        config = config_of(WAYS[way], eval_every=7)
        validation = open_validation(config)
        assert validation is not None
        with open_trainer(config, root / way) as trainer:
            results += [trainer.evaluate(validation) for report in trainer.steps() if report.step == 7]
            trainer.flush()
    assert results[0].auc == pytest.approx(results[1].auc, abs=1e-3)
    train(root / "not evaluated", config_of(WAYS["scratchpad"]))
    assert bits(root / "scratchpad") == bits(root / "not evaluated")


class Spoiled:
    """A function that does something else at its n-th call."""

    def __init__(self, function: Callable[..., Any], nth: int, instead: Callable[[Any], Any]) -> None:
        self._function, self._left, self._instead = function, nth, instead

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._left -= 1
        result = self._function(*args, **options)
        return self._instead(result) if self._left == 0 else result


def raising(error: Exception) -> Callable[[Any], Any]:
    def throw(_: Any) -> Any:
        raise error

    return throw


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. of which 1.00 GiB is free")
LOST = RuntimeError("CUDA error: uncorrectable ECC error encountered")


@pytest.mark.parametrize(
    ("error", "named", "words"),
    [
        (OUT_OF_MEMORY, OutOfDeviceMemory, r"2147483648 bytes.*scratchpad_bytes"),
        (LOST, DeviceLost, r"ECC.*the pool stays at.*[Ss]tart the run again"),
    ],
    ids=["out of memory", "lost"],
)
@pytest.mark.parametrize("place", ["pooled_lookup", "segment_sum", "update_rows", "scatter_rows"])
def test_a_device_that_fails_leaves_the_last_good_step(
    place: str, error: Exception, named: type[Exception], words: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.device import kernels

    config = config_of(WAYS["small_scratchpad"])
    train(root / "through", config)
    trainer = open_trainer(config, root / "pool")
    monkeypatch.setattr(kernels, place, Spoiled(getattr(kernels, place), 6, raising(error)))
    with pytest.raises(named, match=words), trainer:
        list(trainer.steps())
    monkeypatch.undo()
    with open_trainer(config, root / "pool") as trainer:
        assert 0 < trainer.pool.step < STEPS
        list(trainer.steps())
        trainer.flush()
    assert bits(root / "pool") == bits(root / "through")


def test_a_loss_that_is_not_finite_ends_training_at_the_step_before(root: Path) -> None:
    config = config_of(WAYS["scratchpad"])
    with pytest.raises(NonFiniteLoss, match="step 7 is nan"), open_trainer(config, root / "pool") as trainer:  # noqa: PT012
        trainer._before_step = lambda loss: None  # type: ignore[method-assign]  # as on a device, where nobody waits for it
        trainer._dense.train = Spoiled(trainer._dense.train, 7, lambda loss: loss * float("nan"))  # type: ignore[method-assign]
        list(trainer.steps())
    train(root / "through", config)
    with open_trainer(config, root / "pool") as trainer:
        assert trainer.pool.step == 6
        list(trainer.steps())
        trainer.flush()
    assert bits(root / "pool") == bits(root / "through")


def test_a_batch_that_does_not_fit_the_slots_says_how_many_there_are(root: Path) -> None:
    with pytest.raises(WindowTooLarge, match=r"slots.*scratchpad_bytes is 1,000, this batch alone wants [3-9],"):
        train(root / "pool", config_of(DeviceConfig(rows="scratchpad", scratchpad_bytes=1000)))


def test_a_window_that_does_not_fit_shrinks_and_says_so(root: Path) -> None:
    reports = train(root / "pool", config_of(WAYS["small_scratchpad"], window=8))
    assert sum(report.traffic["device_window_shrunk"] for report in reports if report.traffic) > 0


def test_direct_wants_rows_in_place(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"direct.*scratchpad"):
        train(root / "pool", config_of(WAYS["direct"], medium="block"))


def test_direct_goes_through_staging_where_the_device_refuses_and_says_so(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.slots import home_mapping

    monkeypatch.setattr(home_mapping, "_register", lambda *_: "cudaErrorNotSupported")
    with pytest.warns(RuntimeWarning, match=r"direct.*cudaErrorNotSupported.*staging"):
        train(root / "refused", config_of(WAYS["direct"]))
    train(root / "staged", config_of(WAYS["scratchpad"]))
    assert bits(root / "refused") == bits(root / "staged")


def test_relaxed_lookup_wants_near_memory() -> None:
    with pytest.raises(ConfigError, match="relaxed_lookup"):
        DeviceConfig(rows="scratchpad", relaxed_lookup=True)


def test_a_relaxed_lookup_is_another_order_of_the_same_sums(root: Path) -> None:
    train(root / "strict", config_of(WAYS["near_memory"]))
    train(root / "relaxed", config_of(WAYS["relaxed"]))
    assert bits(root / "strict") != bits(root / "relaxed")


# Loops of one's own.


class Loop:
    """Two collections, of other dims, dtypes, poolings and optimizers; per-sample weights that are trained, too."""

    def __init__(self, directory: Path, device: DeviceConfig) -> None:
        torch.manual_seed(4)
        self.pool = Pool(directory, seed=9, medium="memory")
        tables = [
            EmbeddingBagConfig(num_embeddings=60, embedding_dim=5, name="a", feature_names=["a", "b"]),
            EmbeddingBagConfig(num_embeddings=90, embedding_dim=12, name="c", feature_names=["c"], pooling="mean"),
            EmbeddingBagConfig(num_embeddings=30, embedding_dim=5, name="d", feature_names=["d"]),
        ]
        other = [
            EmbeddingBagConfig(num_embeddings=50, embedding_dim=4, name="e", feature_names=["e"], data_type="fp32")
        ]
        self.collections = [
            EmbeddingBagCollection(self.pool, tables, optimizer=RowWiseAdagrad(lr=0.1), device=device),
            EmbeddingBagCollection(self.pool, other, optimizer=Adam(lr=0.02), device=device),
        ]
        self.model = torch.nn.Linear(sum(rows.output_width for rows in self.collections), 1)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.dense = torch.optim.SGD([*self.model.parameters(), self.scale], lr=0.05, momentum=0.9)
        self.checkpoint = Checkpoint(
            self.pool, model=self.model, optimizer=self.dense, extra={"scale": _Holder(self.scale)}
        )
        self.checkpoint.resume()

    def features(self, step: int) -> JaggedFeatures:
        rng = np.random.default_rng(step)
        keys, values, lengths = "abcde", [], []
        for key, rows in zip(keys, (60, 60, 90, 30, 50), strict=True):
            of_key = rng.integers(0, 4, 16)
            lengths.append(of_key)
            values.append(
                np.minimum(rng.zipf(1.5, int(of_key.sum())), rows) - 1 if key != "d" else np.zeros(int(of_key.sum()))
            )
        offsets = np.concatenate(([0], np.cumsum(np.concatenate(lengths))))
        ids = torch.from_numpy(np.concatenate(values).astype(np.int64))
        weights = self.scale * torch.from_numpy(rng.random(ids.numel(), dtype=np.float32))
        return JaggedFeatures(list(keys), ids, torch.from_numpy(offsets), weights)

    def forward(self, step: int) -> torch.Tensor:
        features = self.features(step)
        pooled = torch.cat([rows(features).values() for rows in self.collections], dim=1)
        return self.model(pooled).square().mean()

    def step(self, *, updates: bool = True, throws_away: bool = False) -> torch.Tensor:
        number = self.pool.step + 1
        if throws_away:
            self.forward(number + 1000)
        loss = self.forward(number)
        self.dense.zero_grad()
        loss.backward()
        clip_grad_norm_([*self.model.parameters(), self.scale], self.collections, 0.5)
        if updates:
            self.dense.step()
            for rows in self.collections:
                rows.optimizer.step()
        self.checkpoint.commit(number, loss=loss)
        return loss.detach()


class _Holder:
    def __init__(self, parameter: torch.nn.Parameter) -> None:
        self._parameter = parameter

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self._parameter.detach()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._parameter.data.copy_(state["value"])


SCRIPT = [{}, {}, {"updates": False}, {"throws_away": True}, {}, {"throws_away": True, "updates": False}, {}, {}]


def run_loop(directory: Path, device: DeviceConfig, *, lives: tuple[int, ...] = (len(SCRIPT),)) -> torch.Tensor:
    loss = torch.zeros(())
    for until in lives:
        loop = Loop(directory, device)
        with loop.pool:
            while loop.pool.step < until:
                loss = loop.step(**SCRIPT[loop.pool.step])
            loop.checkpoint.flush()
    return loss


@pytest.mark.parametrize("way", ["scratchpad", "direct"])
def test_a_loop_of_ones_own_trains_the_same_model(way: str, root: Path) -> None:
    near = run_loop(root / "near", DeviceConfig())
    far = run_loop(root / "far", DeviceConfig(rows=way))  # type: ignore[arg-type]
    torch.testing.assert_close(far, near)
    assert_close(root / "far", root / "near")


@pytest.mark.parametrize("lives", [(3, 8), (1, 4, 6, 8)], ids=str)
def test_and_goes_on_with_the_same_bits(lives: tuple[int, ...], root: Path) -> None:
    device = DeviceConfig(rows="scratchpad", scratchpad_bytes=20_000)
    assert torch.equal(run_loop(root / "through", device), run_loop(root / "stopped", device, lives=lives))
    assert bits(root / "through") == bits(root / "stopped")


def test_a_capture_of_a_step_that_is_over_is_refused(root: Path) -> None:
    loop = Loop(root / "pool", DeviceConfig(rows="scratchpad"))
    rows = loop.collections[0]
    with loop.pool:
        planned = rows.plan(loop.features(1))
        captured = rows.capture(planned)
        loop.pool.commit(1)
        with pytest.raises(StepError, match="step 1, which is over"):
            rows.lookup(captured, planned)


def test_a_second_forward_pass_in_a_step_is_refused_by_name(root: Path) -> None:
    loop = Loop(root / "pool", DeviceConfig(rows="scratchpad"))
    with pytest.raises(StepError, match="near_memory"), loop.pool:
        (loop.forward(1) + loop.forward(2)).backward()


@pytest.mark.parametrize("way", ["near_memory", "scratchpad", "direct"])
def test_losses_of_one_forward_may_have_a_backward_pass_each(way: str, root: Path) -> None:
    def train(directory: Path, device: DeviceConfig, *, at_once: bool) -> None:
        loop = Loop(directory, device)
        with loop.pool:
            for number in range(1, 5):
                features = loop.features(number)
                pooled = torch.cat([rows(features).values() for rows in loop.collections], dim=1)
                losses = [loop.model(pooled).square().mean(), pooled.sigmoid().sum()]
                loop.dense.zero_grad()
                if at_once:
                    sum(losses).backward()
                else:
                    losses[0].backward(retain_graph=True)
                    clip_grad_norm_([], loop.collections, 1e9)  # takes the sums of the rows
                    losses[1].backward()
                loop.dense.step()
                for rows in loop.collections:
                    rows.optimizer.step()
                loop.checkpoint.commit(number)

    train(root / "once", DeviceConfig(), at_once=True)
    train(root / "each", DeviceConfig(rows=way), at_once=False)  # type: ignore[arg-type]
    assert_close(root / "each", root / "once")
