# Everything runs in .venv; the first target that needs it makes it. Needs Python 3.11 and make.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Prefect's command line and the demo keep their state here, not in the home folder.
export PERDURE_HOME ?= $(CURDIR)/.perdure
export PREFECT_SERVER_ANALYTICS_ENABLED := false
export DO_NOT_TRACK := 1

.PHONY: help demo demo-stop test bench check format clean

help:
	@echo "make demo       set everything up and run the main job with two faults"
	@echo "make demo-stop  end the demo's Prefect server"
	@echo "make test       set everything up and pass the tests"
	@echo "make bench      speed beside other programs, printed as ratios"
	@echo "make check      format, lint, types, layers, spelling"

$(VENV)/.installed: pyproject.toml
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "make: $(PYTHON) not found; use make PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/perdure demo

demo-stop: $(VENV)/.installed
	$(BIN)/perdure server stop

test: $(VENV)/.installed
	$(BIN)/python -m pytest

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.diagnose

check: $(VENV)/.installed
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: $(VENV)/.installed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:
	rm -rf $(VENV) .perdure .mypy_cache .ruff_cache .pytest_cache .import_linter_cache *.egg-info
