# Works on a fresh machine with Python 3.10 or newer: the first target that needs the environment makes it.
#
#   PYTHON  the interpreter that .venv is made with
#   VENV    the environment that is made and used; one for each Python that you test with
#   TORCH   what pip installs first: a requirement, a path to a wheel, or either with pip's own options
#   ARGS    more arguments for pytest, the demo or the benchmarks
#   JOBS    how many processes run the tests beside each other; 0 for none but this one (with -s, --pdb)
#   SECONDS how long each test of `make chaos` goes on, and SEED the number that repeats what one has shown

PYTHON ?= python3
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 2
SECONDS ?= 600
SEED ?=

VENV ?= .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
RDMA := $(VENV)/.stamp-rdma
# Each takes whole files, whose tests share what takes long to start.
BESIDE := -n $(JOBS) --dist loadfile
PIP := $(PY) -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo lab test test-quick test-gpu chaos check lint types spelling fmt bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## make .venv with everything in it

$(STAMP): pyproject.toml runtime/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed; name one with PYTHON=")'
	@test -x $(PY) || { echo "making $(VENV)" && $(PYTHON) -m venv $(VENV); }
	@echo "installing $(TORCH)"
	@$(PIP) install $(TORCH)
	@echo "installing Monarch Kernel, its dependencies and its tools"
	@$(PIP) install --editable ./runtime --editable '.[test,dev,notebooks]'
	@# As pip does for what it copies: else each process compiles the package again where Python may write no files.
	@$(PY) -m compileall -q monarch_kernel runtime
	@touch $@

# Not made for every machine; the tests that need it are skipped where it is not there.
$(RDMA): $(STAMP)
	@echo "installing what transfers by RDMA need"
	@$(PIP) install --editable './runtime[rdma]' || echo "nixl is not to be had for this machine: its tests will be skipped"
	@touch $@

demo: $(STAMP) ## run the quickstart notebook through the kernel, in the terminal
	@echo "running the demo"
	@$(PY) notebooks/demo.py $(ARGS)

lab: $(STAMP) ## open the quickstart notebook in JupyterLab
	@echo "starting JupyterLab"
	@JUPYTER_PREFER_ENV_PATH=1 $(VENV)/bin/jupyter-lab --notebook-dir=. $(ARGS) notebooks/00_quickstart.ipynb

test: $(STAMP) $(RDMA) ## run every test
	@echo "running every test"
	@$(PY) -m pytest $(BESIDE) $(ARGS)

test-quick: $(STAMP) $(RDMA) ## run the tests that are not marked slow
	@echo "running the quick tests"
	@$(PY) -m pytest -m "not slow" $(BESIDE) $(ARGS)

test-gpu: $(STAMP) $(RDMA) ## run what needs a GPU, and measure it into benchmarks/results/
	@echo "running the tests that need a GPU"
	@$(PY) -m pytest -m gpu -rs $(ARGS)
	@echo "measuring into benchmarks/results/"
	@$(PY) benchmarks/run.py gpu --out benchmarks/results/$$(date +%F)-gpu.md benchmarks/results/$$(date +%F)-gpu.json

chaos: $(STAMP) $(RDMA) ## kill, stop and cut off at random, SECONDS for each of these tests; draw new examples for the others
	@echo "drawing new examples for what holds for all"
	@$(PY) -m pytest --hypothesis-profile=chaos $(if $(SEED),--hypothesis-seed=$(SEED)) tests/core tests/wire/test_bulk.py tests/wire/test_pickling.py
	@echo "running each test of chaos for $(SECONDS) s"
	@MONARCH_CHAOS_SECONDS=$(SECONDS) $(if $(SEED),MONARCH_CHAOS_SEED=$(SEED)) $(PY) -m pytest tests/chaos $(ARGS)

check: lint types spelling ## lint, formatting, types, spelling and style

types: $(STAMP) ## types
	@echo "checking types"
	@$(PY) -m pyright --pythonpath $(PY)

spelling: $(STAMP) ## spelling, and the phrases of tests/style/phrases.txt
	@echo "checking spelling and style"
	@$(PY) -m codespell_lib
	@$(PY) tests/style/phrases.py

lint: $(STAMP) ## lint and formatting
	@echo "checking lint"
	@$(PY) -m ruff check --quiet
	@echo "checking formatting"
	@$(PY) -m ruff format --check --quiet

fmt: $(STAMP) ## format, and mend what ruff can mend by itself
	@echo "formatting"
	@$(PY) -m ruff check --fix --quiet || true
	@$(PY) -m ruff format --quiet

bench: $(STAMP) ## run the benchmarks
	@echo "running the benchmarks"
	@$(PY) benchmarks/run.py $(ARGS)

clean: ## remove caches and build output; .venv stays
	@echo "removing caches and build output"
	@rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@find . \( -name .git -o -name $(VENV) -o -name node_modules \) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
