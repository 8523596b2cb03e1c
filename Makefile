# `make serve` and `make test` each do all their set-up: a virtual environment in .venv with every distribution of
# this folder, installed so that edits count at once. Only Python 3.11 or newer with pip is needed.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?=
ARGS ?=
WORKERS ?= 2

PLUGINS := $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/*/pyproject.toml)))
EDITABLE := -e './kernels[cpu]' -e './core[demo]' $(foreach plugin,$(PLUGINS),-e ./$(plugin))
BUILD_TOOLS := hatchling editables
TEST_TOOLS := build pytest hypothesis ruff mypy types-PyYAML types-tqdm pytest-xdist pytest-timeout httpx openai scipy psutil triton
READY := $(VENV)/ready
TOOLS_READY := $(VENV)/tools-ready

.PHONY: serve test check unit clean

serve: $(READY)
	$(BIN)/serve $(MODEL) $(ARGS)

test: check unit

# What needs no test run: style and types.
check: $(TOOLS_READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

# One thread each: the two workers share the cores, and results must not depend on the number of threads.
unit: $(TOOLS_READY)
	OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

# torch comes first and alone, so that nothing else decides which build of it is taken.
$(READY): constraints.txt core/pyproject.toml kernels/pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS)) Makefile
	@$(PYTHON) -c 'import sys; sys.exit("swapserve needs Python 3.11 or newer: make PYTHON=python3.11 …" \
		if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(BUILD_TOOLS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation $(EDITABLE)
	touch $(READY)

# Apart from what serving needs: some of the tools are imported by torch where they are found, and take memory.
$(TOOLS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TEST_TOOLS)
	touch $(TOOLS_READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
