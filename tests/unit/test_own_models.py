"""A model, a source, an optimizer and a schedule of one's own, from the command line."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import own_code
from cli_runs import Commands, pool_digest, start
from holdfast.device.options import DeviceConfig
from holdfast.errors import ConfigError
from holdfast.files.config import read_config, to_plain
from holdfast.run.assembly import make_network, open_trainer
from holdfast.run.sections import RunConfig
from holdfast.run.sources import open_source, open_validation
from holdfast_lab.placement.demand import demand_of
from holdfast_lab.sim.from_run import model_of_run

pytestmark = pytest.mark.dear

SCHEDULES = {
    "OneCycleLR": "max_lr = 0.02\ntotal_steps = 40",
    "CosineAnnealingWarmRestarts": "T_0 = 7",
    "CyclicLR": "base_lr = 0.001\nmax_lr = 0.01\nstep_size_up = 5\ncycle_momentum = false",
    "LambdaLR": 'lr_lambda = "towers:warm"',
    "SequentialLR": (
        "milestones = [6]\n"
        "schedulers = [{name = 'LinearLR', total_iters = 6}, {name = 'CosineAnnealingLR', T_max = 14}]"
    ),
    "ChainedScheduler": "schedulers = [{name = 'StepLR', step_size = 3}, {name = 'ExponentialLR', gamma = 0.99}]",
}


@pytest.fixture
def holdfast(pool_root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Commands:
    """The command in a folder with the modules of own_code; what it imports from there is forgotten at the end."""
    commands = Commands(pool_root, monkeypatch, capfd)
    for name, text in (("towers", own_code.MODEL), ("layers", own_code.LAYERS), ("clicks", own_code.CLICKS)):
        (pool_root / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, None)  # so that the end takes away what a test puts there
        del sys.modules[name]
    monkeypatch.setattr(sys, "path", list(sys.path))
    (pool_root / "train.seed").write_text("1")
    (pool_root / "valid.seed").write_text("2")
    commands.config.write_text(own_code.CONFIG)
    return commands


def change(holdfast: Commands, old: str, new: str) -> None:
    text = holdfast.config.read_text()
    assert old in text
    holdfast.config.write_text(text.replace(old, new))


def refused(holdfast: Commands, *overrides: str) -> str:
    result = holdfast.train("pool", *(part for override in overrides for part in ("--set", override)))
    assert result.code == 1, result.out
    assert result.err.count("\n") == 1, result.err
    assert not (holdfast.root / "pool").exists()
    return result.err


def test_a_model_of_ones_own_is_trained_evaluated_and_exported(holdfast: Commands) -> None:
    result = holdfast.train()
    assert result.code == 0, result.err
    last = result.out.splitlines()[-1]
    assert last.startswith("trained to step 20: AUC 0.")
    assert holdfast("eval", holdfast.config, "--pool", holdfast.root / "pool").out.strip() == last.replace(
        "trained to ", ""
    )
    assert holdfast("export", holdfast.root / "pool", holdfast.root / "out.safetensors").code == 0
    assert b"model.seen" in (holdfast.root / "out.safetensors").read_bytes()
    imported = holdfast("import", holdfast.root / "out.safetensors", holdfast.config, "--pool", holdfast.root / "again")
    assert imported.code == 0, imported.err


@pytest.mark.thorough
def test_killed_anywhere_it_ends_with_the_digest_of_an_undisturbed_run(holdfast: Commands) -> None:
    """With attention, dropout, batch statistics, a counter, a schedule that moves betas, too, and data of its own."""
    schedule = "\n[scheduler]\nname = 'OneCycleLR'\nmax_lr = 0.02\ntotal_steps = 300\n"
    holdfast.config.write_text(own_code.with_own_data() + schedule)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    draw = random.Random(seed)
    metrics = holdfast.root / "metrics.jsonl"
    command = ("train", holdfast.config, "--pool", holdfast.root / "killed", "--metrics", metrics)
    ends = (*("--set", "train.epochs=15"), *("--steps", 280))
    for _ in range(3):
        process = start(*command, *ends)
        wanted = (len(metrics.read_bytes().splitlines()) if metrics.exists() else 0) + draw.randrange(1, 60)
        deadline = time.monotonic() + 100
        while not metrics.exists() or len(metrics.read_bytes().splitlines()) < wanted:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(draw.random() * 0.01)
        process.kill()
        process.communicate()
    again = holdfast(*command, *ends)
    assert again.code == 0, again.err
    assert "not closed cleanly" in again.out
    whole = holdfast.train("whole", *ends)
    assert whole.code == 0, whole.err
    assert holdfast.digest("killed") == holdfast.digest("whole")
    assert again.out.splitlines()[-1] == whole.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("RAdam", "OneCycleLR"),
        ("NAdam", "CosineAnnealingWarmRestarts"),
        ("Rprop", "CyclicLR"),
        ("Adafactor", "SequentialLR"),
        ("AdamW", "LambdaLR"),
        ("ASGD", "ChainedScheduler"),
    ],
)
def test_any_optimizer_and_schedule_go_on_with_the_same_bits(optimizer: str, schedule: str, holdfast: Commands) -> None:
    change(
        holdfast, 'name = "RAdam"', f'name = "{optimizer}"\n\n[scheduler]\nname = "{schedule}"\n{SCHEDULES[schedule]}'
    )
    change(holdfast, f"{SCHEDULES[schedule]}\nlr = 0.01", SCHEDULES[schedule])
    for stop in (5, 11):
        config = read_config(RunConfig, holdfast.config, [f"train.steps={stop}"])
        with open_trainer(config, holdfast.root / "pieces") as trainer:
            rates = [trainer.dense_optimizer.param_groups[0]["lr"] for _ in trainer.steps()]
            assert len(set(rates)) > 1, "the schedule moves"
            assert type(trainer.dense_optimizer).__name__ == optimizer
            trainer.flush()
    with open_trainer(read_config(RunConfig, holdfast.config, ["train.steps=11"]), holdfast.root / "whole") as trainer:
        for _ in trainer.steps():
            pass
        trainer.flush()
    assert holdfast.digest("pieces") == holdfast.digest("whole")


@pytest.mark.parametrize("device", [{}, {"relaxed_lookup": True}, {"rows": "scratchpad"}, {"rows": "direct"}])
def test_a_model_of_ones_own_trains_whichever_way_its_rows_come(device: dict[str, object], holdfast: Commands) -> None:
    DeviceConfig(**device)  # type: ignore[arg-type]
    overrides = [f"device.{name}={json.dumps(value)}" for name, value in device.items()]
    for stop in (4, 9):
        config = read_config(RunConfig, holdfast.config, [*overrides, f"train.steps={stop}"])
        with open_trainer(config, holdfast.root / "pieces") as trainer:
            assert all(0 < report.loss < 2 for report in trainer.steps())
            trainer.flush()
    with open_trainer(
        read_config(RunConfig, holdfast.config, [*overrides, "train.steps=9"]), holdfast.root / "whole"
    ) as t:
        assert sum(1 for _ in t.steps()) == 9
        t.flush()
    assert holdfast.digest("pieces") == holdfast.digest("whole")


def test_parquet_without_dense_columns_trains_a_dlrm_and_a_model_of_ones_own(holdfast: Commands) -> None:
    """As Avazu's clicks are: categories alone."""
    rng = np.random.default_rng(1)
    for name in ("train", "valid"):
        columns = {"click": rng.random(640) < 0.3}
        columns |= {key: rng.integers(0, 1000, 640).astype(str) for key in ("site", "app", "device")}
        pq.write_table(pa.table(columns), holdfast.root / f"{name}.parquet", row_group_size=100)
    sparse = "".join(
        f'[data.parquet.sparse.{key}]\ncolumn = "{key}"\nnum_embeddings = 200\n' for key in ("site", "app", "device")
    )
    data = f'[data.parquet]\npaths = ["train.parquet"]\nlabel = "click"\n{sparse}\n'
    data += '[validation]\npaths = ["valid.parquet"]\n\n'
    rest = own_code.CONFIG[own_code.CONFIG.index("[embedding]") :]
    dlrm = rest.replace('build = "towers:build"\nhidden = 6', "top = [8, 1]")
    for name, text in (("own", rest), ("dlrm", dlrm)):
        holdfast.config.write_text(data + text)
        assert holdfast.train(name, "--steps", 7).code == 0
        done = holdfast.train(name)
        assert "trained to step 20: AUC" in done.out, done.err
        assert holdfast.train(f"{name}-whole").code == 0
        assert holdfast.digest(name) == holdfast.digest(f"{name}-whole")
    assert "leave it out" in refused(holdfast, "model.bottom=[8, 4]")
    assert "two vectors" not in refused(holdfast, "model.top=[]")


