# Start with `make demo` and `make test`. `make help` lists all targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo test soak check format bench reproduce pictures clean
help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@echo "creating the virtual environment in $(VENV) (PyTorch is large: this takes a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(STAMP)  ## create the virtual environment in .venv

demo: $(STAMP)  ## train digits on 1 and on 2 workers, and compare
	@$(BIN)/python examples/demo.py

test: $(STAMP)  ## run the whole test suite
	$(BIN)/pytest -n 2

soak: $(STAMP)  ## run the long tests, such as a million malformed frames and rows; report in artefacts/soak.json
	$(BIN)/pytest tests/soak -s

check: $(STAMP)  ## check format, lint, types and import layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/pyright -p benchmarks
	$(BIN)/lint-imports

format: $(STAMP)  ## format the code and apply lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)  ## run most benchmarks; print tables and write JSON to benchmarks/results
	$(BIN)/python benchmarks/footprint.py
	$(BIN)/python benchmarks/exchange.py
	$(BIN)/python benchmarks/codecs.py
	$(BIN)/python benchmarks/feed.py
	$(BIN)/python benchmarks/leases.py
	$(BIN)/python benchmarks/control.py
	$(BIN)/python benchmarks/server.py
	$(BIN)/python benchmarks/rate.py
	$(BIN)/python benchmarks/speedup.py
	$(BIN)/python benchmarks/waiting.py
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/bsp.py
	$(BIN)/python benchmarks/pool.py
	$(BIN)/python benchmarks/plot.py
	$(BIN)/python benchmarks/watch.py

reproduce: $(STAMP)  ## measure the time to a target: one process, DDP, and rules on 2 workers (9 minutes)
	$(BIN)/python benchmarks/reproduce

pictures: $(STAMP)  ## regenerate the pictures of README and docs from real runs
	$(BIN)/python docs/pictures/make.py

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache
