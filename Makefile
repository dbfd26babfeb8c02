# Needs Python 3.11 or newer, git and a C compiler; everything else goes into .venv.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint typecheck bench clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## make .venv and install lmpack and its tools there (demo and test do it by themselves)

demo: $(INSTALLED) ## convert, validate, profile and run the embedded demo model
	$(BIN)/lmpack demo

test: $(INSTALLED) ## run every test and report the coverage (PYTEST_ARGS='-k manifest' for some)
	$(BIN)/python -m pytest --cov --cov-report=term $(PYTEST_ARGS)

check: lint typecheck test ## everything CI runs

lint: $(INSTALLED) ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: $(INSTALLED) ## check types, strictly
	$(BIN)/mypy

bench: $(INSTALLED) ## measure, and print a table per script (see benchmarks/)
	$(BIN)/python -m benchmarks.convert
	$(BIN)/python -m benchmarks.decode

clean: ## remove .venv and everything built or cached
	rm -rf $(VENV) build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("lmpack needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
