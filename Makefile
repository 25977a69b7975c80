# neve: every command that a developer or CI needs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STORE ?= dir
SEEDS ?= 2000
JOBS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test identity kills fuzz simulate soak check bench format clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	touch $@

setup: $(BIN)/.installed ## make the environment in .venv

demo: setup ## the whole way on real flights: publish, consume, offload, read cold, analyse (STORE=dir or minio)
	$(BIN)/python examples/flights.py --store $(STORE)

test: setup ## every test, with the servers that they need
	$(BIN)/python -m infra.minio --ensure
	$(BIN)/python -m infra.versitygw --ensure
	$(BIN)/pytest

identity: setup ## 100,000 messages of all shapes, about 2 GiB: hot bytes, cold bytes and Spark's view are equal
	$(BIN)/python -m infra.minio --ensure
	NEVE_IDENTITY_MESSAGES=100000 $(BIN)/pytest -s -o timeout=0 tests/integration/test_byte_identity.py

kills: setup ## 50 times kill -9 under load: nothing acknowledged is lost, moved or doubled
	NEVE_KILLS=50 $(BIN)/pytest -s -o timeout=0 tests/crash/test_kill.py

fuzz: setup ## damaged frames: 10 million into the codec, 1 million into servers (FUZZ="--codec 1000 --server 1000")
	$(BIN)/python -m tests.fuzz.run $(FUZZ)

simulate: setup ## histories, one a seed: power cuts, failing disks, clocks, outages, forks (SEEDS=5000 or 100-200, JOBS=2)
	$(BIN)/python -m tests.simulation.run $(SEEDS) --jobs $(JOBS)

soak: setup ## what takes too long for every commit: cold reads and scaling with both clients, at length, read by Spark
	$(BIN)/python -m infra.minio --ensure
	NEVE_SOAK=1 $(BIN)/pytest -o timeout=0 tests/interop/test_cold_clients.py tests/interop/test_scale.py

check: setup ## lint, types, import order
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

format: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## the benchmarks, side by side with what a user would pick instead
	$(BIN)/python bench/produce.py
	$(BIN)/python bench/consume.py
	$(BIN)/python bench/archive.py
	$(BIN)/python -m bench.pauses

clean: ## remove what the commands made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
