# The commands of this project; `make help` lists them.

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter of a supported version; `make PYTHON=/path/to/python3.12 ...` overrides.
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$p && break; done)
# ARGS are further overrides: make train ARGS="launch.processes=2 strategy=fsdp"
ARGS ?=
# JOBS test files run at the same time; each starts up to four processes.
JOBS ?= 2

TORCH := torch torchvision
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
INPUTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup data data-push data-pull train test test-slow drill bench bench-data scaling lint clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/all.stamp ## make .venv with everything: training, DVC, W&B, tests

data: $(VENV)/train.stamp ## write the embedded data set below data/digits
	$(BIN)/python scripts/prepare_data.py digits

data-push: setup ## record data/ with DVC, copy it and what the pipeline made to the remote; ARGS="-r s3"
	$(BIN)/dvc add data
	$(BIN)/dvc push $(ARGS)

data-pull: setup ## fetch what this commit's data.dvc and dvc.lock name; ARGS="-r s3"
	$(BIN)/dvc pull $(ARGS) data.dvc
	$(BIN)/dvc pull $(ARGS) --allow-missing

train: data ## train a small ViT on the embedded data; more overrides in ARGS="..."
	$(BIN)/python train.py experiment=digits $(ARGS)

test: setup data ## run the test suite; pytest arguments in ARGS="..."
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "not slow" $(ARGS)

test-slow: setup data ## and the tests that break, stop and queue whole runs
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m slow $(ARGS)

drill: setup ## break small runs in every way, see what is lost; ARGS="--only SIGKILL --jobs 4"
	$(BIN)/python scripts/drill.py $(ARGS)

bench: setup ## measure training steps beside plain PyTorch and timm; ARGS="--models resnet50 --profile"
	$(BIN)/python scripts/bench.py $(ARGS)

bench-data: setup ## measure how fast images come, beside other loaders; ARGS="--root /path/to/images"
	$(BIN)/python scripts/bench_data.py $(ARGS)

scaling: setup ## measure the speed-up from one GPU to several; ARGS="--models vit --counts 2,4"
	$(BIN)/python scripts/scaling.py $(ARGS)

lint: setup ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## remove the environment and caches; data and runs stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11, 3.12 or 3.13 found: install one, or make PYTHON=/path/to/it" >&2; exit 2; }
	@"$(PYTHON)" -c '$(SUPPORTED)' || { echo "PYTHON=$(PYTHON) is not Python 3.11, 3.12 or 3.13" >&2; exit 2; }
	@"$(PYTHON)" -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make an environment: install its venv module (Debian: python3-venv)" >&2; exit 2; }

# torch first: the largest part, and its version decides what else fits.
$(VENV)/train.stamp: $(INPUTS) | $(BIN)/python
	$(PIP) $(TORCH)
	$(PIP) -e .
	@touch $@

$(VENV)/all.stamp: $(INPUTS) $(VENV)/train.stamp
	$(PIP) -e '.[all]'
	@touch $@
