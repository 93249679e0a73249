# Each target sets up what it needs: a virtual environment, the package built from source.

TORCH := 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

.PHONY: demo test library ctest asan tsan fuzz-text pytest pytest-modules pytest-others device fuzz fuzz-stale fuzz-inside test-torch sweep coverage onnx-nodes architectures gpu cuda-check hip-check bench lint fmt clean

# PyTorch comes first and pinned: a range would let pip take a build with CUDA.
$(VENV)/tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check "setuptools>=77" wheel
	touch $@

SOURCES := $(shell find csrc cuda -name '*.[ch]' -o -name '*.def') setup.py pyproject.toml

$(VENV)/installed: $(VENV)/tools $(SOURCES)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[dev,examples,clients]"
	touch $@

demo: $(VENV)/installed
	$(BIN)/python examples/train_gpt2.py $(ARGS)

test: lint ctest asan tsan fuzz-text pytest

# The C library that trains without Python, and its headers; ARGS=--prefix=/usr/local to have them there.
library: $(VENV)/installed
	$(BIN)/python setup.py -q library $(ARGS)

ctest: $(VENV)/tools
	$(BIN)/python setup.py -q ctest --werror

asan: $(VENV)/tools
	$(BIN)/python setup.py -q ctest --werror --sanitize

tsan: $(VENV)/tools
	$(BIN)/python setup.py -q ctest --werror --thread

# Graphs of randomly changed text: ARGS='--seconds 600 --seed 1' for more.
fuzz-text: $(VENV)/tools
	$(BIN)/python setup.py -q fuzz $(ARGS)

# In two processes, as most of it runs in Python: each has one of two cores. Of long tables one row in EVERY.
EVERY := 8
pytest: $(VENV)/installed
	$(MAKE) --jobs=2 --output-sync=line VENV=$(VENV) OMP_WAIT_POLICY=passive pytest-modules pytest-others

pytest-modules: $(VENV)/installed
	$(BIN)/python -m pytest --every $(EVERY) tests/module

pytest-others: $(VENV)/installed
	$(BIN)/python -m pytest --every $(EVERY) tests --ignore=tests/module

# What the CPU passes, on the device of tests/c; the tests run a part of it.
device: $(VENV)/installed
	$(BIN)/python -m pytest --device tests/ops tests/passes tests/plan tests/module tests/fuzz/test_programs.py $(ARGS)

# What the CPU passes, on the emulated GPU of tests/cuda; ops that have no kernel for it are skipped.
gpu: $(VENV)/installed
	$(BIN)/python -m pytest --gpu tests/ops $(ARGS)

# Device code through the compilers for GPUs, none being needed; ARGS='--every 8' for some of it.
cuda-check: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[cuda]"
	$(BIN)/python tests/cuda/check.py $(ARGS)

# The same sources for AMD's GPUs, by Debian's clang-19 (HIPCLANG=... for another).
hip-check: $(VENV)/installed
	$(BIN)/python tests/cuda/check.py --architectures gfx90a gfx942 gfx1100 $(ARGS)

# The Python tests against another PyTorch, in an environment of its own: make test-torch TORCH=2.15.0
test-torch:
	$(MAKE) VENV=.venv-torch-$(TORCH) pytest

# PyTorch's own samples of its operators and modules, all of them; ARGS='--ops REGEX' for some.
sweep: $(VENV)/installed
	$(BIN)/python tests/sweep/sweep.py $(ARGS)

coverage: $(VENV)/installed
	$(BIN)/python tests/sweep/sweep.py --coverage

# ONNX's own tests on ortmodule_c.backend, and docs/onnx-nodes.md.
onnx-nodes: $(VENV)/installed
	$(BIN)/python tests/onnx_files/nodes.py --coverage

# Small models of transformers, three steps each, and docs/architectures.md; ARGS="'BERT*'" for some.
architectures: $(VENV)/installed
	$(BIN)/python tests/architectures/architectures.py $(ARGS)

fuzz: $(VENV)/installed
	$(BIN)/python tests/fuzz/fuzz.py $(ARGS)

# Objects that a forward reads, changed between steps: `make fuzz-stale ARGS='--seeds 2000:9000'` for others.
fuzz-stale: $(VENV)/installed
	$(BIN)/python tests/fuzz/stale.py $(ARGS)

# Objects that a forward itself changes: `make fuzz-inside ARGS='--capture dynamo --seeds 1000:3000'` for others.
fuzz-inside: $(VENV)/installed
	$(BIN)/python tests/fuzz/inside.py $(ARGS)

# Whole training steps of large models; ARGS=--wide: of ordinary ones of all kinds; ARGS=--ops: single layers.
# docs/benchmarks.md is drawn by benchmarks/page.py of what ARGS='--json benchmarks/results/NAME.json' leaves.
bench: $(VENV)/installed
	$(BIN)/python benchmarks/run.py $(ARGS)

# Device code too, some of it, where there is a compiler for GPUs.
lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.[ch]' 'cuda/*.[ch]' 'examples/*.c' 'tests/*.[ch]' 'tests/*.cpp')
	$(BIN)/python tests/cuda/check.py --found --every 20 --architectures sm_90

fmt: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.[ch]' 'cuda/*.[ch]' 'examples/*.c' 'tests/*.[ch]' 'tests/*.cpp')

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info python/ortmodule_c/*.so
