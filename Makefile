# `make train` and `make test` set everything up by themselves; once that is done, it costs nothing.
# Settings, each as NAME=value behind the target:
#   PRESET, ARGS              what to train:       make train PRESET=procgen-ppo ARGS="--env.id coinrun --seed 3"
#   ARGS                      what to test:        make test ARGS="tests/test_returns.py -x"
#   WORKERS                   test processes:      make test WORKERS=8
#   PYTHON                    which Python:        make train PYTHON=/usr/bin/python3.12
#   TORCH_INDEX               which PyTorch:       make train TORCH_INDEX=ADDRESS, the package index of another build (tools/install.py)

PRESET ?= quickstart
ARGS ?=
# Processes for the tests; 0: this one.
WORKERS ?= 2

# What a test may take that trains for long.
HOUR := -o faulthandler_timeout=3600

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: train test check test-long test-slow test-mjlab test-jax test-faults audit bench lint format wheel fresh site figures setup clean help

train: $(READY)  ## Train PPG on a Procgen game; ten to fifteen minutes on two cores
	$(BIN)/phasicrl train $(PRESET) $(ARGS)

# Tests start two hundred Pythons: what these compile is kept, also where the shell says otherwise.
test test-long test-slow test-mjlab test-jax test-faults: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)  ## Run the tests; one that fails is run once more, by itself, and called flaky if it passes then
	$(BIN)/pytest -n $(WORKERS) --rerun-failed $(ARGS)

check: lint audit site test test-long test-slow test-mjlab test-jax test-faults  ## Run everything, also what CI leaves out; takes hours
	@tools/try_wheel.sh all
	@if git describe --exact-match --tags HEAD >/dev/null 2>&1; then $(MAKE) fresh; fi

# The original Procgen, where it can be installed; else what compares with it is skipped.
test-long: $(READY)  ## Run the tests that take seconds and more
	-@$(MAKE) .peers/procgen2/.ready
	$(BIN)/pytest -n $(WORKERS) -m long $(HOUR) $(ARGS)

# Without the checks of shapes at every call, which torch.compile cannot follow.
test-slow: $(READY)  ## Run the tests that train until something is learned
	$(BIN)/pip install --quiet --constraint constraints.txt "ray[train]"
	$(BIN)/pytest -q -o addopts= -m slow $(HOUR) $(ARGS)

# In an environment of its own, where that can be made.
test-mjlab:  ## Run the tests of mjlab's tasks; 2.3 GB on disk
	-@$(MAKE) .peers/mjlab/.ready
	test ! -f .peers/mjlab/.ready || .peers/mjlab/bin/python -m pytest tests/envs/test_mjlab.py tests/envs/test_env_contract.py -k mjlab $(ARGS)

test-jax:  ## Run the tests of gymnax and pgx; 1.9 GB on disk
	-@$(MAKE) .peers/jax/.ready
	test ! -f .peers/jax/.ready || .peers/jax/bin/python -m pytest tests/envs/test_jax.py tests/envs/test_env_contract.py -k "jax or gymnax or pgx" $(ARGS)

FAULTS := benchmarks/results/faults.csv
test-faults: $(READY)  ## Inject every fault: kills, damaged files, full disks; takes long
	$(BIN)/pytest tests/faults -n $(WORKERS) -m "not slow" --faults full --fault-table $(FAULTS) $(HOUR) $(ARGS)

audit: .peers/audit/.ready  ## Look the pinned packages up among the known vulnerabilities; needs the network
	.peers/audit/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner off

bench: $(READY) .peers/sb3/.ready  ## Whole training loops beside Stable-Baselines3's, interleaved; ten minutes (benchmarks/versus.py has more)
	$(BIN)/python benchmarks/versus.py cartpole64 halfcheetah --pairs 3 $(ARGS)

lint: $(READY)  ## Check format, style, types, the direction of imports, spelling, words
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell *.md docs src tools examples benchmarks/*.py
	$(BIN)/python -m tools.prose

format: $(READY)  ## Format the code and mend what the linter can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(READY)  ## Build the wheel, install it into an empty environment, and train with it outside the checkout
	@tools/try_wheel.sh

fresh:  ## Run `make test` and `make train` on bare machines; needs root, debootstrap, an hour
	@for suite in bookworm trixie; do RESULTS=benchmarks/results/fresh.csv tools/fresh_machine.sh $$suite || exit; done

site: $(READY) .peers/site/.ready  ## Build the documentation as a site, site/index.html; warnings are errors
	NO_MKDOCS_2_WARNING=1 .peers/site/bin/mkdocs build --quiet

figures: $(READY)  ## Draw the figures of docs/ anew from the files in benchmarks/results
	$(BIN)/python -m tools.figures $(ARGS)

setup: $(READY)  ## Only make .venv and install

clean:  ## Remove .venv, build products and caches; runs/ stays
	rm -rf $(VENV) build dist site .hypothesis .pytest_cache .ruff_cache .import_linter_cache
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1 \t/p' Makefile | expand -t 18

.peers/sb3/.ready .peers/mjlab/.ready: .peers/%/.ready: benchmarks/peers/requirements-%.txt
	@PYTHON="$(PYTHON)" tools/venv.sh .peers/$*
	@.peers/$*/bin/python tools/install.py $<
	@touch $@

.peers/jax/.ready: benchmarks/peers/requirements-jax.txt
	@PYTHON="$(PYTHON)" tools/venv.sh .peers/jax
	@.peers/jax/bin/python tools/install.py $<
	@.peers/jax/bin/pip install --disable-pip-version-check -qq --no-deps gymnax==1.0.1 --editable .
	@touch $@

.peers/audit/.ready .peers/procgen2/.ready .peers/site/.ready: .peers/%/.ready: benchmarks/peers/requirements-%.txt
	@PYTHON="$(PYTHON)" tools/venv.sh .peers/$*
	@.peers/$*/bin/pip install --disable-pip-version-check -qq --requirement $<
	@touch $@

# Rebuilt when what is to be installed has changed; an attempt that was cut off leaves no stamp and is repeated.
$(READY): pyproject.toml constraints.txt tools/install.py | $(BIN)/python
	@$(BIN)/python tools/install.py
	@touch $@

$(BIN)/python:
	@PYTHON="$(PYTHON)" tools/venv.sh $(VENV)
