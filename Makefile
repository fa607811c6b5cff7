# The two commands of the README are `make demo` and `make test`; each sets up .venv from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types layers check test-slow test-engines clean

$(STAMP): pyproject.toml constraints-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	@# The CPU build first: with it installed, nothing below pulls GPU packages.
	command -v nvidia-smi >/dev/null 2>&1 || $(BIN)/pip install --quiet -c constraints-dev.txt torch
	$(BIN)/pip install --quiet -c constraints-dev.txt -e ".[demo]" --group dev
	touch $@

demo: $(STAMP)
	$(BIN)/tokentape demo

test: $(STAMP)
	$(BIN)/pytest -m "not slow and not engines"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

check: lint types layers test

test-slow: $(STAMP)
	$(BIN)/pytest -m slow

test-engines: $(STAMP)
	$(BIN)/pytest -m engines

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
