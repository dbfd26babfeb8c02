# Needs Python 3.11 or newer, git and a C compiler; everything else goes into .venv.

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BENCH_LAYERS ?= 24
FUZZ_SECONDS ?= 300
BENCH_GGUF := build/bench/qwen3moe-$(BENCH_LAYERS)-layers.gguf

.DEFAULT_GOAL := help
.PHONY: help setup demo test check lint typecheck bench slow fuzz clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(INSTALLED) ## make .venv and install lmpack and its tools there (demo and test do it by themselves)

demo: $(INSTALLED) ## convert, validate, profile and run the embedded demo model
	$(BIN)/lmpack demo

test: $(INSTALLED) ## run every test and report the coverage (PYTEST_ARGS='-k manifest' for some)
	$(BIN)/python -m pytest -rs --cov --cov-report=term $(PYTEST_ARGS)

check: lint typecheck test ## everything CI runs

lint: $(INSTALLED) ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

typecheck: $(INSTALLED) ## check types, strictly
	$(BIN)/mypy

bench: $(INSTALLED) $(BENCH_GGUF) ## measure convert, decode and kernels on a random 8 GB model (needs 25 GB of disk)
	$(BIN)/python -m benchmarks.convert $(BENCH_GGUF) --work $(dir $(BENCH_GGUF))
	$(BIN)/python -m benchmarks.decode --model $(BENCH_GGUF)
	$(BIN)/python -m benchmarks.kernels

slow: $(INSTALLED) ## run the tests that take minutes
	$(BIN)/python -m pytest -rs -m slow $(PYTEST_ARGS)

fuzz: $(INSTALLED) ## look for input that breaks a reader, FUZZ_SECONDS (300) for each; findings go to build/fuzz
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[fuzz]'
	for target in gguf safetensors config manifest; do \
		$(BIN)/python -m fuzz $$target -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -rss_limit_mb=256 -timeout=60 \
			-print_final_stats=1 -verbosity=0 || exit 1; \
	done

clean: ## remove .venv and everything built or cached
	rm -rf $(VENV) build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("lmpack needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(BENCH_GGUF): | $(INSTALLED)
	mkdir -p $(@D)
	$(BIN)/python -m benchmarks.random_gguf $@ --layers $(BENCH_LAYERS) --experts 128 --top-k 8 \
		--hidden 2048 --expert-width 768 --quant Q4_K --vocab-from lmpack/demo/tiny-Q4_K_M.gguf
