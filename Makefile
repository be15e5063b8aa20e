# Works on a fresh machine with Python 3.10 or newer: the first target that needs the environment creates it.
#
#   PYTHON  the interpreter for the virtual environment
#   VENV    the virtual environment; use one for each Python that you test with
#   TORCH   the torch to install first: a requirement or the path of a wheel, with or without pip options
#   ARGS    extra arguments for pytest, the demo or the benchmarks
#   JOBS    number of parallel test processes; 0 runs the tests in this one (for -s and --pdb)
#   SECONDS duration of each test of `make chaos`; SEED repeats an earlier run

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 3
SECONDS ?= 600
SEED ?=

VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
RDMA := $(VENV)/.stamp-rdma
# Each process takes whole files, because the tests of a file share slow fixtures.
BESIDE := -n $(JOBS) --dist loadfile --no-loadscope-reorder
PIP := $(PY) -m pip --disable-pip-version-check --quiet
NPM := $(PY) labextension/builder.py
MODULES := node_modules/.stamp-all

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo lab notebooks test test-ts test-quick test-wide test-failed test-soak test-gpu test-ops chaos check lint types spelling fmt bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## create .venv with all dependencies

$(STAMP): pyproject.toml runtime/pyproject.toml package-lock.json
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is required; choose an interpreter with PYTHON=")'
	@test -x $(PY) || { echo "creating $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@echo "installing Monarch Kernel, its dependencies and its tools"
	@$(PIP) install --editable ./runtime --editable '.[test,dev,notebooks]'
	@# pip compiles what it copies. Without this, each process compiles the package again if Python may not write files.
	@$(PY) -m compileall -q monarch_kernel runtime
	@test -f monarch_kernel/labextension/package.json || echo "warning: no JupyterLab extension and no live views, because the front end was not built; run 'make venv' again when npm's registry can be reached"
	@touch $@

# All packages of the front end; the build alone needs two.
$(MODULES): package-lock.json | $(STAMP)
	@echo "installing the packages of the front end"
	@$(NPM) ci --ignore-scripts --silent
	@touch $@

# NIXL does not support every platform; without it, its tests are skipped.
$(RDMA): $(STAMP)
	@echo "installing the dependencies of RDMA transfers"
	@$(PIP) install --editable './runtime[rdma]' || echo "NIXL is not available on this platform; skipping RDMA tests"
	@touch $@

demo: $(STAMP) ## run the quickstart notebook through the kernel, in the terminal
	@echo "running the demo"
	@$(PY) notebooks/demo.py $(ARGS)

lab: $(STAMP) ## open the quickstart notebook in JupyterLab
	@echo "starting JupyterLab"
	@JUPYTER_PREFER_ENV_PATH=1 $(VENV)/bin/jupyter-lab --notebook-dir=. $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS) notebooks/00_quickstart.ipynb

notebooks: $(STAMP) ## run all notebooks, and store them with their outputs
	@echo "running the notebooks"
	@$(PY) notebooks/save.py $(ARGS)

test: $(STAMP) $(RDMA) test-ts ## run the tests of each promise, and the front end's
	@echo "running the tests"
	@$(PY) -m pytest -m "not wide and not soak" $(BESIDE) $(ARGS)

test-ts: $(MODULES) ## run the tests of the front end
	@echo "running the tests of the front end"
	@$(NPM) run --silent test

test-quick: $(STAMP) $(RDMA) ## run the quick tests of these
	@echo "running the quick tests"
	@$(PY) -m pytest -m "not slow and not wide and not soak" $(BESIDE) $(ARGS)

test-wide: $(STAMP) $(RDMA) ## run the tests that hold the promises of `make test` in more cases
	@echo "running the wide tests"
	@$(PY) -m pytest -m "wide and not soak" $(BESIDE) $(ARGS)

test-failed: $(STAMP) $(RDMA) ## run the tests that failed in the last run again, one after the other
	@echo "running the failed tests again, one after the other"
	@$(PY) -m pytest -m "not soak" --last-failed --last-failed-no-failures none $(ARGS)

test-soak: $(STAMP) $(RDMA) ## run the tests that repeat promises of others with more parameters, or for longer
	@echo "running the soak tests"
	@$(PY) -m pytest -m soak $(BESIDE) $(ARGS)

test-gpu: $(STAMP) $(RDMA) ## run the tests and benchmarks that need a GPU; results go to benchmarks/results/
	@echo "running the tests that need a GPU"
	@$(PY) -m pytest -m gpu -rs $(ARGS)
	@echo "measuring into benchmarks/results/"
	@$(PY) benchmarks/run.py gpu --out benchmarks/results/$$(date +%F)-gpu.md benchmarks/results/$$(date +%F)-gpu.json

test-ops: $(STAMP) ## compare all ops on distributed tensors with torch's DTensor, by torch's own samples
	@echo "comparing all ops on distributed tensors"
	@MONARCH_ALL_OPS=1 $(PY) -m pytest tests/engine/test_opinfo.py $(ARGS)

chaos: $(STAMP) $(RDMA) ## inject random faults for SECONDS per test, and run property tests with new examples
	@echo "running property tests with new examples"
	@$(PY) -m pytest --hypothesis-profile=chaos $(if $(SEED),--hypothesis-seed=$(SEED)) tests/core tests/wire/test_bulk.py tests/wire/test_pickling.py
	@echo "running each chaos test for $(SECONDS) s"
	@MONARCH_CHAOS_SECONDS=$(SECONDS) $(if $(SEED),MONARCH_CHAOS_SEED=$(SEED)) $(PY) -m pytest tests/chaos $(ARGS)

check: lint types spelling ## check lint, formatting, types, spelling and style

types: $(STAMP) $(MODULES) ## check types
	@echo "checking types"
	@$(NPM) run --silent types
	@$(PY) -m pyright --pythonpath $(PY)

spelling: $(STAMP) ## check spelling, and count the phrases of tests/style/phrases.txt
	@echo "checking spelling and style"
	@$(PY) -m codespell_lib
	@$(PY) tests/style/phrases.py

lint: $(STAMP) $(MODULES) ## check lint and formatting
	@echo "checking lint"
	@$(PY) -m ruff check --quiet
	@$(NPM) run --silent lint
	@echo "checking formatting"
	@$(PY) -m ruff format --check --quiet

fmt: $(STAMP) $(MODULES) ## format the code and apply the fixes of ruff and biome
	@echo "formatting"
	@$(NPM) run --silent fix || true
	@$(PY) -m ruff check --fix --quiet || true
	@$(PY) -m ruff format --quiet

bench: $(STAMP) ## run the benchmarks
	@echo "running the benchmarks"
	@$(PY) benchmarks/run.py $(ARGS)

clean: ## remove caches and build output; .venv stays
	@echo "removing caches and build output"
	@rm -rf build dist node_modules monarch_kernel/labextension monarch_kernel/views/static .pytest_cache .ruff_cache .hypothesis
	@find . \( -name .git -o -name $(VENV) -o -name node_modules \) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
