# The whole interface for a person: make demo | test | test-slow | check | format | soak | bench | docs | clean.
# Each target does all of its own set-up: it checks the machine, makes .venv, builds and installs the package when sources
# changed. Nothing outside this folder is touched; `make clean` removes what was made.
#   PYTHON=python3.12   another Python          CXX=clang++   another compiler
#   make bench AGAINST=FILE   names what got worse since an earlier build/bench/figures.json

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
TIMED  := .ci/timed
SHELL  := /bin/bash

SOURCES := LICENSE pyproject.toml $(shell find src native -type f -not -name '*.pyc')
NATIVE  := $(shell find native benchmarks examples tests -name '*.cc' -o -name '*.cpp' -o -name '*.h' -o -name '*.hpp' -o -name '*.c')
SPREAD  := -n auto --maxprocesses=8 --dist=worksteal
TOOLS   := "scikit-build-core>=0.11" "nanobind>=2.4" "cmake>=3.18" ninja

.PHONY: help demo test test-slow check format soak bench docs clean
help:
	@sed -n '1,5p' Makefile | sed 's/^# //'

demo: $(VENV)/.built
	$(BIN)/tilewise demo

test: $(VENV)/.for-tests $(VENV)/.built
	@$(TIMED) "native tests" .ci/native_tests release
	@$(TIMED) "everyday tests" $(BIN)/python -m pytest tests --ignore=tests/policy -m "not slow and not soak" $(SPREAD)

test-slow: $(VENV)/.for-tests $(VENV)/.built
	@$(TIMED) "native tests, thread sanitizer" .ci/native_tests thread
	@$(TIMED) "native tests, address sanitizer" .ci/native_tests address
	@$(TIMED) "long suites" $(BIN)/python -m pytest tests -m slow $(SPREAD)

check: $(VENV)/.for-tests $(VENV)/.built
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/python .ci/tidy.py
	$(BIN)/python -m mypy
	$(BIN)/python -m pytest tests/policy -m "not slow and not soak"

format: $(VENV)/.for-tests
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE)

soak: $(VENV)/.for-fuzz $(VENV)/.for-tests $(VENV)/.built
	@$(TIMED) "soak" $(BIN)/python -m pytest tests -m soak -rs --hypothesis-profile=drawn --ignore=tests/fuzz
	@$(TIMED) "ten minutes of fuzzing per reader" $(BIN)/python -m pytest tests/fuzz -m soak -rs -n auto
	@$(TIMED) "property tests on new examples" $(BIN)/python -m pytest tests -m "hypothesis and not slow and not soak" --hypothesis-profile=drawn

docs: $(VENV)/.for-docs $(VENV)/.built
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

bench: $(VENV)/.for-tests $(VENV)/.built
	@$(BIN)/python benchmarks/page.py $(if $(AGAINST),--against $(AGAINST))

clean:
	rm -rf $(VENV) build

$(VENV)/.made:
	@$(PYTHON) .ci/check_machine.py
	@$(TIMED) "virtual environment" $(PYTHON) -m venv $(VENV)
	@$(TIMED) "build tools" $(PIP) install $(TOOLS)
	@touch $@

# No build isolation: CMake's build folder stays valid, so a second build compiles only what changed.
$(VENV)/.built: $(VENV)/.made $(SOURCES)
	@$(TIMED) "build and install (a few minutes the first time)" $(PIP) install --no-build-isolation .
	@touch $@

$(VENV)/.for-tests: $(VENV)/.made pyproject.toml
	@$(TIMED) "test dependencies" $(PIP) install --no-build-isolation $$($(BIN)/python .ci/pytorch_index.py) \
		".[test,check,docs]"
	@touch $@ $(VENV)/.built

$(VENV)/.for-docs: $(VENV)/.made pyproject.toml
	@$(TIMED) "documentation tools" $(PIP) install --no-build-isolation ".[docs]"
	@touch $@ $(VENV)/.built

$(VENV)/.for-fuzz: $(VENV)/.made pyproject.toml
	@$(TIMED) "the fuzzer" $(PIP) install --no-build-isolation ".[fuzz]"
	@touch $@ $(VENV)/.built
