# Every command sets up what it needs by itself: a virtual environment in .venv with pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt
LAB := $(VENV)/.lab
STAMP := $(VENV)/.test
DOCS := $(VENV)/.docs
WORKERS ?= 2
export DEVICE  # of tests/contract/test_devices.py; an imitation of a second device if it is not set
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: test slow soak demo docs gallery lint types fast bench format wheels clean

test: lint types  ## lint, types and all tests but those that take long, doctests included; DEVICE=cuda for a GPU
	$(PYTEST) -m "not slow and not soak"

slow: $(DOCS)  ## what takes minutes, in full; make test has it in small
	$(PYTEST) -m slow

soak: $(STAMP)  ## hours of kills and fuzzing: SOAK_MINUTES=60 SOAK_KILLS=200
	$(PYTEST) -m soak

demo: $(LAB)  ## what the library is for, measured in two to three minutes; ends by saying where the page is
	$(BIN)/bayesgrad demo --out runs --resume

docs: $(DOCS)  ## the documentation as a site, site/index.html; a warning is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html docs site
	@echo "site/index.html"

gallery: $(STAMP)  ## run the examples that changed, and keep what they print and draw in docs/gallery
	$(BIN)/python docs/site_tools/gallery.py

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

bench: $(LAB)  ## timings side by side with torch.optim, and what became slower; keep the machine idle
	$(BIN)/bayesgrad bench --history docs/results/benchmarks.jsonl --write docs/results/benchmarks.md

wheels: $(STAMP)  ## build and check what is published: dist/
	rm -rf dist
	$(PIP) build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist lab
	$(BIN)/python -m twine check --strict dist/*

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

# What builds the site: Sphinx and its theme; the reference imports the integrations, whose packages the tests install.
$(DOCS): $(STAMP)
	$(PIP) --editable ".[docs]"
	touch $@
