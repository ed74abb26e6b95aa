# Needs only Python (3.10 or later) and make. Every target installs what it needs into .venv, once.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check bench clean

demo: .venv/examples
	$(BIN)/python examples/penguins.py

test: check
	$(BIN)/python -m pytest

check: .venv/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/benchmarks
	$(BIN)/python benchmarks/bench_core.py

clean:
	rm -rf .venv examples/out

# One stamp a requirements file; each installs the package itself too, in place.
.venv/%: %/requirements.txt examples/requirements.txt tests/requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $<
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
