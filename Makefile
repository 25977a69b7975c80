# neve: every command that a developer or CI needs. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STORE ?= dir
SEEDS ?= 2000
JOBS ?= 1
ROUNDS ?= 20
ENTRIES ?= 1000
MODES ?= sync sync-available async
SEED ?= 1

.DEFAULT_GOAL := help
RELEASE_TOOLS := build==1.6.1 towncrier==26.9.0 twine==7.0.0
.PHONY: help notes dist setup lock demo demo-ha servers test test-interop test-spark test-own test-unit coverage identity kills stream-kills pipeline fuzz simulate year histories beside-apache delta seam soak zipapp drill lines migrations stock-tests check docs pictures bench format clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

LOCK := requirements.lock

# What builds a package first, so that the lock holds for it, too: hatchling neve itself, setuptools those that come as source.
$(BIN)/.installed: pyproject.toml $(LOCK)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c $(LOCK) hatchling editables setuptools
	$(BIN)/pip install -q --disable-pip-version-check -c $(LOCK) --no-build-isolation -e '.[dev]'
	touch $@

setup: $(BIN)/.installed ## make the environment in .venv, with the versions of requirements.lock

lock: ## renew requirements.lock: the newest versions that fit, in an environment of their own; test before you commit it
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/pip install -q --disable-pip-version-check -e '.[dev]'
	{ echo '# The versions that the tests ran with: `make setup` installs these, `make lock` renews them.'; \
	  $(VENV)-lock/bin/pip freeze --all --exclude-editable --exclude pip; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf $(VENV)-lock

demo: setup ## publish, consume, archive and query real flights, with a report in build/demo.html (STORE=dir or minio)
	$(if $(filter minio,$(STORE)),$(BIN)/python -m tests.kit.server.go_build minio)
	$(BIN)/neve demo --store $(STORE) --report build/demo.html

demo-ha: setup ## a broker set of three loses its master under load: the timeline, and that nothing acknowledged is lost
	$(BIN)/python examples/failover.py

servers: setup ## find, build or fetch what tests start: S3, etcd, Prometheus, and classes for quick starts of Spark
	$(BIN)/python -m tests.kit.server.go_build
	$(BIN)/python -m tests.kit.server.spark_jvm

# Three suites run side by side, the longest first; the fourth begins when one ends. Spark's tests on a cluster need a JVM of
# their own: a context is a process's for good, and so is what its file systems know of an S3.
SPARK_CLUSTER := tests/integration/test_spark_cluster.py
SPARK_TESTS = $(filter-out $(SPARK_CLUSTER),$(wildcard tests/integration/test_spark*.py tests/crash/test_stream*.py tests/integration/test_pipeline*.py))

test: ## every test, with the servers that they need
	$(MAKE) --no-print-directory -k -j3 LATER=--later test-interop test-spark test-own test-unit
	$(BIN)/python -m tests.suite --again interop spark spark-cluster own unit

test-interop: servers ## of them, those with Apache's clients and servers
	$(BIN)/python -m tests.suite $(LATER) interop --durations=15 tests/interop

test-spark: servers ## of them, those of Spark
	$(BIN)/python -m tests.suite $(LATER) spark --durations=15 $(SPARK_TESTS)
	$(BIN)/python -m tests.suite $(LATER) spark-cluster --durations=15 $(SPARK_CLUSTER)

test-own: servers ## of them, all others that start servers, and the simulation
	$(BIN)/python -m tests.suite $(LATER) own --durations=15 --ignore=tests/interop --ignore=tests/unit $(patsubst %,--ignore=%,$(SPARK_TESTS) $(SPARK_CLUSTER))

test-unit: servers ## of them, those of single modules
	$(BIN)/python -m tests.suite $(LATER) unit --durations=15 tests/unit

PACKAGES := neve pyspark_neve infra access controller namesrv tiered lifecycle broker

coverage: setup ## branch coverage of the unit tests, by package in percent; `.venv/bin/coverage html` shows the lines
	$(BIN)/coverage run -m pytest -q tests/unit
	@for package in $(PACKAGES); do \
	  printf '%-14s %s\n' $$package $$($(BIN)/coverage report --format=total --precision=1 --include="$$package/*"); done

identity: setup ## 100,000 messages of all shapes, about 2 GiB, and as many that are compacted twice: hot bytes, cold bytes and Spark's view are equal
	$(BIN)/python -m tests.kit.server.go_build minio
	NEVE_IDENTITY_MESSAGES=100000 $(BIN)/pytest -s -o timeout=0 tests/integration/test_byte_identity.py

kills: setup ## 50 times kill -9 under load: nothing acknowledged is lost, moved or doubled
	NEVE_KILLS=50 $(BIN)/pytest -s -o timeout=0 tests/crash/test_kill.py

stream-kills: setup ## a Spark stream over 1,000,000 messages, its driver killed 20 times while the archive changes: each row once
	NEVE_STREAM_MESSAGES=1000000 NEVE_STREAM_KILLS=20 $(BIN)/pytest -s -o timeout=0 -o faulthandler_timeout=0 tests/crash/test_stream_kills.py

pipeline: setup ## a Spark pipeline on real flights and weather, its job killed three times: each figure as pandas has it (STORE=dir or minio)
	$(if $(filter minio,$(STORE)),$(BIN)/python -m tests.kit.server.go_build minio)
	$(BIN)/python -m examples.pipeline --store $(STORE)

fuzz: setup ## damaged frames: 10 million into the codec, 1 million into servers (FUZZ="--codec 1000 --server 1000")
	$(BIN)/python -m tests.fuzz.run $(FUZZ)

simulate: setup ## histories, one a seed: power cuts, failing disks, clocks, outages, forks, broker sets (SEEDS=5000 or 100-200, JOBS=2)
	$(BIN)/python -m tests.simulation.run $(SEEDS) --jobs $(JOBS)

year: setup ## a year of a broker with ten thousand topics, by the simulator: what is there month by month, and that nothing grows (YEAR="--days 60")
	$(BIN)/python -m tests.simulation.year.run $(YEAR)

histories: setup ## kills, freezes and cut links on a real broker set, and what clients were told and saw (ROUNDS=200 MODES=sync SEED=7 WITH=--archive)
	for mode in $(MODES); do $(BIN)/python -m tests.histories.run --mode $$mode --rounds $(ROUNDS) --seed $(SEED) $(WITH) || exit 1; done

beside-apache: setup ## 200,000 messages of a stock producer at an Apache master, archived by neve beside it, read cold and by Spark
	NEVE_BESIDE_APACHE=200000 $(BIN)/pytest -o timeout=0 -o faulthandler_timeout=0 tests/interop/test_beside_apache.py

# DuckDB's extension is of one version of DuckDB, and not of the newest: both in a place of their own.
$(VENV)-duckdb/bin/python: $(BIN)/.installed
	$(BIN)/python -m venv $(VENV)-duckdb
	$(VENV)-duckdb/bin/pip install --quiet duckdb==1.5.5 duckdb-extension-delta==1.5.5

# Delta's part for Spark is there for some of its versions only: neither is the one of the other tests.
$(VENV)-delta/bin/python: $(BIN)/.installed
	$(BIN)/python -m venv $(VENV)-delta
	$(VENV)-delta/bin/pip install --quiet 'pyspark==4.1.4' delta-spark==4.1.0

delta: setup $(VENV)-duckdb/bin/python $(VENV)-delta/bin/python ## a Delta table held against the archive by delta-rs, DuckDB and Spark after each of so many entries of two journals (ENTRIES=1000)
	NEVE_DELTA_DUCKDB=$(VENV)-duckdb/bin/python NEVE_DELTA_SPARK=$(VENV)-delta/bin/python NEVE_DELTA_ENTRIES=$(ENTRIES) $(BIN)/pytest -o timeout=0 -o faulthandler_timeout=0 tests/unit/lifecycle/test_delta_tables.py -k after_each

seam: setup ## Spark reads archive and brokers as one table a hundred times in live traffic, and streams: each row once (READS=100)
	NEVE_SEAM_READS=$(or $(READS),100) $(BIN)/pytest -s --timeout 3000 tests/integration/test_spark_tiers.py -k live

soak: setup ## what takes too long for every commit: cold reads and scaling with both clients, at length, read by Spark
	$(BIN)/python -m tests.kit.server.go_build minio
	NEVE_SOAK=1 $(BIN)/pytest -o timeout=0 tests/interop/test_cold_clients.py tests/interop/test_scale.py

# For this version of Python and this kind of machine: what is compiled in it is unpacked below ~/.shiv at its first run.
zipapp: setup ## the command line and the Python client in one file, dist/neve.pyz, which needs python3 alone (EXTRAS=archive)
	rm -rf dist/zipapp && $(BIN)/python -m hatchling build -t wheel -d dist/zipapp
	$(BIN)/shiv -c neve -p '/usr/bin/env python3' -o dist/neve.pyz --constraint $(LOCK) "$$(echo dist/zipapp/neve-*.whl)$(if $(EXTRAS),[$(EXTRAS)])"
	rm -r dist/zipapp

# Tools of a release: in an environment of their own.
$(VENV)-release/.installed: Makefile
	$(PYTHON) -m venv --clear $(VENV)-release
	$(VENV)-release/bin/pip install -q --disable-pip-version-check $(RELEASE_TOOLS)
	touch $@

notes: $(VENV)-release/.installed ## the section of a release in CHANGELOG.md, from the fragments in changes/ (VERSION=0.2.0)
	$(VENV)-release/bin/towncrier build --yes --version $(VERSION)

dist: $(VENV)-release/.installed ## wheel and source archive of a release in dist/, checked by twine
	rm -rf dist/release && $(VENV)-release/bin/python -m build -o dist/release
	$(VENV)-release/bin/twine check --strict dist/release/*

drill: servers ## six outages, two minutes each (MINUTES=5): what every surface says, minute by minute, as a table
	NEVE_DRILL_MINUTES=$(or $(MINUTES),2) $(BIN)/pytest -q -s -o timeout=0 tests/integration/test_outage_drill.py

lines: setup ## a million lines through `neve produce` and `neve consume`, timed and compared byte for byte (LINES="--lines 100000")
	$(BIN)/python -m bench.lines $(LINES)

MESSAGES ?= 100000
migrations: setup ## the four ways from an Apache broker to neve, line by line, with messages and what is on its way (MESSAGES=100000)
	NEVE_MIGRATION_MESSAGES=$(MESSAGES) $(BIN)/pytest -s -o timeout=0 -o faulthandler_timeout=0 tests/interop/test_migration_page.py

stock-tests: setup ## RocketMQ's own integration tests of notifications and of resets of pop groups (ROCKETMQ=a checkout of its release 5.3.3)
	$(BIN)/python -m tests.interop.stock_tests $(ROCKETMQ)

check: setup ## lint, types, import order, documentation build
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(MAKE) --no-print-directory docs
	$(BIN)/mypy

docs: setup ## the documentation site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q

pictures: setup ## draw the pictures of the documentation, docs/assets/*.svg, from docs/pictures/*.d2
	$(BIN)/python -m tests.pictures

format: setup ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## the benchmarks, side by side with what a user would pick instead
	$(BIN)/python bench/produce.py
	$(BIN)/python -m bench.auth
	$(BIN)/python bench/consume.py
	$(BIN)/python bench/archive.py
	$(BIN)/python -m bench.rounds
	$(BIN)/python -m bench.cold --apache
	$(BIN)/python -m bench.pauses
	$(BIN)/python -m bench.one_request
	$(BIN)/python -m bench.catalog
	$(BIN)/python -m bench.scale
	$(BIN)/python -m bench.isolation
	$(BIN)/python -m bench.beside
	$(BIN)/python -m bench.spark

clean: ## remove what the commands made
	rm -rf $(VENV) $(VENV)-lock $(VENV)-duckdb $(VENV)-delta $(VENV)-release .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage htmlcov
