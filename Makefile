# Every verb makes what it is missing. A fresh machine needs python3 (3.11 or later, with venv), g++ and make.
PYTHON ?= python3
JOBS ?= $(shell nproc)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CMAKE := $(BIN)/cmake

CORE_SOURCES := CMakeLists.txt $(shell find core tests/core benchmarks/core -name '*.cpp' -o -name '*.h')
CPP_FILES := $(filter %.cpp %.h,$(CORE_SOURCES))

.PHONY: help train test test-all test-cxl test-oldest wheel coverage smoke filesystem-tools lint format docs stub sanitize soak fuzz fuzz-built bench bench-gpu larger relaxed swarm clean
.DEFAULT_GOAL := help

help:  ## print this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*##/\1\t/' | expand -t 12

# Where nothing but training was asked for yet, nothing else is installed.
train: $(if $(wildcard .venv/.installed),build/.native,.venv/.trains)  ## train the example; interrupt it, run it again, and it goes on where it was
	$(BIN)/holdfast train examples/criteo_synthetic.toml --pool runs/criteo_synthetic

test: SAMPLE := --sample 2 $(DRAW:%=--draw %)
test: LEFT_OUT := thorough
test: test-all  ## every claim in minutes: two cases of a test that has more, and nothing that is marked thorough

# How many of the core's tests run at once: they wait for each other's threads, and for the disk, half of the time.
BESIDE := $(shell expr $(JOBS) + $(JOBS))

# What is left out of the core's tests, by label: where the whole is run, samples of it are not.
LEFT_OUT := sample
# Bytecode is kept whatever the environment says: hundreds of processes import the same modules. Whoever has nothing left
# to do takes tests from another's files: those that are few and long kept one processor waiting for minutes at the end.
test-all: build/.native  ## every test with all of its cases, in a quarter of an hour; before a release
	$(BIN)/ctest --test-dir build/python --output-on-failure --no-tests=ignore --label-exclude $(LEFT_OUT) --parallel $(BESIDE)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(shell expr $(JOBS) + 1) --dist worksteal $(SAMPLE)

# Beside .venv, with a torch of its own, which is 3 GB: whenever pyproject.toml allows other releases, and before one of ours.
# The guest is made of the packages that are pinned, and has no part in it.
OLDEST := .venv-oldest/bin/python -m
test-oldest:  ## a sample of the tests of Python with the oldest packages that pyproject.toml allows, ten minutes
	test -d .venv-oldest || $(PYTHON) -m venv .venv-oldest
	$(OLDEST) pip install -q -c constraints-oldest.txt scikit-build-core nanobind cmake ninja
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(OLDEST) pip install -q -c constraints-oldest.txt --no-build-isolation \
	  -Cbuild-dir=build/oldest -e '.[bench,dev,export,sim,tensorboard]'
	$(OLDEST) pytest --numprocesses $(shell expr $(JOBS) + 1) --dist worksteal --sample 1 --draw 1 --ignore tests/cxl