def test_validation_data_that_spell_their_numbers_are_refused_by_training_and_evaluation(holdfast: Commands) -> None:
    """Their ids would be other rows than those that were trained, and the AUC that of a coin."""
    for name, kind in (("train", "int64"), ("valid", "int64"), ("spelt", "string")):
        columns = {"click": pa.array([0, 1] * 40), "site": pa.array(range(80)).cast(kind)}
        pq.write_table(pa.table(columns), holdfast.root / f"{name}.parquet")
    rest = own_code.CONFIG[own_code.CONFIG.index("[embedding]") :]
    holdfast.config.write_text(
        '[data.parquet]\npaths = ["train.parquet"]\nlabel = "click"\n[data.parquet.sparse.site]\ncolumn = "site"\n'
        f'num_embeddings = 90\n[validation]\npaths = ["valid.parquet"]\n\n{rest}'
    )
    assert holdfast.train().code == 0
    spelt = ("--set", f"validation.paths=['{holdfast.root / 'spelt.parquet'}']")
    for result in (
        holdfast.train("other", *spelt),
        holdfast("eval", holdfast.config, "--pool", holdfast.root / "pool", *spelt),
    ):
        assert result.code == 1
        assert "spelt.parquet: column 'site' of feature 'site' holds text values, where " in result.err
    (holdfast.root / "train.parquet").unlink()
    assert "AUC" in holdfast("eval", holdfast.config, "--pool", holdfast.root / "pool").out


