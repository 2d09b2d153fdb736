# Everything a person needs: `make run` on a fresh machine; `make check` before every commit.
# Needs Python 3.11 to 3.13 and make; g++ (or clang++) makes it faster.

PYTHON ?= python3
# One exact version of torch, so that two machines give the same answers. Any in pyproject.toml's range works: make setup TORCH=torch==2.12.1
TORCH ?= torch==2.13.0
PORT ?= 1919

BIN := .venv/bin
EXTRAS := $(shell nvidia-smi >/dev/null 2>&1 && echo cuda)
comma := ,
empty :=
space := $(empty) $(empty)
NATIVE := $(wildcard native/*.cpp native/*.h native/*.py)

.PHONY: setup run smoke test test-demo test-gpu check fmt fmt-check lint type imports size native bench bench-gpu clean

setup: .venv/.stamp-dev

.venv/.stamp-torch:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"expected Python 3.11 to 3.13, got {v[0]}.{v[1]}; make setup PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install '$(TORCH)'
	@touch $@

# Running needs the package alone; the tools come with the first test or check.
.venv/.stamp-run: .venv/.stamp-torch pyproject.toml $(NATIVE)
	$(BIN)/pip install --quiet -e '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@

.venv/.stamp-dev: .venv/.stamp-run
	$(BIN)/pip install --quiet -e '.[$(subst $(space),$(comma),$(strip dev $(EXTRAS)))]'
	@touch $@

run: .venv/.stamp-run
	$(BIN)/ft run --port $(PORT)

smoke: .venv/.stamp-run
	$(BIN)/ft run --once --port 0 --prompt 'What is the capital of France?' --expect Paris

test: .venv/.stamp-dev
	$(BIN)/pytest

# The real demo model against transformers; it is in the cache after `make smoke`.
test-demo: .venv/.stamp-dev
	$(BIN)/pytest -m demo

# All kernels and the engine on this machine's GPU.
test-gpu: .venv/.stamp-dev
	$(BIN)/pytest -m gpu

check: fmt-check lint type imports size test

fmt: .venv/.stamp-dev
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

fmt-check: .venv/.stamp-dev
	$(BIN)/ruff format --check

lint: .venv/.stamp-dev
	$(BIN)/ruff check

type: .venv/.stamp-dev
	$(BIN)/basedpyright

imports: .venv/.stamp-dev
	$(BIN)/lint-imports

size: .venv/.stamp-dev
	$(BIN)/python -m tests.rules.size

native: .venv/.stamp-run
	$(BIN)/python native/build.py

bench: .venv/.stamp-dev
	$(BIN)/python -m bench.serve

# On a machine with an NVIDIA GPU: kernels against their bounds, then the server on a synthetic model.
bench-gpu: .venv/.stamp-dev
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.kernels_prefill
	$(BIN)/python -m bench.gpu

clean:
	rm -rf .venv build dist freetoken/_native
