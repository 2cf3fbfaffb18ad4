# The two commands of README.md are `make demo` and `make test`; `make help` lists the rest.

PYTHON ?= python3.11
# Where pip finds torch's CPU build, if your index lacks it (README.md names PyTorch's own).
VTOKEN_TORCH_INDEX ?=
# Set either to choose other tests or arguments: make test PYTEST_ARGS="-k policies"
PYTEST_ARGS ?=
BENCH_ARGS ?=
# For make test-gpu: a Python whose torch sees a CUDA device, where the report goes, and whether to
# run what needs vLLM too.
GPU_PYTHON ?= python3
GPU_JSON ?= out/gpu.json
GPU_VLLM ?=

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/cpu.lock
STAMP := $(VENV)/.set-up-of
MYPY_PATH := build/mypy
MYPY_TARGETS := -p vtoken_spec -p vtoken.core -p vtoken.models -m vtoken.errors
LINTED := $(wildcard spec vtoken tests bench)

# Without these two, vLLM's CPU backend pins threads to cores that other work may be using, and a
# step can take twenty times as long.
export OMP_NUM_THREADS ?= 1
export VLLM_CPU_OMP_THREADS_BIND ?= nobind

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast test-gpu lint bench clean distclean

help: ## list the commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

# The stamp holds a checksum of what the environment was made from, and is written last: a set-up
# that was interrupted, or made from another lock file or in another folder, does not count.
setup: ## build .venv, unless it is up to date
	@want="$$(cat $(LOCK) pyproject.toml | sha256sum | cut -d' ' -f1) $(CURDIR)"
	if [ "$$(cat $(STAMP) 2>/dev/null || true)" = "$$want" ] && [ -x $(BIN)/python ]; then
	  echo "set-up: $(VENV) is up to date"
	  exit 0
	fi
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
	  echo "set-up: Python 3.11 is needed and '$(PYTHON)' is not it; install it, or name it with" \
	    "make PYTHON=/path/to/python3.11" >&2
	  exit 1
	fi
	echo "set-up: building $(VENV) from $(LOCK): about 3.7 GB on disk, 2 to 4 minutes"
	rm -f $(STAMP)
	# Scripts inside a venv name its folder: one that was copied or moved here starts afresh.
	clear=--clear
	if grep -qsF "$(CURDIR)/$(VENV)" $(BIN)/activate; then clear=; fi
	$(PYTHON) -m venv $$clear $(VENV)
	if ! $(BIN)/python -m pip install --disable-pip-version-check --no-deps \
	    $(if $(VTOKEN_TORCH_INDEX),--extra-index-url $(VTOKEN_TORCH_INDEX)) -r $(LOCK); then
	  echo "set-up: pip could not install $(LOCK); if it found no torch of that version, give it" \
	    "PyTorch's CPU index as README.md says, and run this again" >&2
	  exit 1
	fi
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	echo "$$want" > $(STAMP)
	echo "set-up: done"

demo: setup ## set up, then serve one prompt with eviction and reclamation
	$(BIN)/vtoken run --policy streaming-llm --budget 128 --reclaim eager --checks 2 \
	  --max-tokens 200 "Tell me about the history of bread, from the first farmers to today."

# What vLLM finds of Triton when it is imported decides which of its model runners it has, so the
# second one needs a process of its own, and so do Triton attention and copies. A choice of tests may
# leave nothing for them (status 5).
NONE_LEFT = $(if $(strip $(PYTEST_ARGS)),|| [ $$? = 5 ])
test: lint test-plain test-interpreted ## set up, lint, type-check and run every test

.PHONY: test-plain test-interpreted
test-plain: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Side by side, since they measure no time; what the first says comes when the second is done.
test-interpreted: setup
	@mkdir -p build
	echo "Model Runner V2 and Triton attention in Triton's interpreter, side by side: 4 to 7 minutes"
	{ VTOKEN_TEST_RUNNER=v2 $(BIN)/python -m pytest -m every_runner tests/engine tests/scenarios \
	  $(PYTEST_ARGS) $(NONE_LEFT); } > build/test-v2.log 2>&1 &
	v2=$$!
	status=0
	{ VTOKEN_TEST_ATTENTION=triton $(BIN)/python -m pytest tests/engine/test_page_view.py \
	  tests/unit/test_triton_copy.py tests/gpu/test_paged_attention.py \
	  tests/gpu/test_graph_replay.py $(PYTEST_ARGS) $(NONE_LEFT); } || status=1
	wait $$v2 || status=1
	cat build/test-v2.log
	exit $$status

test-fast: setup ## the tests that need no engine
	$(BIN)/python -m pytest -m "not engine and not gpu and not slow" $(PYTEST_ARGS)

# By any Python that has torch, Triton, numpy and pytest: the environment of `make setup` has torch's
# CPU build. What needs vLLM as well takes minutes, and runs with GPU_VLLM=1 only.
test-gpu: ## the tests that need a CUDA device, by GPU_PYTHON; and a report of them
	@python="$$($(GPU_PYTHON) tests/gpu/look.py $(BIN)/python)"
	VTOKEN_GPU_JSON="$(abspath $(GPU_JSON))" $$python -m pytest tests/gpu \
	  $(if $(GPU_VLLM),,-m "not gpu_vllm") $(PYTEST_ARGS)
	if [ -n "$(GPU_VLLM)" ]; then
	  VTOKEN_TEST_RUNNER=v2 VTOKEN_GPU_JSON="$(abspath $(GPU_JSON:.json=-v2.json))" \
	    $$python -m pytest tests/gpu -m gpu_vllm $(PYTEST_ARGS)
	fi

# `spec` is imported as `vtoken_spec`; the link lets mypy see it under that name.
lint: setup ## ruff and mypy
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	mkdir -p $(MYPY_PATH)
	ln -sfn $(CURDIR)/spec $(MYPY_PATH)/vtoken_spec
	MYPYPATH=$(MYPY_PATH) $(BIN)/mypy $(MYPY_TARGETS)

bench: setup ## the benchmarks
	$(BIN)/python -m pytest bench $(BENCH_ARGS)

clean: ## remove what building, testing and benchmarking leave, but not .venv
	rm -rf build out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## remove .venv as well
	rm -rf $(VENV)