def test_text_files_without_dense_columns_train_a_dlrm(holdfast: Commands) -> None:
    rng = np.random.default_rng(1)
    lines = [f"{rng.integers(0, 2)}\tsite{rng.integers(0, 90)}\tapp{rng.integers(0, 9)}\n" for _ in range(320)]
    (holdfast.root / "clicks.tsv").write_text("".join(lines))
    rest = own_code.CONFIG[own_code.CONFIG.index("[embedding]") :]
    holdfast.config.write_text(
        '[data.criteo]\npaths = ["clicks.tsv"]\ndense = []\ncategorical = ["site", "app"]\nnum_embeddings = 50\n'
        'categorical_encoding = "text"\n\n'
        + rest.replace('build = "towers:build"\nhidden = 6', 'kind = "dlrm"\ntop = [8, 1]\ninteraction = "concat"')
    )
    done = holdfast.train()
    assert done.out.splitlines()[-1] == "trained to step 10; no [validation] data to evaluate on", done.err


def test_dense_columns_without_a_bottom_are_refused_by_name(holdfast: Commands) -> None:
    change(holdfast, 'build = "towers:build"\nhidden = 6', "top = [8, 1]")
    assert "model.bottom: the data have 3 dense columns" in refused(holdfast)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "model.hiden=3",
            "model.hiden: unknown key; did you mean hidden? (towers:build is build(inputs, embeddings, *,",
        ),
        ("model.hidden='wide'", 'model.hidden: found "wide" (a string), expected an integer'),
        ("model.build='towers'", "model.build: 'towers' names no function: write \"package.module:function\""),
        ("model.build='tower:build'", "model.build: there is no module 'tower' in "),
        ("model.build='tower:build'", "did you mean towers?"),
        ("model.build='towers.deep:build'", "there is no module 'towers.deep'; 'towers' is "),
        ("model.build='towers:biuld'", "model.build: towers has no 'biuld'; did you mean build?"),
        ("model.build='towers:NOT_A_FUNCTION'", "is a int, which cannot be called; name a function"),
        ("model.build='wrong:nothing'", "model.build: wrong:nothing returned a NoneType; it must return an nn.Module"),
        (
            "model.build='wrong:column'",
            "shape (3, 1), where a floating tensor of shape (3,), one logit a sample, is needed",
        ),
        ("model.build='wrong:column'", "return logits.squeeze(1)"),
        ("model.build='wrong:pair'", "returned a tuple"),
        ("model.build='wrong:aside'", "never called embeddings(features)"),
        ("model.build='wrong:detached'", "lets no gradient through to the embeddings"),
        ("model.build='wrong:bare'", "without parameters to train"),
        ("model.build='wrong:lazy'", "top.weight has no size before the first batch"),
        ("model.build='needy:build'", "importing needy needs the module 'no_such_package', which is not there"),
        ("model.biuld=3", "model.biuld"),
    ],
)
def test_what_is_wrong_with_a_model_is_said_by_key_before_a_pool_is_made(
    override: str, words: str, holdfast: Commands
) -> None:
    (holdfast.root / "needy.py").write_text("import no_such_package\n")
    (holdfast.root / "wrong.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Wrong(nn.Module):\n"
        "    def __init__(self, embeddings, way):\n"
        "        super().__init__()\n"
        "        self.embeddings, self.way = embeddings, way\n"
        "        tops = {'bare': nn.Identity(), 'lazy': nn.LazyLinear(1)}\n"
        "        self.top = tops.get(way) or nn.Linear(12, 1)\n"
        "    def forward(self, dense, features):\n"
        "        if self.way == 'aside':\n"
        "            return self.top(torch.zeros(len(dense), 12)).squeeze(1)\n"
        "        pooled = self.embeddings(features).values()\n"
        "        if self.way == 'detached':\n"
        "            pooled = pooled.detach()\n"
        "        logits = self.top(pooled)\n"
        "        if self.way == 'pair':\n"
        "            return logits, logits\n"
        "        return logits[:, 0] if self.way == 'detached' else logits\n\n"
        "def nothing(inputs, embeddings, **keys): return None\n"
        "def make(way): return lambda inputs, embeddings, **keys: Wrong(embeddings, way)\n"
        "column, pair, aside, detached = map(make, ('column', 'pair', 'aside', 'detached'))\n"
        "bare, lazy = make('bare'), make('lazy')\n"
    )
    sys.modules.pop("wrong", None)
    assert words in refused(holdfast, override)


