# Two commands matter: `make demo` and `make test`. Both set up `.venv` first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help

help:  ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

setup: $(STAMP)  ## create .venv and install everything into it

demo: $(STAMP)  ## ten clients with five networks learn together on real digits
	$(BIN)/polyfed demo

test: $(STAMP)  ## run all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow'

check: $(STAMP)  ## lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## measure speed and memory (ratios in one run)
	$(BIN)/python -m benchmarks.run

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test check bench clean
