# The two commands of a newcomer are `make demo` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo test soak check format bench pictures clean
help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@echo "making the virtual environment in $(VENV) (PyTorch is large: this takes a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(STAMP)  ## make the virtual environment

demo: $(STAMP)  ## train the digits alone and on 2 workers, and compare
	@$(BIN)/python examples/demo.py

test: $(STAMP)  ## run the whole test suite
	$(BIN)/pytest -n 2

soak: $(STAMP)  ## tests that take many minutes, such as a million hostile frames and rows; report in artefacts/soak.json
	$(BIN)/pytest tests/soak -s

check: $(STAMP)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP)  ## bring the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## measure footprint, exchanges, all-reduce, speed-ups: tables, and JSON in benchmarks/results
	$(BIN)/python benchmarks/footprint.py
	$(BIN)/python benchmarks/exchange.py
	$(BIN)/python benchmarks/feed.py
	$(BIN)/python benchmarks/leases.py
	$(BIN)/python benchmarks/control.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/mpi.py
	$(BIN)/python benchmarks/rate.py
	$(BIN)/python benchmarks/speedup.py
	$(BIN)/python benchmarks/waiting.py
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/bsp.py
	$(BIN)/python benchmarks/pool.py
	$(BIN)/python benchmarks/plot.py
	$(BIN)/python benchmarks/watch.py

pictures: $(STAMP)  ## make the pictures of README and docs again, from real runs
	$(BIN)/python docs/pictures/make.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
