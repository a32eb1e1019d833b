"""The how-to pages do what they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from held_port import held_port

import holdfast
from holdfast import _core
from pages import ROOT, blocks_of, reader_environment, run_blocks, write_files

pytestmark = pytest.mark.thorough

HOWTO = ROOT / "docs/howto"
PEERS_PYTHON = Path(os.environ.get("HOLDFAST_PEERS_PYTHON", ROOT / ".venv-peers/bin/python"))


@pytest.mark.timeout(300)
def test_a_run_moves_to_a_log_store(tmp_path: Path) -> None:  # on the disk: a restored log store has a log of 1 GiB
    run_blocks(HOWTO / "move-to-nvme.md", tmp_path)


def test_a_run_goes_on_with_the_next_day(pool_root: Path) -> None:
    (said,) = run_blocks(HOWTO / "train-on-new-data.md", pool_root)
    assert "trained to step 32;" in said
    assert "training goes on at step 33 of 64, on data that begin after sample 2048" in said
    assert "trained to step 64;" in said


def test_a_run_goes_on_under_another_schema(pool_root: Path) -> None:
    (said,) = run_blocks(HOWTO / "change-the-schema.md", pool_root)
    assert "new: brand, city, top.0.weight" in said
    left_out = re.search("not used: (.*)", said)
    assert left_out and left_out[1] == "embedding_bags.shop.weight, model.top.0.weight, optimizer.shop.momentum1"
    assert said.count("trained to step 63;") == 2


def test_a_model_of_embedding_bags_moves_into_a_pool(pool_root: Path) -> None:
    run_blocks(HOWTO / "bring-an-nn-embedding-model.md", pool_root)
    before = runpy.run_path(str(pool_root / "before.py"))["Before"]()
    assert before(torch.tensor([3, 4]), torch.tensor([1, 2, 3]), torch.tensor([0, 2])).shape == (2,)


def test_a_trainers_callback_commits_once_for_each_step_of_the_optimizer(pool_root: Path) -> None:
    (code,) = (block.text for block in blocks_of(HOWTO / "keep-your-trainer.md") if block.language == "python")
    page = {"holdfast": holdfast, "lightning": SimpleNamespace(Callback=object)}
    exec(code, page)  # noqa: S102

    def fit(last_step: int) -> int:
        """As Lightning does, with an accumulation of two batches. Returns where the pool is."""
        with holdfast.Pool(pool_root / "pool", seed=1) as pool:
            table = holdfast.EmbeddingBagConfig(name="item", num_embeddings=9, embedding_dim=4, feature_names=["item"])
            rows = holdfast.EmbeddingBagCollection(pool, [table])
            module = torch.nn.Linear(4, 1)
            trainer = SimpleNamespace(
                optimizers=[torch.optim.Adam(module.parameters())],
                lr_scheduler_configs=[],
                ckpt_path=None,
                global_step=0,
                should_stop=False,
            )
            durable = page["Durable"](pool, last_step)
            durable.on_fit_start(trainer, module)
            number = 0
            while not trainer.should_stop:
                module(rows({"item": torch.arange(9)}).values()).sum().backward()
                number += 1
                if number % 2 == 0:
                    trainer.optimizers[0].step()
                    rows.optimizer.step()
                    trainer.global_step += 1
                durable.on_train_batch_end(trainer, module, None, None, number)
            assert number == 2 * trainer.global_step
            return pool.step

    assert [fit(3), fit(5)] == [3, 5]
    with pytest.raises(ValueError, match="leave ckpt_path = last out"):
        page["Durable"](None, 5).on_fit_start(SimpleNamespace(ckpt_path="last"), None)


def test_sequences_train(pool_root: Path) -> None:
    (said,) = run_blocks(HOWTO / "train-on-sequences.md", pool_root)
    assert float(said.split()[-1]) < 0.6, said  # ln 2 where nothing is learnt


def test_a_run_trains_on_ids_that_nobody_counted(pool_root: Path) -> None:
    drifting, texts, own_loop = run_blocks(HOWTO / "use-keys.md", pool_root)
    assert "item: " in drifting and "rows of keys that were left behind" in drifting
    assert "item: " in texts and " keys" in texts and "no two texts share a key" in texts
    assert re.search(r"100 steps, loss 0\.00\d, a row \d\.\d long", own_loop), own_loop


def test_a_model_of_ones_own_trains_from_the_command_line(pool_root: Path) -> None:
    run_blocks(HOWTO / "train-your-own-model.md", pool_root)


def test_a_torchrec_model_moves_into_a_pool(tmp_path: Path) -> None:
    if not PEERS_PYTHON.exists():
        pytest.skip("no peers' environment: `make bench` makes it, or set HOLDFAST_PEERS_PYTHON")
    package = tmp_path / "lib/holdfast"
    package.mkdir(parents=True)
    for path in [*(ROOT / "src/holdfast").iterdir(), Path(_core.__file__)]:
        if path.name != "__pycache__":
            (package / path.name).symlink_to(path)
    run_blocks(HOWTO / "bring-a-torchrec-model.md", tmp_path, python=PEERS_PYTHON, path=package.parent)


@pytest.mark.timeout(300)
def test_two_machines_train_one_pool(pool_root: Path) -> None:
    """Two folders of one machine stand for the two machines, each with storage of its own."""
    page = HOWTO / "move-to-two-machines.md"
    machines = []
    with held_port() as port:
        for number, block in enumerate(block for block in blocks_of(page) if block.language == "bash"):
            folder = pool_root / f"machine-{number}"
            folder.mkdir()
            write_files(page, folder)
            command = block.text.replace("10.0.0.1", "127.0.0.1").replace("eth0", "lo").replace("29500", str(port))
            machines.append(
                subprocess.Popen(
                    ["bash", "-euo", "pipefail", "-c", command],
                    cwd=folder,
                    env=reader_environment(),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [machine.communicate(timeout=250)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert "trained to step 63" in outputs[0]
    assert (pool_root / "machine-0/pool/dense").is_dir()
    assert (pool_root / "machine-1/pool/group.json").exists()
    assert not (pool_root / "machine-1/pool/dense").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "launcher", [["python"], ["torchrun", "--standalone", "--nproc-per-node", "2"]], ids=["1", "2"]
)
def test_a_loop_of_ones_own_runs_on_any_number_of_ranks(launcher: list[str], pool_root: Path) -> None:
    write_files(HOWTO / "move-to-two-machines.md", pool_root)
    done = subprocess.run(
        [*launcher, "loop.py"], cwd=pool_root, env=reader_environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ranks = 1 if launcher == ["python"] else 2
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: step 20" in done.stdout
