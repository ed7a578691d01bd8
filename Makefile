# The two commands a newcomer needs are `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WEBGPU_VENV ?= .venv-webgpu
WEBGPU_BIN := $(WEBGPU_VENV)/bin
PLUGIN_VENV ?= .venv-webgpu-plugin
PUBLISHED := build/published
CONFORMANCE := build/conformance
JOBS ?= 2
BENCH_FOLDER ?= build/bench
BENCH_OPTIONS ?=
SOURCES := exporter graphs kv providers serving src

.PHONY: demo test fast tiers lint types dev clean published artifacts webgpu webgpu-native openvino-gpu bench

demo: $(VENV)/demo-installed  ## export the bundled checkpoint, check it, serve it, ask it one thing
	$(BIN)/python scripts/demo.py

test: $(VENV)/test-installed lint types published  ## everything; what continuous integration runs
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 20
	$(MAKE) webgpu

webgpu: $(WEBGPU_VENV)/installed artifacts  ## the conformance suite on WebGPU, on a GPU in software
	vulkan=$$($(WEBGPU_BIN)/python scripts/software_gpu.py build/swiftshader) && eval "$$vulkan" && \
	  $(WEBGPU_BIN)/pytest tests/conformance --artifacts $(CONFORMANCE) --lane webgpu

webgpu-native: $(PLUGIN_VENV)/installed artifacts  ## likewise with 16-bit floats; see scripts/lavapipe.sh
	scripts/lavapipe.sh $(PLUGIN_VENV)/bin/pytest tests/conformance --artifacts $(CONFORMANCE) \
	  --lane webgpu

openvino-gpu: $(VENV)/test-installed  ## what Intel's GPU plugin compiles; see scripts/intel_driver.sh
	scripts/intel_driver.sh $(BIN)/pytest tests/providers/test_openvino_gpu.py

bench: $(VENV)/test-installed  ## every peer, its environment included; see docs/benchmarks.md
	$(BIN)/python -m benchmarks.run_all $(BENCH_FOLDER) --install $(BENCH_OPTIONS)

FAST := PYTHONPATH=$(CURDIR)/.dev PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -m "not slow" \
  --hypothesis-profile=fast -n logical

# Bytecode is kept (and ignored by git): compiled anew, tests, sources and their rewritten assertions
# take each of pytest's workers ten seconds.
fast: dev  ## what to run while working: no install step after the first
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(FAST) -x

tiers: dev  ## time the fast tests, on a machine that does nothing else, and leave the longest out
	LONG_TESTS=/dev/null $(FAST) --junitxml=build/tests/fast.xml
	PYTHONPATH=$(CURDIR) $(BIN)/python -m tests.tiers build/tests/fast.xml

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
	rm -rf $(VENV) $(WEBGPU_VENV) $(PLUGIN_VENV) .dev build demo/build

published: $(VENV)/bin/python  ## vocabularies, templates and a model, for tests/published
	$(BIN)/python scripts/published.py $(PUBLISHED)

artifacts: $(VENV)/test-installed
	rm -rf $(CONFORMANCE)
	$(BIN)/python -m tests.conformance.make $(CONFORMANCE)

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "onnxport needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $* || \
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

$(WEBGPU_VENV)/installed: $(WEBGPU_VENV)/bin/python $(INPUTS)
	$(WEBGPU_BIN)/pip install --quiet ".[webgpu-wheel,conformance]"
	touch $@

$(PLUGIN_VENV)/installed: $(PLUGIN_VENV)/bin/python $(INPUTS)
	$(PLUGIN_VENV)/bin/pip install --quiet ".[webgpu,conformance]"
	touch $@
