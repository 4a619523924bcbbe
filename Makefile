# Two commands matter: `make demo` and `make test`. Both set up `.venv` first, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TESTED := $(VENV)/.installed-for-tests
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help

# The tests start some hundred processes: each would compile the package again where this variable is set.
unexport PYTHONDONTWRITEBYTECODE

help:  ## show this help
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@echo 'Setting up $(VENV) (a minute or two, once) ...'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e .
	@touch $(STAMP)

$(TESTED): $(STAMP)
	@echo 'Adding what the tests need ...'
	@$(INSTALL) -e '.[dev,docs,flower,simulation,plots,privacy,transformers,learners,onnx,tensorboard,mlflow]'
	@touch $(TESTED)

setup: $(TESTED)  ## create .venv and install everything into it

demo: $(STAMP)  ## ten clients with five networks learn together on real digits
	$(BIN)/polyfed demo

browser:  # the report is tested in a real browser; a CI machine gets one, elsewhere those tests say why they skip
	@if [ "$$CI" = true ] && ! command -v chromium >/dev/null && command -v apt-get >/dev/null; then \
		(apt-get update && apt-get install -y --no-install-recommends chromium) >/dev/null 2>&1 || true; fi

test: $(TESTED)  ## run the tests (without those that take minutes: see test-all)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow and not long and not pages' --ignore tests/flower --durations 10

# Federations of real processes wait for each other most of the time, so more of them run at once than there are cores.
test-long: $(TESTED)  ## run what takes minutes: killed runs, devices, further settings and real federations of each method
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'long and not slow and not pages' --ignore tests/flower --durations 10
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m 'long and not slow' tests/flower

test-pages: $(TESTED) browser  ## run the notebooks, the examples, all commands and code on pages, and the report in a browser
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m pages

test-flower: $(TESTED)  ## run the tests with real servers and sites
	$(BIN)/python -m pytest -n 4 --dist loadgroup -m 'not slow and not long' --durations 12 tests/flower

test-all: test test-long test-pages test-flower test-avx2 storm-short  ## run all tests

# On a processor without AVX-512 `make test` has run just this.
test-avx2: $(TESTED)  ## run the tests of networks, engines and methods as on a processor without AVX-512
	if grep -qs avx512f /proc/cpuinfo; then \
		ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python -m pytest tests/models tests/engines tests/ops tests/golden \
			-n 2 --dist loadgroup -m 'not slow and not long'; \
	else echo "This processor has no AVX-512: 'make test' runs these tests as they are meant here."; fi

test-gpu: $(TESTED)  ## on a machine with a GPU: every method on it, with every engine, beside the processor
	$(BIN)/python -m pytest tests/engines/test_device.py -v -rs

faults: $(TESTED)  ## real sites that are killed, slow or away (minutes; wants an idle machine)
	$(BIN)/python -m pytest -m slow tests/flower

storm: $(TESTED)  ## kills, flipped bytes and hostile messages in their thousands (half an hour of processor time; wants an idle machine)
	$(BIN)/python tests/storm

storm-short: $(TESTED)  ## the same with a few of each (a minute)
	$(BIN)/python tests/storm --short

mutants: $(TESTED)  ## break every loss and weight of the methods on purpose and see a test go red (what is known is not run again)
	$(BIN)/python tools/mutants.py --contract

check: $(TESTED)  ## lint, format, types, and that imports point down
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(TESTED)  ## build the site into build/site: links, reference and gallery checked, no network
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/mkdocs build --strict  # not --quiet: it does not count what it does not say

package: $(TESTED)  ## build wheel and sdist and try them in an empty environment (takes the dependencies from the index)
	$(BIN)/python -m pytest -m slow tests/test_package.py

bench: $(STAMP)  ## measure speed and memory (ratios in one run)
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.rule

clean:  ## remove .venv and caches
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis

.PHONY: help setup demo test test-long test-pages test-flower test-all test-avx2 test-gpu browser faults storm storm-short mutants check docs package bench clean
