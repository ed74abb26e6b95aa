# Needs only Python (3.10 or later) and make. Every target installs what it needs, once: into .venv, the
# benchmarks into .venv-bench.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
INSTALL := $(BIN)/python $(PIP_INSTALL)
BENCH := .venv-bench/bin/python benchmarks
# Of this machine. The committed ones, which the pages show, are made with RESULTS=benchmarks/results.
RESULTS ?= benchmarks/out
# The tests start many processes that import the package: each would compile it where this variable is set.
unexport PYTHONDONTWRITEBYTECODE
# One worker for each core. Tests of one group, which would disturb each other, share a worker.
PARALLEL := -n auto --dist loadgroup
# The torch of test-torch.
VERSION ?= 2.15.0

.PHONY: demo demo-ddp demo-table test test-fast test-tables-long coverage test-pythons test-torch test-frameworks test-engines test-device test-cuda check bench bench-more bench-gallery bench-gpu figures guard guard-update docs hooks dist clean

demo: .venv/examples
	$(BIN)/python examples/penguins.py

demo-ddp: .venv/examples
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/ddp_penguins.py

demo-table: .venv/examples
	$(BIN)/python examples/table.py

test: check
	$(BIN)/python -m pytest $(PARALLEL)

# A quick loop: neither type checks nor the tests that take seconds or start several ranks.
test-fast: .venv/tests
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not ranks"

# The tests of tables, with many more crashes, interrupts and failures of the disk. It takes minutes.
test-tables-long: .venv/tests
	@mkdir -p $(RESULTS)
	CHOICES=40 TIMES=300 STEP=1 TRIED=$(RESULTS)/trust-cpu.json \
		$(BIN)/python -m pytest $(PARALLEL) tests/test_table*.py

# Which lines and branches the tests reach, those that run in workers and on ranks included.
coverage: .venv/tests
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(PARALLEL)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

# The tests on each CPython from 3.10 to 3.15 that is on the path or in pyenv, each in an environment of its own. torch
# takes 5 GB in each. Types and style are those of `make check`.
test-pythons:
	.ci/pythons $(PARALLEL)

# The tests on another version of torch, in an environment of its own: make test-torch VERSION=2.15.0. It takes 5 GB.
test-torch: .venv-torch-$(VERSION)/tests
	PATH="$(CURDIR)/$(<D)/bin:$$PATH" $(<D)/bin/python -m pytest $(PARALLEL)

# Lightning, accelerate, transformers and the like, and torch's own parallel modules on real ranks.
test-frameworks: .venv/frameworks
	$(BIN)/python -m pytest tests/frameworks

# Ray and Dask, the examples for them, and two hosts. They take 500 MB, so .ci/run leaves them out.
test-engines: .venv/engines
	$(BIN)/python -m pytest tests/engines tests/test_pickle5.py

# Streams, pinned memory and graphs, on a device of our own that torch's headers and a C++ compiler make: see
# tests/device. It takes the place of the simulated one in the tests that move data.
test-device: .venv/tests
	PYTHONPATH=tests/device $(BIN)/python -m pytest -p strict -m "not slow" tests/device \
		tests/test_cuda.py tests/test_fill.py tests/test_loader.py tests/test_moving.py tests/test_packing.py \
		tests/test_prefetch.py tests/test_transfer.py

# The same tests on a GPU, with the Python there is, as it has a torch for the GPU. It needs what tests/requirements.txt has.
test-cuda: export PYTHONPATH = .
test-cuda:
	TEST_DEVICE=cuda $(PYTHON) -m pytest -m device

# pyright is clean with the annotations of NumPy 2.4, which needs Python 3.11. On 3.10, where NumPy ends at 2.2, it is
# left out; elsewhere it checks the code as Python 3.10 (pythonVersion in pyproject.toml).
check: .venv/tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if $(BIN)/python -c "import sys; sys.exit(sys.version_info < (3, 11))"; then \
		echo $(BIN)/pyright; $(BIN)/pyright && $(BIN)/pyright -p tests --threads 2; \
	else \
		echo "pyright is left out on Python 3.10: see the Makefile"; \
	fi

# Compares the instructions that the core operations execute with the committed counts, and with those of plain loops.
# Needs Valgrind, and the versions that the counts were committed with; without them it says so and passes. guard-update
# writes new counts. In any other setting: python benchmarks/guard.py --quotients
guard: .venv/tests
	$(BIN)/python benchmarks/guard.py

guard-update: .venv/tests
	$(BIN)/python benchmarks/guard.py --update

# Every operation beside what else holds a batch: a table, and the picture peers-cpu.svg.
bench: .venv-bench/benchmarks
	@mkdir -p $(RESULTS)
	$(BENCH)/bench_peers.py --json $(RESULTS)/peers-cpu.json
	$(BENCH)/plot.py $(RESULTS)/peers-cpu.json $(RESULTS)/peers-cpu.svg
	@echo "The picture is $(RESULTS)/peers-cpu.svg."

# Each part by itself, in several sizes, without a GPU.
bench-more: export CUDA_VISIBLE_DEVICES =
bench-more: .venv-bench/benchmarks
	@mkdir -p $(RESULTS)
	$(BENCH)/bench_transfer.py --json $(RESULTS)/transfer-cpu.json
	$(BENCH)/plot.py $(RESULTS)/transfer-cpu.json $(RESULTS)/transfer-cpu.svg
	$(BENCH)/bench_loader.py --json $(RESULTS)/loader-cpu.json
	$(BENCH)/plot.py $(RESULTS)/loader-cpu.json $(RESULTS)/loader-cpu.svg
	$(BENCH)/bench_disk.py --json $(RESULTS)/disk-cpu.json
	$(BENCH)/bench_memory.py --json $(RESULTS)/memory-cpu.json
	$(BENCH)/bench_rows.py --json $(RESULTS)/rows-cpu.json
	$(BENCH)/plot.py $(RESULTS)/rows-cpu.json $(RESULTS)/rows-cpu.svg
	$(BENCH)/bench_table.py --json $(RESULTS)/table-cpu.json
	$(BENCH)/bench_ragged.py --json $(RESULTS)/ragged-cpu.json
	$(BENCH)/bench_order.py --json $(RESULTS)/order-cpu.json
	$(BENCH)/bench_distributed.py --json $(RESULTS)/distributed-cpu.json
	$(BENCH)/bench_engines.py --json $(RESULTS)/engines-cpu.json
	$(BENCH)/bench_gallery.py --json $(RESULTS)/gallery-cpu.json
	$(BENCH)/bench_tasks.py --json $(RESULTS)/tasks-cpu.json
	$(BENCH)/outputs.py --json $(RESULTS)/outputs-cpu.json

# The programs of the gallery alone, in about two minutes.
bench-gallery: .venv-bench/benchmarks
	@mkdir -p $(RESULTS)
	$(BENCH)/bench_gallery.py --json $(RESULTS)/gallery-cpu.json
	$(BENCH)/bench_tasks.py --json $(RESULTS)/tasks-cpu.json

# With the Python there is, as it has a torch for the GPU; it needs nothing else. What is not installed is left out.
bench-gpu: export PYTHONPATH = .
bench-gpu:
	@mkdir -p $(RESULTS)
	$(PYTHON) benchmarks/bench_moves.py --json $(RESULTS)/moves-gpu.json
	$(PYTHON) benchmarks/bench_transfer.py --json $(RESULTS)/transfer-gpu.json
	-$(PYTHON) benchmarks/plot.py $(RESULTS)/transfer-gpu.json $(RESULTS)/transfer-gpu.svg
	$(PYTHON) benchmarks/bench_loader.py --json $(RESULTS)/loader-gpu.json
	-$(PYTHON) benchmarks/plot.py $(RESULTS)/loader-gpu.json $(RESULTS)/loader-gpu.svg

# The tables of the pages and the chart of README.md, from the committed results. Nothing is measured. `make docs` draws
# the other charts.
figures: .venv/tests
	$(BIN)/python benchmarks/figures.py

docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	SITE=site $(BIN)/python -m pytest -q tests/test_site.py
	@echo "The pages are in site: open site/index.html."

# ruff and pyright before each commit, from .venv: nothing is fetched then.
hooks: .venv/tests .venv/dist
	$(BIN)/pre-commit install

# The sdist and the wheel, in dist, built and checked. The wheel is installed alone in a fresh environment and tested there.
# That environment finds torch, NumPy and pytest in .venv, as to install torch again takes minutes; of this package it has
# the wheel alone, which the script checks.
dist: .venv/tests .venv/dist
	.ci/dist

clean:
	rm -rf dist .venv .venv-bench .venv-3.* .venv-torch-* examples/out benchmarks/out site

# One stamp a requirements file; each installs the package itself too, in place.
.venv/%: %/requirements.txt examples/requirements.txt tests/requirements.txt pyproject.toml | $(BIN)/python
	$(INSTALL) -r $<
	$(INSTALL) --no-deps --editable .
	touch $@

.venv/frameworks: tests/frameworks/requirements.txt .venv/tests
	$(INSTALL) -r $<
	touch $@

.venv/engines: tests/engines/requirements.txt .venv/tests
	$(INSTALL) -r $<
	touch $@

.venv/dist: .ci/requirements.txt .venv/tests
	$(INSTALL) -r $<
	touch $@

# The packages of the tests but torch, which is of the version that the name says.
.venv-torch-%/tests: tests/requirements.txt examples/requirements.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	grep -hv -e '^-r' -e '^torch==' tests/requirements.txt examples/requirements.txt > $(@D)/requirements.txt
	$(@D)/bin/python $(PIP_INSTALL) torch==$* -r $(@D)/requirements.txt
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --editable .
	touch $@

# An environment of its own: the newest torch; and tianshou and the tests of frameworks want different versions of pandas.
.venv-bench/benchmarks: benchmarks/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(PIP_INSTALL) -r $<
	.venv-bench/bin/python $(PIP_INSTALL) --no-deps --editable .
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
