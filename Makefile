# Both set up all they need: `make demo` runs a bundled scenario, `make test` the tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SCENARIO ?= scenarios/library/chat-h100.yaml
OUT ?= out/demo

.PHONY: demo test check bench docs

demo: $(VENV)/run
	$(BIN)/servecast run $(SCENARIO) --out $(OUT)
	@echo "open $(OUT)/report.html"

test: $(VENV)/test
	$(BIN)/python -m pytest -n 2 -q

check: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy costmodels sim calibration reports scenarios
	$(BIN)/lint-imports

bench: $(VENV)/run
	$(BIN)/python benchmarks/speed.py

SOURCES = pyproject.toml $(wildcard costmodels/* sim/* calibration/* reports/* scenarios/* scenarios/library/*)

$(VENV)/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade pip
	@touch $@

$(VENV)/run: $(VENV)/pip $(SOURCES)
	$(BIN)/python -m pip install -q .
	@touch $@

$(VENV)/test: $(VENV)/pip $(SOURCES)
	$(BIN)/python -m pip install -q '.[test]'
	@touch $@
