"""What the interpreter cannot show: the kernels compile for an H100, to instructions that round as the core does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernel_cases import needs_triton

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, int, str, str]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [tuple(entry) for entry in json.loads(done.stdout)]


@needs_triton
def test_no_instruction_contracts_approximates_flushes_or_is_atomic(compiled):
    wrong = re.compile(r"\b(?:fma\.\w+\.f32|\w+\.approx\S*|div\.full\S*|\S+\.ftz\S*|atom\.\S*|red\.\S*)")
    for name, dim, dtype, ptx in compiled:
        assert wrong.findall(ptx) == [], f"{name}, dim {dim}, {dtype}"


@needs_triton
def test_rows_of_whole_lines_are_read_16_bytes_at_a_time(compiled):
    narrow = {"_scale_gradients", "_update_rows"}  # sums over a row are read by lanes
    for name, dim, dtype, ptx in compiled:
        if dim == 128 and name != "_start_keys":  # which reads no rows, but their records
            assert "ld.global.v4.b32" in ptx, f"{name}, dim {dim}, {dtype}"
            others = len(re.findall(r"ld\.global\.b32", ptx))
            assert name in narrow or others <= 40, f"{name}: {others} loads of one word"


@needs_triton
def test_an_update_stores_nothing_before_all_threads_of_its_tile_have_loaded(compiled):
    updates = [ptx for name, _, dtype, ptx in compiled if name == "_update_rows" and dtype == "torch.float32"]
    assert len(updates) == 10, "one for each optimizer, with keys and without"
    for ptx in updates:
        loads, stores = ([found.start() for found in re.finditer(what, ptx)] for what in (r"ld\.global", r"st\.global"))
        barriers = [found.start() for found in re.finditer(r"bar\.sync|barrier\.sync", ptx)]
        assert any(max(loads) < barrier < min(stores) for barrier in barriers)


@needs_triton
def test_another_batch_size_compiles_nothing_new(compiled):
    variants = Counter((name, dim) for name, dim, _, _ in compiled)
    # Bags are long or short; rows have few occurrences, or many; an optimizer each, with keys or without; copies there
    # and back, with state or without.
    most = {
        "_pooled_lookup": 2,
        "_sum_gradients": 2,
        "_sum_parts": 1,
        "_scale_gradients": 1,
        "_update_rows": 10,
        "_start_keys": 2,
        "_copy_rows": 4,
        "_gather_home": 2,
    }
    assert {name for name, _ in variants} == set(most)
    for (name, dim), count in variants.items():
        assert count <= most[name], f"{name}, dim {dim}: compiled {count} times"
