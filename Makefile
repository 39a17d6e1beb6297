# Every command sets up what it needs by itself: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
LAB := $(VENV)/.lab
STAMP := $(VENV)/.test
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: test slow soak demo lint types fast bench format clean

test: lint types  ## lint, types and all tests but those that take long, doctests included
	$(PYTEST) -m "not slow and not soak"

slow: $(STAMP)  ## what takes minutes, in full; make test has it in small
	$(PYTEST) -m slow

soak: $(STAMP)  ## hours of kills and fuzzing: SOAK_MINUTES=60 SOAK_KILLS=200
	$(PYTEST) -m soak

demo: $(LAB)  ## what the library is for, measured in two to three minutes; ends by saying where the page is
	$(BIN)/bayesgrad demo --out runs --resume

fast: $(STAMP)  ## the tests that take no compilation, up to the first that fails
	$(PYTEST) -m "not compiled and not slow and not soak" -x

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright

format: $(STAMP)  ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(LAB)  ## timings side by side with torch.optim; keep the machine idle
	$(BIN)/bayesgrad bench

clean:
	rm -rf $(VENV)

# torch comes first and alone, so that no resolver replaces the pinned build by another one.
$(LAB): pyproject.toml lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[models,plots,samplers]" --editable lab
	touch $@

# The packages that tests compare with, and their tools.
$(STAMP): $(LAB) tests/peers.txt
	$(PIP) --editable ".[test]"
	$(PIP) --no-deps --requirement tests/peers.txt
	touch $@