def test_a_missing_key_of_a_function_is_named_with_its_signature(holdfast: Commands) -> None:
    change(holdfast, "hidden = 6", "heads = 1")
    said = refused(holdfast)
    assert "model.build: missing a required " in said  # "keyword-only", says Python 3.13, too
    assert "argument: 'hidden': towers:build is build(inputs, embeddings, *, hidden: int" in said


def test_a_mistyped_build_is_known_for_what_it_is(holdfast: Commands) -> None:
    change(holdfast, 'build = "towers:build"', 'biuld = "towers:build"')
    assert "model.biuld: unknown key; did you mean build?" in refused(holdfast)


def test_an_error_of_a_model_keeps_its_traceback_and_says_how_it_was_called(holdfast: Commands) -> None:
    (holdfast.root / "towers.py").write_text(own_code.MODEL.replace("self.dim + inputs.num_dense", "self.dim + 1"))
    with pytest.raises(RuntimeError) as caught:
        holdfast.train()
    assert "with dense (3, 3) and pooled embeddings (3, 12)" in caught.value.__notes__[0]
    assert not (holdfast.root / "pool").exists()


def test_a_module_that_is_there_twice_is_refused(holdfast: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is meant must not depend on where the command was started."""
    elsewhere = holdfast.root / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "towers.py").write_text(own_code.MODEL)
    monkeypatch.chdir(elsewhere)
    words = refused(holdfast)
    assert "there is more than one module 'towers'" in words
    assert f"{elsewhere / 'towers.py'}" in words
    assert f"{holdfast.root / 'towers.py'}" in words
    change(holdfast, "towers:build", "json:loads")
    (holdfast.root / "json.py").write_text("")
    assert "there is more than one module 'json'" in refused(holdfast)


def test_a_package_in_the_working_directory_is_found_from_a_file_elsewhere(
    holdfast: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = holdfast.root / "project"
    (project / "my_models").mkdir(parents=True)
    for name in ("towers", "layers"):
        shutil.move(holdfast.root / f"{name}.py", project / "my_models" / f"{name}.py")
    (project / "my_models/towers.py").write_text(own_code.MODEL.replace("from layers", "from my_models.layers"))
    (project / "my_models/__init__.py").write_text("")
    change(holdfast, "towers:build", "my_models.towers:build")
    monkeypatch.chdir(project)
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(
        [Path(sys.executable).parent / "holdfast", "train", holdfast.config, "--pool", holdfast.root / "pool"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "trained to step 20" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.name='radam'", "has no 'radam'; did you mean RAdam?"),
        ("optimizer.name='AdmW'", "did you mean AdamW?"),
        ("optimizer.name='LBFGS'", "LBFGS is not for the dense part of a run: it computes each batch several times"),
        ("optimizer.name='SparseAdam'", "it takes sparse gradients"),
        ("optimizer.beta=[0.9, 0.9]", "optimizer.beta: unknown key; did you mean betas? (RAdam takes lr, betas, eps"),
        ("optimizer.lr=-1.0", "optimizer: RAdam: Invalid learning rate: -1.0"),
        ("optimizer.lr='fast'", "optimizer: RAdam: "),
        ("optimizer.name='Muon'", "optimizer: Muon: "),
        ("scheduler.name='StepLr'", "has no 'StepLr'; did you mean StepLR?"),
        ("scheduler.name='ReduceLROnPlateau'", "it waits for a measurement to get worse"),
        ("scheduler={name='StepLR', step=3}", "scheduler.step: unknown key; did you mean step_size? (StepLR takes"),
        ("scheduler={name='StepLR'}", "scheduler: StepLR: "),
        ("scheduler={name='CosineAnnealingLR', T_max=0}", "scheduler: CosineAnnealingLR: "),
        ("scheduler={name='OneCycleLR', max_lr=0.1, total_steps=9}", "ends after 9 steps, and training at step 20"),
        ("scheduler={name='LambdaLR', lr_lambda='towers:worm'}", "scheduler.lr_lambda: towers has no 'worm'"),
        (
            "scheduler={name='ChainedScheduler', schedulers=[{name='StepLR', step_siz=1}]}",
            "scheduler.schedulers[0].step_siz: unknown key; did you mean step_size?",
        ),
    ],
)
def test_what_is_wrong_with_an_optimizer_or_a_schedule_is_said_by_key(
    override: str, words: str, holdfast: Commands
) -> None:
    assert words in refused(holdfast, override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "data.pth='x'",
            f"data.pth: unknown key; did you mean path? (clicks:make is make(path: {Path.__module__}.Path",
        ),
        ("data.source='clicks:mke'", "data.source: clicks has no 'mke'; did you mean make?"),
        ("data.num_samples='many'", 'data.num_samples: found "many" (a string), expected an integer'),
        ("data.num_samples=0", "whose num_samples is 0, and no integer of 1 or more"),
        ("data.num_samples=650", "whose block_sizes add up to 600, and num_samples is 650"),
        ("data.source='towers:build'", "path: unknown key; there are inputs, embeddings, hidden"),
        ("validation.pth='x'", "validation.pth: unknown key; did you mean path?"),
        ("data.synthetic={num_samples=3, rows=[3]}", "there are synthetic and source"),
    ],
)
def test_what_is_wrong_with_a_source_is_said_by_key(override: str, words: str, holdfast: Commands) -> None:
    holdfast.config.write_text(own_code.with_own_data())
    assert words in refused(holdfast, override)


def test_unknown_keys_of_data_and_validation_are_still_refused(holdfast: Commands) -> None:
    assert "data.sorce: unknown key; did you mean source?" in refused(holdfast, "data.sorce='clicks:make'")
    assert "validation.num_sample: unknown key; did you mean num_samples?" in refused(
        holdfast, "validation.num_sample=3"
    )


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("labels=labels", "labels must be an array float32 of shape (100,), and is float64 (100,)"),
        ("np.zeros((100, 0)", "dense must be an array float32 of shape (100, 0), and is float32 (100, 2)"),
        ("(FixedBags(user[:, None]), words)", "it has bags of 1 features, and the source 2 features"),
        ("[[0], rng", "feature 'words': offsets must begin at 0"),
    ],
)
def test_a_block_of_a_source_that_is_not_as_it_says_is_a_typed_error(
    broken: str, words: str, holdfast: Commands
) -> None:
    replaced = {
        "labels=labels": "labels=labels.astype(float)",
        "np.zeros((100, 0)": "np.zeros((100, 2)",
        "(FixedBags(user[:, None]), words)": "(words,)",
        "[[0], rng": "[[1], rng",
    }[broken]
    assert broken in own_code.CLICKS
    (holdfast.root / "clicks.py").write_text(own_code.CLICKS.replace(broken, replaced))
    holdfast.config.write_text(own_code.with_own_data())
    result = holdfast.train()
    assert result.code == 1
    assert "clicks:make: block" in result.err
    assert words in result.err


def test_paths_of_the_validation_data_stand_in_the_place_of_those_of_the_training_data(holdfast: Commands) -> None:
    many = own_code.CLICKS.replace("path: Path,", "paths: list[Path],").replace(
        "path.read_text()", "paths[-1].read_text()"
    )
    (holdfast.root / "clicks.py").write_text(many)
    text = own_code.with_own_data().replace('path = "train.seed"', 'paths = ["train.seed"]')
    holdfast.config.write_text(text.replace('path = "valid.seed"', 'paths = ["train.seed", "valid.seed"]'))
    config = read_config(RunConfig, holdfast.config)
    training, validation = open_source(config.data), open_validation(config)
    assert validation is not None
    assert (training.fingerprint()["seed"], training.num_samples) == (1, 600)
    assert (validation.fingerprint()["seed"], validation.num_samples) == (2, 300)


def test_validation_data_with_other_columns_are_refused_by_name(holdfast: Commands) -> None:
    (holdfast.root / "others.py").write_text(own_code.CLICKS.replace("num_embeddings=60", "num_embeddings=61"))
    holdfast.config.write_text(own_code.with_own_data())
    change(holdfast, "[validation]", '[validation]\nsource = "others:make"')
    result = holdfast.train()
    assert result.code == 1
    assert "loss" not in result.out, "it is found before the first step"
    assert (
        "validation: features: [('user', 61), ('words', 30)], where the training data have [('user', 60)" in result.err
    )


def test_a_source_that_changed_is_refused_and_one_that_moved_is_not(holdfast: Commands) -> None:
    holdfast.config.write_text(own_code.with_own_data())
    assert holdfast.train("pool", "--steps", 4).code == 0
    shutil.move(holdfast.root / "train.seed", holdfast.root / "moved.seed")
    moved = holdfast.train("pool", "--set", "data.path='moved.seed'", "--steps", 6)
    assert moved.code == 1, "an override's path is relative to the working directory"
    change(holdfast, "train.seed", "moved.seed")
    assert holdfast.train("pool", "--steps", 6).code == 0
    (holdfast.root / "moved.seed").write_text("3")
    assert "source.seed: it was saved with 1, but this loader has 3" in holdfast.train("pool").err


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden=7", "model.hidden: was 6, is 7"),
        ("model.build='towers:TwoTower'", "model"),
        ("optimizer.name='NAdam'", 'optimizer.name: was "RMSprop", is "NAdam"'),
        (
            "optimizer.centered=true",
            "optimizer.centered: was not there, is true, but RMSprop keeps other state with it",
        ),
        ("optimizer.momentum=0.9", "optimizer.momentum: was not there, is 0.9, but RMSprop keeps other state with it"),
        ("scheduler={name='StepLR', step_size=3}", "scheduler: was not there"),
    ],
)
def test_a_change_that_the_pool_cannot_follow_is_refused_by_name(override: str, words: str, holdfast: Commands) -> None:
    change(holdfast, 'name = "RAdam"', 'name = "RMSprop"')
    holdfast.train("pool", "--steps", 2)
    result = holdfast.train("pool", "--set", override)
    assert result.code == 1
    assert words in result.err


def test_a_changed_hyperparameter_of_any_optimizer_is_applied_from_the_next_step_on(holdfast: Commands) -> None:
    change(holdfast, 'name = "RAdam"', 'name = "RMSprop"\nalpha = 0.9')
    holdfast.train("pool", "--steps", 2)
    changed = read_config(RunConfig, holdfast.config, ["optimizer.alpha=0.8", "optimizer.lr=0.5"])
    with open_trainer(changed, holdfast.root / "pool") as trainer:
        group = trainer.dense_optimizer.param_groups[0]
        assert (group["alpha"], group["lr"]) == (0.8, 0.5)
        trainer.dense_optimizer.param_groups[0]["eps"] = 1e-3
        next(trainer.steps())
    change(holdfast, "alpha = 0.9\nlr = 0.01", "lr = 0.5")
    with open_trainer(read_config(RunConfig, holdfast.config), holdfast.root / "pool") as trainer:
        group = trainer.dense_optimizer.param_groups[0]
        assert (group["alpha"], group["lr"], group["eps"]) == (0.99, 0.5, 1e-3)


def test_what_a_schedule_sets_cannot_be_changed_beside_it(holdfast: Commands) -> None:
    holdfast.config.write_text(own_code.CONFIG + f"\n[scheduler]\nname = 'OneCycleLR'\n{SCHEDULES['OneCycleLR']}\n")
    holdfast.train("pool", "--steps", 2)
    for override in ("optimizer.lr=0.02", "optimizer.betas=[0.8, 0.9]"):
        assert "but [scheduler] sets it in every step" in holdfast.train("pool", "--set", override).err
    assert "scheduler.max_lr: was 0.02, is 0.03" in holdfast.train("pool", "--set", "scheduler.max_lr=0.03").err
    assert holdfast.train("pool", "--set", "optimizer.weight_decay=0.1").code == 0


def test_the_record_of_a_configuration_that_was_possible_before_is_the_same(holdfast: Commands) -> None:
    """It is a part of a pool's dense state, and so of its digest."""
    from cli_runs import CONFIG

    holdfast.config.write_text(CONFIG)
    plain = to_plain(read_config(RunConfig, holdfast.config))
    assert list(plain) == ["data", "validation", "embedding", "model", "optimizer", "pool", "train", "group", "device"]
    assert list(plain["data"]) == ["criteo_shape", "synthetic", "criteo", "parquet"]
    assert plain["validation"] == {"paths": [], "num_samples": 200}
    assert list(plain["model"].items()) == [("bottom", [8, 4]), ("top", [8, 1]), ("interaction", "dot")]
    assert list(plain["optimizer"].items()) == [
        ("name", "adam"), ("lr", 0.01), ("momentum", None), ("eps", None), ("betas", None), ("weight_decay", 0.0),
    ]  # fmt: skip
    change(holdfast, "[model]", '[model]\nkind = "dlrm"')
    assert to_plain(read_config(RunConfig, holdfast.config)) == plain


def test_a_plan_counts_the_dense_part_and_the_simulator_says_that_it_knows_dlrms_alone(holdfast: Commands) -> None:
    config = read_config(RunConfig, holdfast.config)
    source = open_source(config.data)
    parameters = sum(parameter.numel() for parameter in make_network(config, source).parameters())
    assert demand_of(config, source, None)[0].dense_bytes == 4 * parameters * 3
    with pytest.raises(ConfigError, match="the simulator knows the network of a DLRM alone"):
        model_of_run(config)


def test_the_dlrm_is_one_that_a_function_builds(holdfast: Commands) -> None:
    from cli_runs import CONFIG

    holdfast.config.write_text(CONFIG)
    holdfast.train("kind", "--steps", 3)
    change(holdfast, "[model]", '[model]\nbuild = "holdfast.models:build_dlrm"')
    holdfast.train("build", "--steps", 3)
    kind, build = (pool_digest(holdfast.root / name) for name in ("kind", "build"))
    assert kind == build


def test_keywords_beyond_the_old_ones_reach_the_old_optimizers(holdfast: Commands) -> None:
    change(holdfast, 'name = "RAdam"', 'name = "adam"\namsgrad = true')
    config = read_config(RunConfig, holdfast.config)
    assert to_plain(config)["optimizer"]["amsgrad"] is True
    made = config.optimizer.make([torch.nn.Parameter(torch.zeros(1))])
    assert made.defaults["amsgrad"] is True
    assert "optimizer.amsgrd: unknown key; did you mean amsgrad?" in refused(holdfast, "optimizer.amsgrd=true")
