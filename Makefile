# Two commands matter: `make demo` and `make test`. Both set up `.venv` first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTED := $(VENV)/.installed-for-tests
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help

help:  ## show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

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

test: $(TESTED) browser  ## run all tests
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow'

faults: $(TESTED)  ## real sites that are killed, slow or away (minutes; wants an idle machine)
	$(BIN)/python -m pytest -m slow tests/flower

check: $(TESTED)  ## lint, format and type checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## measure speed and memory (ratios in one run)
	$(BIN)/python -m benchmarks.run

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test browser faults check bench clean