# Built where the tests build, so that nothing is compiled twice. auditwheel names the oldest glibc that it runs on.
wheel: build/.native  ## dist/*.whl, and try it: a bare environment, no compiler, no AVX
	rm -rf build/wheel dist && mkdir -p build/wheel
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) wheel -q --no-deps --no-build-isolation -w build/wheel -Cbuild-dir=build/python \
	  -Ccmake.define.HOLDFAST_WERROR=ON -Ccmake.define.HOLDFAST_BUILD_TESTS=ON .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --only-plat -w dist build/wheel/*.whl
	$(BIN)/python tests/wheel/try_wheel.py dist/*.whl

filesystem-tools:  ## what tests/filesystems makes disks with, where Debian's apt and root can be had; else they are skipped
	@{ command -v mkfs.ext4 && command -v mkfs.xfs && command -v mkfs.btrfs && command -v losetup && command -v nbdfuse; } >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	    && apt-get install -qq -y --no-install-recommends e2fsprogs xfsprogs btrfs-progs mount nbdfuse; } \
	  || echo "filesystem-tools: install e2fsprogs, xfsprogs, btrfs-progs, mount and nbdfuse as root for tests/filesystems" >&2

test-cxl: build/.native  ## power cuts in a virtual machine, on CXL memory and on a disk; needs Debian's apt, and root once
	$(BIN)/python tests/cxl/power_cuts.py

# Tests that fail in the measurement (their time limits are for an optimized core) do not end it: what counts is what was
# reached, and `make test` says what holds. Tests of Python run with an interpreter of their own, which has the core that
# counts; .venv keeps the installed one.
COVERAGE := $(abspath build/coverage)
COVERED_PYTHON_TESTS := crash distributed filesystems format $(addprefix device/test_,beside_training.py keys_in_slots.py ways.py) \
  $(addprefix unit/test_,captures.py cli_row_log.py dial.py digest.py ground.py group_reading.py group_snapshot.py importing_tables.py keys.py \
  log_size.py look_ahead.py pool_options.py put_rows.py reading.py relaxed_keys.py relaxed_lookup.py resizing.py snapshot.py state_tree.py transfer.py)
coverage: .venv/.installed  ## which branches of what makes things durable the tests reach, by room; an hour; wants clang++
	@for tool in clang++ llvm-profdata llvm-cov; do command -v $$tool >/dev/null \
	  || { echo "coverage: install clang and its llvm tools (of Debian: clang, llvm): there is no $$tool" >&2; exit 1; }; done
	$(CMAKE) -S . -B $(COVERAGE) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
	  -DCMAKE_CXX_COMPILER=clang++ -DHOLDFAST_BUILD_TESTS=ON -DHOLDFAST_COVERAGE=ON
	$(CMAKE) --build $(COVERAGE) --parallel $(JOBS)
	rm -rf $(COVERAGE)/python $(COVERAGE)/profiles && mkdir $(COVERAGE)/python
	$(BIN)/python tests/coverage/interpreter.py $(COVERAGE)/interpreter
	-$(BIN)/ctest --test-dir $(COVERAGE) --output-on-failure --label-exclude $(LEFT_OUT) --parallel $(JOBS)
	-COVERAGE_PROCESS_START=$(abspath pyproject.toml) COVERAGE_FILE=$(COVERAGE)/python/data \
	  $(COVERAGE)/interpreter/bin/python -m pytest -q --timeout=900 --numprocesses $(JOBS) --dist loadfile \
	  $(addprefix tests/,$(COVERED_PYTHON_TESTS))
	$(BIN)/python tests/coverage/rooms.py $(COVERAGE)

# What takes hours otherwise, so that it cannot rot unseen: each part ends when its time is over, or at its first failure.
SOAKS := tests/crash/test_soak.py tests/format/test_corruption.py tests/power/test_verbs.py
smoke: build/.native fuzz-built  ## half a minute of fuzz, a minute of soaks, and two power cuts of each medium, or of MEDIUM
	$(MAKE) --no-print-directory --jobs=$(JOBS) build/powered-off build/fuzzed FUZZ_SECONDS=30 $(addprefix build/soaked/,$(SOAKS)) $(WITH)

# An emulated machine takes two minutes to boot, and one for each medium, on one processor: the others soak meanwhile, and
# make what WITH names, of which .ci/run has some. (Where more runs than there are processors, as when ninja takes all of them
# for the fuzzer, all of it takes longer by a minute and a half.)
.PHONY: build/powered-off $(addprefix build/soaked/,$(SOAKS))
build/powered-off:
	$(BIN)/python tests/cxl/power_cuts.py --cuts 2 --steps 30 $(MEDIUM:%=--medium %)

$(addprefix build/soaked/,$(SOAKS)): build/soaked/%:
	timeout --signal=INT 20 $(BIN)/python -m pytest -q -x -m soak --timeout=0 $* || [ $$? -eq 124 ]

lint: build/.native  ## style, types, and the checked-in stub of the core
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)
	$(BIN)/python -m nanobind.stubgen -q -m holdfast._core -o build/_core.pyi
	diff -u src/holdfast/_core.pyi build/_core.pyi

format: .venv/.installed  ## rewrite the sources the way lint wants them
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CPP_FILES)

docs: .venv/.installed  ## rewrite docs/API.md and docs/CONFIG.md from the code
	$(BIN)/python docs/reference.py

simulator: .venv/.installed  ## fit the simulator's values anew, and rewrite them, its pages' tables and figures
	$(BIN)/python docs/simulator.py

stub: build/.native  ## rewrite src/holdfast/_core.pyi from the built core
	$(BIN)/python -m nanobind.stubgen -q -m holdfast._core -o src/holdfast/_core.pyi

sanitize: .venv/.installed  ## the core's tests under ASan + UBSan, then under TSan
	$(MAKE) --no-print-directory build/asan.tested build/tsan.tested

soak: build/.native  ## long random runs, and the fuzzer where there is clang++
	build/python/test_crash_states 1 1000 10
	build/python/test_block_crash_states 1 1000 10
	build/python/test_refused_calls 1 1
	$(BIN)/python -m pytest -m soak --timeout=0
	$(BIN)/python tests/swarm/swarm.py --seconds 3600 --jobs $(JOBS) --count
	! command -v clang++ >/dev/null || $(MAKE) --no-print-directory fuzz

swarm: build/.native  ## random combinations of everything, with fresh seeds, until one fails or it is interrupted
	$(BIN)/python tests/swarm/swarm.py --jobs $(JOBS) --failures 1

# Inputs that found something are kept in build/fuzz/found; give them a test by a copy in tests/fuzz/found.
FUZZ_SECONDS ?= 600
fuzz: fuzz-built  ## damaged pools under a coverage-guided fuzzer, for FUZZ_SECONDS (600); wants clang++
	$(MAKE) --no-print-directory build/fuzzed

.PHONY: build/fuzzed
build/fuzzed:
	mkdir -p build/fuzz/inputs build/fuzz/found
	build/fuzz/fuzz_open -max_total_time=$(FUZZ_SECONDS) \
	  -timeout=20 -rss_limit_mb=2048 -malloc_limit_mb=512 -max_len=96 -len_control=0 -use_value_profile=1 -print_final_stats=1 \
	  -artifact_prefix=build/fuzz/found/ build/fuzz/inputs tests/fuzz/found

fuzz-built: .venv/.installed
	$(CMAKE) -S . -B build/fuzz -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DCMAKE_CXX_COMPILER=clang++ \
	  -DHOLDFAST_BUILD_PYTHON=OFF -DHOLDFAST_FUZZ=ON -DHOLDFAST_SANITIZE=address,undefined,fuzzer-no-link
	+$(CMAKE) --build build/fuzz $(SHARED_JOBS) --target fuzz_open

bench: build/.native build/.bench .venv-peers/.installed  ## side by side with FBGEMM, TorchRec and torch.nn.EmbeddingBag
	$(BIN)/python benchmarks/run.py

# Without .venv, which a machine with a GPU may have no network to make: PYTHON has torch, Triton and NumPy there. If it
# has no holdfast, the core is built for it, with cmake and nanobind (of PYTHON, or on PYTHONPATH).
bench-gpu:  ## the device path on a GPU, 8 minutes; with PYTHON's torch, and without .venv
	{ $(PYTHON) -c 'import holdfast._core' 2>/dev/null && rm -rf build/gpu/lib; } \
	  || $(MAKE) --no-print-directory build/gpu/holdfast
	PYTHONPATH=build/gpu/lib:benchmarks$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m gpu

larger: build/.native build/larger/.installed  ## tables larger than memory, beside mapped files and RocksDB; an hour
	cd benchmarks && ../$(BIN)/python -m larger

relaxed: build/.native  ## what relaxed recovery costs in AUC and log-loss; ten minutes of CPU
	cd benchmarks && ../$(BIN)/python -m relaxed

clean:  ## remove what was built; environments and runs stay
	rm -rf build dist

# .venv: the pinned packages, and holdfast itself, whose core is compiled while they come. It is editable: edits of Python
# need nothing more. Only where a module became a package, or went: rm .venv/.installed, since the install knows modules by
# their files.
PACKAGES_OF := import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["dependencies"], *sum((project["optional-dependencies"][extra] for extra in sys.argv[1:]), []), sep="\n")
INSTALL = $(MAKE) --no-print-directory --jobs=2 packages-installed core-installed

.PHONY: packages-installed core-installed
packages-installed:
	$(BIN)/python -c '$(PACKAGES_OF)' $(EXTRAS) > .venv/packages.txt
	$(PIP) install -q --no-warn-conflicts -c constraints.txt -r .venv/packages.txt
core-installed:
	MAKEFLAGS= CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(PIP) install -q --no-deps --no-build-isolation -Cbuild-dir=build/python \
	  -Ccmake.define.HOLDFAST_WERROR=ON -Ccmake.define.HOLDFAST_BUILD_TESTS=$(TESTS) -e .

.venv/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) install -q -c constraints.txt scikit-build-core nanobind cmake ninja
	touch $@

.venv/.trains: .venv/.made $(filter-out tests/% benchmarks/%,$(CORE_SOURCES))
	$(INSTALL) EXTRAS= TESTS=OFF
	touch $@

.venv/.installed: .venv/.made
	$(INSTALL) EXTRAS='bench dev export kernels sim tensorboard' TESTS=ON
	touch $@

# Edits of C++ are built incrementally and installed over the module of the editable install. A build folder that was
# removed (make clean) or never made is made by pip.
build/.native: .venv/.installed $(CORE_SOURCES)
	test -f build/python/build.ninja || { rm .venv/.installed; $(MAKE) --no-print-directory .venv/.installed; }
	$(CMAKE) --build build/python --parallel $(JOBS)
	$(CMAKE) --install build/python --strip \
	  --prefix "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')"
	touch $@

# Under a make that runs several jobs, ninja takes turns with the others: it knows make's job server.
SHARED_JOBS = $(if $(findstring --jobserver,$(MAKEFLAGS)),,--parallel $(JOBS))
SANITIZERS_asan := address,undefined
SANITIZERS_tsan := thread
.PHONY: build/asan.built build/tsan.built build/asan.tested build/tsan.tested
build/asan.built build/tsan.built: build/%.built: .venv/.installed
	$(CMAKE) -S . -B build/$* -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DHOLDFAST_BUILD_PYTHON=OFF \
	  -DHOLDFAST_BUILD_TESTS=ON -DHOLDFAST_WERROR=ON -DHOLDFAST_SANITIZE=$(SANITIZERS_$*)
	+$(CMAKE) --build build/$* $(SHARED_JOBS)

# Without address randomisation where that is allowed: older TSan runtimes cannot start under much of it.
build/asan.tested build/tsan.tested: build/%.tested: build/%.built
	$$(setarch -R true 2>/dev/null && echo setarch -R) $(BIN)/ctest --test-dir build/$* --output-on-failure \
	  --no-tests=ignore --label-exclude $(LEFT_OUT) --parallel $(BESIDE)

# What the comparison needs of C++, for this machine's CPU.
build/.bench: build/.native $(wildcard benchmarks/core/*.cpp)
	$(CMAKE) -S . -B build/bench -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) -DHOLDFAST_BUILD_PYTHON=OFF \
	  -DHOLDFAST_BUILD_BENCHMARKS=ON
	$(CMAKE) --build build/bench --parallel $(JOBS) --target kernels_bench log_store_bench addresses_bench bare
	touch $@

# The peers pin other packages than holdfast, and every one of them: see the head of the file.
.venv-peers/.installed: benchmarks/requirements-peers.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip --disable-pip-version-check install -q -c $< torch
	.venv-peers/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	touch $@

# holdfast in a folder of its own, for an interpreter in which nothing can be installed.
GPU_CMAKE := $(or $(wildcard $(CMAKE)),cmake)
.PHONY: build/gpu/holdfast
build/gpu/holdfast:
	@for module in torch numpy nanobind; do $(PYTHON) -c "import $$module" 2>/dev/null \
	  || { echo "bench-gpu: $(PYTHON) has no $$module: install it, or put its folder on PYTHONPATH" >&2; exit 1; }; done
	@command -v $(GPU_CMAKE) >/dev/null || { echo "bench-gpu: building the core needs cmake on PATH" >&2; exit 1; }
	$(GPU_CMAKE) -S . -B build/gpu \
	  -DPython_EXECUTABLE="$$($(PYTHON) -c 'import sys; print(sys.executable)')"
	$(GPU_CMAKE) --build build/gpu --parallel $(JOBS)
	rm -rf build/gpu/lib && mkdir -p build/gpu/lib && cp -R src/holdfast build/gpu/lib
	$(GPU_CMAKE) --install build/gpu --prefix build/gpu/lib --strip

# What tables larger than memory are measured against, beside .venv and not in it.
build/larger/.installed: benchmarks/requirements-larger.txt .venv/.installed
	$(PIP) install -q --no-deps --upgrade --target build/larger -r $<
	touch $@
