"""A run says what it was computed with, and a resume under others says so once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import holdfast
from holdfast import _core
from holdfast.admin.digest import _dense_digest, digest_pool
from holdfast.state import state_tree
from holdfast.state.provenance import OF_RANKS, RECORD, Provenance, changes
from holdfast.state.reproducibility import check_model

LIFE = """
import json, sys, warnings
import torch, holdfast
directory, num_threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(num_threads)
net = torch.nn.Linear(4, 1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with holdfast.Pool(directory) as pool:
        rows = holdfast.EmbeddingBagCollection(
            pool,
            [holdfast.EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])],
            optimizer=holdfast.SGD(lr=0.1),
        )
        checkpoint = holdfast.Checkpoint(pool, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        checkpoint.resume()
        rows({"f": (torch.tensor([1]), torch.tensor([0, 1]))}).values().sum().backward()
        rows.optimizer.step()
        checkpoint.commit(1)
print(json.dumps([[str(one.message), one.category.__name__, one.filename] for one in caught]))
"""


def live(directory: Path, num_threads: int, **variables: str) -> list[list[str]]:
    """The warnings of one life of a user's script in a fresh process."""
    environment = {**os.environ, "MKL_CBWR": "AUTO,STRICT", **variables}
    process = subprocess.run(
        [sys.executable, "-c", LIFE, str(directory), str(num_threads)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def make_checkpoint(directory: Path) -> tuple[holdfast.Pool, holdfast.Checkpoint]:
    pool = holdfast.Pool(directory)
    table = holdfast.EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])
    holdfast.EmbeddingBagCollection(pool, [table], optimizer=holdfast.SGD(lr=0.1))
    torch.manual_seed(1)
    net = nn.Linear(4, 1)
    return pool, holdfast.Checkpoint(pool, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))


@pytest.fixture
def num_threads():
    """As many as there are outside, again after the test."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


@pytest.mark.thorough
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="no other instruction set to choose"
)
def test_a_resume_under_others_names_each_once_and_the_next_one_under_the_same_nothing(pool_root):
    assert live(pool_root / "pool", 2) == []
    others = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE,STRICT"}
    ((said, category, file),) = live(pool_root / "pool", 1, **others)
    assert category == "RuntimeWarning"
    assert file == "<string>"  # the user's line
    assert "not with the bits that it would have had without these changes: " in said
    for difference in (
        "threads: was 2, is 1 (PyTorch cuts its sums by threads)",
        f"instruction set: was {torch.backends.cpu.get_cpu_capability()}, is DEFAULT",
        *(["mkl: was AUTO,STRICT, is COMPATIBLE,STRICT"] if torch.backends.mkl.is_available() else []),
    ):
        assert said.count(difference) == 1
    assert live(pool_root / "pool", 1, **others) == []


def test_a_digest_does_not_depend_on_what_computed_equal_states(pool_root, num_threads):
    digests = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pool, checkpoint = make_checkpoint(pool_root / str(threads))
        with pool:
            checkpoint.resume()
        structure, tensors = _core.Reader(str(pool_root / str(threads))).dense_state()[1:]
        assert state_tree.unpack(structure, tensors)[RECORD]["threads"] == threads
        digests.append(digest_pool(_core.Reader(str(pool_root / str(threads)))).whole)
    assert digests[0] == digests[1]


def test_a_digest_does_not_depend_on_what_other_ranks_computed_with():
    model = {"model": {"weight": torch.ones(3)}}
    of_ranks = {"1": {"threads": 2}}
    trees = [model, {**model, OF_RANKS: of_ranks}, {**model, RECORD: {"threads": 1}}]
    digests = set()
    for tree in trees:
        structure, (tensor,) = state_tree.flatten(tree, ordered=True)
        state = 0, structure, tensor.numpy().tobytes()
        digests.add(_dense_digest(Mock(dense_state=Mock(return_value=state))))
    assert len(digests) == 1


def test_a_state_of_before_there_was_a_record_loads_without_a_word(pool_root, monkeypatch):
    pool, checkpoint = make_checkpoint(pool_root / "pool")
    monkeypatch.setattr(Provenance, "record", lambda self: {})
    with pool:
        checkpoint.resume()
    monkeypatch.undo()
    pool, checkpoint = make_checkpoint(pool_root / "pool")
    with pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.resume()


def test_threads_that_change_while_a_run_goes_on_are_named_once(pool_root, num_threads):
    torch.set_num_threads(2)
    pool, checkpoint = make_checkpoint(pool_root / "pool")
    with pool:
        checkpoint.resume()
        checkpoint.commit(1)
        torch.set_num_threads(1)
        with pytest.warns(RuntimeWarning, match="without this change: threads: was 2, is 1"):
            checkpoint.commit(2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.commit(3)


def test_of_two_processors_only_what_one_of_them_lacks_is_named():
    (line,) = changes({"processor": "GenuineIntel avx avx2 amx_bf16"}, {"processor": "AuthenticAMD avx avx2"})
    assert line.startswith("processor: was one with GenuineIntel amx_bf16, is one with AuthenticAMD (")


def test_distributed_data_parallel_is_warned_of_by_name():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        problems = check_model(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), warn=False)
    finally:
        torch.distributed.destroy_process_group()
    assert [problem.split()[0] for problem in problems] == ["DistributedDataParallel"]
    assert check_model(nn.Linear(2, 2)) == []


def test_kernels_that_are_chosen_by_measuring_are_warned_of_by_name(monkeypatch):
    class OnADevice(nn.Module):
        def parameters(self, recurse: bool = True):
            return iter([torch.empty(1, device="meta").as_subclass(_Pretended)])

    class _Pretended(torch.Tensor):
        @property
        def device(self):
            return torch.device("cuda")

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    problems = check_model(OnADevice(), warn=False)
    assert [problem.split()[0] for problem in problems] == [
        "torch.backends.cudnn.benchmark",
        "torch.use_deterministic_algorithms",
    ]
