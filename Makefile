# Targets: demo, test, models, lint, bench, clean. Each makes the virtual environment it needs, in .venv;
# PYTHON names the interpreter to make it with, ARGS goes to the command that a target runs.

PYTHON ?= python3
ARGS ?=
JOBS ?= 3

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt

.PHONY: help demo bench test slow models lint clean

help:
	@echo 'make demo    run the demo on a GPU, or on the CPU where there is none (ARGS="...")'
	@echo 'make bench   run the benchmark (ARGS="...")'
	@echo 'make test    lint, then run the tests (ARGS="-k name" selects, JOBS=N runs N at a time)'
	@echo 'make slow    the tests that compile for minutes'
	@echo 'make models  every family of transformers models, and the table of checks'
	@echo 'make lint    ruff and mypy'
	@echo 'make clean   remove .venv, builds and caches'

demo: $(VENV)/runtime.stamp
	@$(BIN)/swa-compile demo $(ARGS)

bench: $(VENV)/runtime.stamp
	@$(BIN)/swa-compile bench $(ARGS)

# One process compiles per test worker: the cores are busy with JOBS workers already, one more than
# the two cores that it is meant for, since many tests wait for processes of their own.
test: lint
	@TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -m 'not slow' $(ARGS)

slow: $(VENV)/tools.stamp
	@TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal -m slow $(ARGS)

models: $(VENV)/tools.stamp
	@TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal tests/models --model-table $(ARGS)

# mypy takes a module's name from its path, so it is given a folder of links in which passes/ and
# ops/ lie where they are installed. It reports passes/x.py as swa_compile/passes/x.py.
lint: $(VENV)/tools.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@rm -rf $(VENV)/typed && mkdir -p $(VENV)/typed/swa_compile
	@ln -s $(addprefix ../../../,$(wildcard swa_compile/*) passes ops) $(VENV)/typed/swa_compile/
	@cd $(VENV)/typed && \
	  ../bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

clean:
	rm -rf $(VENV) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/python.stamp:
	@case '$(CURDIR)' in *' '*) \
	  echo "Inductor cannot link its C++ where torch lies below a path with spaces: move this folder" >&2; \
	  exit 1;; esac
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "swa-compile needs Python 3.10 or newer, and $(PYTHON) is `$(PYTHON) --version 2>&1`:" \
	    "name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

# The pinned setuptools builds the project, so it is installed first and build isolation is off.
$(VENV)/runtime.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	@echo "Installing swa-compile and torch into $(VENV) (torch is a large download the first time)"
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation --editable .
	@touch $@

$(VENV)/tools.stamp: $(VENV)/runtime.stamp
	@echo "Installing the test and lint tools into $(VENV)"
	@$(PIP) --no-build-isolation --editable '.[test,dev,hf,bench]'
	@touch $@
