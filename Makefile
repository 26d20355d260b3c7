# Turngate: one word a job. `make help` lists them.
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?=
SOAK_MINUTES ?= 30
export TURNGATE_CACHE ?= $(CURDIR)/.cache
export TURNGATE_VENV := $(VENV)
export VLLM_NO_USAGE_STATS := 1
export TQDM_DISABLE := 1

.PHONY: help setup demo test test-long lint bench bench-gateway bench-matrix lock clean
.DEFAULT_GOAL := help

help: ## list the jobs
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## make the environment (.venv) and the small model, if not there yet
	@requirements/setup.sh
	@$(BIN)/python -W ignore -m turngate.trainer.models smollm2-135m

demo: setup ## the whole loop on CPU: vLLM, gateway, pi, trainer (under 15 minutes on 2 cores)
	@$(BIN)/python launch.py examples/demo.yaml

test: setup ## all tests but the long ones
	@requirements/setup.sh --tests
	$(BIN)/python -m pytest -m "not long" $(PYTEST_ARGS)

test-long: setup ## the long tests, and a soak of SOAK_MINUTES (30)
	@requirements/setup.sh --tests
	$(BIN)/python -m pytest -m long $(PYTEST_ARGS)
	$(BIN)/python bench/soak.py --minutes $(SOAK_MINUTES)

# mypy does not follow editable installs, so it gets the packages as a tree of links.
lint: setup ## formatting, lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@mkdir -p build/mypy/turngate
	@for part in proxy trainer harnesses tasks; do ln -sfn $(CURDIR)/$$part build/mypy/turngate/$$part; done
	cd build/mypy && MYPYPATH=. $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml \
		-p turngate.proxy -p turngate.harnesses -p turngate.tasks -p turngate.trainer

bench: setup ## run the benchmarks; figures as JSON in bench/results
	@for program in bench/bench_*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done
	@echo "== bench/gateway.py, small"; $(BIN)/python bench/gateway.py --shape short --sessions 4 --turns 6

bench-gateway: setup ## what a turn costs, whole, beside OpenEnv's proxy; bench/results/gateway_*.json (about 12 minutes)
	@PYTHON=$(BIN)/python bench/run_all.sh

bench-matrix: setup ## every agent on scripted scenarios, and how good the labels are; bench/results/harness_matrix.jsonl
	$(BIN)/python bench/harness_matrix.py --out bench/results/harness_matrix.jsonl

# The CPU lock has no torch (setup.sh installs its CPU build by itself) and nothing of what the CUDA build brings along.
LEFT_OUT := ^(torch|torchvision|torchaudio|torchcodec|triton|nvidia-[a-z0-9-]+|cuda-[a-z]+)==
EXTRAS_CPU := run docker train export otel engine-cpu dev
EXTRAS_GPU := run docker train export otel engine-gpu
COMPILE := $(BIN)/uv pip compile pyproject.toml --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --quiet
lock: setup ## resolve both locks again (uv, from pyproject.toml)
	@mkdir -p build && echo "torch==2.13.0" > build/overrides.txt
	$(COMPILE) $(EXTRAS_CPU:%=--extra %) --override build/overrides.txt --python-version 3.11 -o build/cpu.txt
	$(COMPILE) $(EXTRAS_GPU:%=--extra %) --python-version 3.12 -o build/gpu.txt
	@for lock in cpu gpu; do { grep '^#' requirements/$$lock.lock; cat build/$$lock.txt; } > build/$$lock.lock; done
	@grep -vE '$(LEFT_OUT)' build/cpu.lock > requirements/cpu.lock && cp build/gpu.lock requirements/gpu.lock
	@git --no-pager diff --stat -- requirements

clean: ## remove what was built here (not the runs)
	rm -rf $(VENV) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
