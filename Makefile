# Python 3.10 or newer and a network are all that these targets assume; the second run is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What a demo needs; and on top of it, in the same environment, what tests, checks and the site need.
DEMO := $(VENV)/.demo
INSTALLED := $(VENV)/.installed

.PHONY: demo test check docs api-snapshot test-vllm clean

demo: $(DEMO)
	$(BIN)/hyv4-kvdequant run tests/data/hyv4_step.safetensors --all

test: $(INSTALLED)
	$(BIN)/pytest -q -n 2 --dist loadfile

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/tools/compile_triton.py
	$(BIN)/python tests/tools/check_wheel.py

# The site, warnings as errors, into site/.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tests/tools/check_site.py

# After a public name changed and CHANGELOG.md says so.
api-snapshot: $(INSTALLED)
	$(BIN)/python tests/api_snapshot.py

$(DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

$(INSTALLED): $(DEMO)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# The vLLM suite: each real vLLM in an environment of its own, CPU PyTorch, nothing of vLLM patched.
VLLM_VERSIONS := 0.29.0 0.33.0 0.34.0

test-vllm: $(VLLM_VERSIONS:%=test-vllm-%)

test-vllm-%: .venv-vllm-%/.installed
	.venv-vllm-$*/bin/pytest -q -n 2 -m "vllm and not gpu" tests/vllm

.venv-vllm-%/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm-$*
	.venv-vllm-$*/bin/python -m pip install -q -r constraints-vllm.txt -e .
	.venv-vllm-$*/bin/python -m pip install -q --no-deps vllm==$*
	@touch $@

.PRECIOUS: .venv-vllm-%/.installed
