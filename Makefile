# Two commands matter: `make demo` and `make test`. Both set up `.venv` first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTED := $(VENV)/.installed-for-tests
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help

help:  ## show this help
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@echo 'Setting up $(VENV) (a minute or two, once) ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e .
	@touch $(STAMP)

$(TESTED): $(STAMP)
	@echo 'Adding what the tests need ...'
	@$(INSTALL) -e '.[dev,flower,simulation,plots,tensorboard,mlflow]'
	@touch $(TESTED)

setup: $(TESTED)  ## create .venv and install everything into it

demo: $(STAMP)  ## ten clients with five networks learn together on real digits
	$(BIN)/polyfed demo

browser:  # the report is tested in a real browser; a CI machine gets one, elsewhere those tests say why they skip
	@if [ "$$CI" = true ] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then \
		(apt-get update && apt-get install -y --no-install-recommends chromium) >/dev/null 2>&1 || true; fi

test: $(TESTED) browser  ## run the tests (without real federations, which take as long again)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow' --ignore tests/flower --durations 10

# Federations of real processes wait for each other most of the time, so more of them run at once than there are cores.
test-flower: $(TESTED)  ## run the tests with real servers and sites
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m 'not slow' tests/flower

test-all: test test-flower test-avx2  ## run all tests

test-avx2: $(TESTED)  ## run the tests of networks, engines and methods as on a processor without AVX-512
	ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest tests/models tests/contract tests/engines tests/ops tests/golden \
		-n 2 --dist loadgroup -m 'not slow'

faults: $(TESTED)  ## real sites that are killed, slow or away (minutes; wants an idle machine)
	$(BIN)/python -m pytest -m slow tests/flower

check: $(TESTED)  ## lint, format, types, and that imports point down
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)  ## measure speed and memory (ratios in one run)
	$(BIN)/python -m benchmarks.run

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test test-flower test-all test-avx2 browser faults check bench clean
