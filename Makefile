# Needs only Python (3.10 or later) and make. Every target installs what it needs into .venv, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: demo demo-ddp test test-frameworks check bench bench-guard bench-gpu docs clean

demo: .venv/examples
	$(BIN)/python examples/penguins.py

demo-ddp: .venv/examples
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/ddp_penguins.py

test: check
	$(BIN)/python -m pytest

# Lightning, accelerate, transformers and the like, and torch's own parallel modules on real ranks.
test-frameworks: .venv/frameworks
	$(BIN)/python -m pytest tests/frameworks

check: .venv/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: .venv/benchmarks
	$(BIN)/python benchmarks/bench_core.py --json benchmarks/results/core-cpu.json
	$(BIN)/python benchmarks/bench_transfer.py --device cpu --json benchmarks/results/transfer-cpu.json
	$(BIN)/python benchmarks/plot_transfer.py benchmarks/results/transfer-cpu.json benchmarks/results/transfer-cpu.svg
	$(BIN)/python benchmarks/bench_loader.py --json benchmarks/results/loader-cpu.json
	$(BIN)/python benchmarks/plot_transfer.py benchmarks/results/loader-cpu.json benchmarks/results/loader-cpu.svg
	$(BIN)/python benchmarks/bench_disk.py --json benchmarks/results/disk-cpu.json
	$(BIN)/python benchmarks/bench_distributed.py --json benchmarks/results/distributed-cpu.json

# Whether the core operations still cost what they did; not part of the tests, as machines are noisy.
bench-guard: .venv/benchmarks
	$(BIN)/python benchmarks/guard.py

# With the Python there is, as it has a torch for the GPU; it needs nothing else. What is not installed is left out.
bench-gpu:
	PYTHONPATH=. $(PYTHON) benchmarks/bench_transfer.py --json benchmarks/results/transfer-gpu.json
	PYTHONPATH=. $(PYTHON) benchmarks/bench_loader.py --json benchmarks/results/loader-gpu.json

docs: .venv/docs
	$(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf .venv examples/out site

# One stamp a requirements file; each installs the package itself too, in place.
.venv/%: %/requirements.txt examples/requirements.txt tests/requirements.txt pyproject.toml | $(BIN)/python
	$(INSTALL) -r $<
	$(INSTALL) --no-deps --editable .
	touch $@

.venv/frameworks: tests/frameworks/requirements.txt .venv/tests
	$(INSTALL) -r $<
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
