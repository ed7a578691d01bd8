# The two commands a newcomer needs are `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := exporter graphs kv providers serving src

.PHONY: demo test fast lint types dev clean

demo: $(VENV)/demo-installed  ## export the bundled checkpoint, check it, serve it, ask it one thing
	$(BIN)/python scripts/demo.py

test: $(VENV)/test-installed lint types  ## everything; what continuous integration runs
	$(BIN)/pytest

fast: dev  ## what to run while working: no install step after the first, under three minutes
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	PYTHONPATH=$(CURDIR)/.dev $(BIN)/pytest -m "not slow" -x -n auto

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/test-installed
	$(BIN)/python scripts/dev_tree.py .dev
	$(BIN)/mypy

dev: $(VENV)/tools-installed  ## link the sources into .dev/onnxport and build the kernels in place
	$(BIN)/python scripts/dev_tree.py .dev
	$(BIN)/python scripts/build_kernels.py

clean:
	rm -rf $(VENV) .dev build demo/build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "onnxport needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed; on Debian: apt install python3-venv" >&2; exit 1; }

INPUTS := pyproject.toml CMakeLists.txt $(shell find $(SOURCES) -type f -not -name '*.pyc' -not -name '*.so')

$(VENV)/demo-installed: $(VENV)/bin/python $(INPUTS)
	$(BIN)/pip install --quiet ".[cpu]"
	touch $@

$(VENV)/test-installed: $(VENV)/bin/python $(INPUTS)
	$(BIN)/pip install --quiet ".[cpu,test]"
	touch $@ $(VENV)/demo-installed $(VENV)/tools-installed

$(VENV)/tools-installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/pip install --quiet ".[cpu,test]"
	touch $@
