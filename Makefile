# Python 3.10 or newer and a network are all that these targets assume; the second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test check docs test-vllm clean

demo: $(INSTALLED)
	$(BIN)/hyv4-kvdequant run tests/data/hyv4_step.safetensors --all

test: $(INSTALLED)
	$(BIN)/pytest -q -n 2 --dist loadfile

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/tools/check_wheel.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
