# Databus for Python. `make help` lists the commands; each does its own set-up.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

DB ?= sqlite
DURATION ?= 60
BIN := .venv/bin
ROOMS := relay bootstrap client common cli
CODE := $(ROOMS) tests benchmarks docs/generate examples
FIGURES := $(basename $(notdir $(wildcard benchmarks/fig_*.py benchmarks/capture_*.py benchmarks/takeover.py)))
PYTEST := $(BIN)/python -m pytest
# Each test file stays with one process, so that its servers are started once; the files come
# in the order of tests/support/fixtures.py, the long ones first. A test often waits for processes that
# it has killed or started: three processes keep two cores busy.
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
# Spark's classes from the archive that compile.sh made; passed over where there is none.
export SPARK_SUBMIT_OPTS ?= -XX:SharedArchiveFile=$(CURDIR)/.venv/spark-classes.jsa
# Each process would compile the modules again without the files that Python keeps.
unexport PYTHONDONTWRITEBYTECODE
# What `make demo` needs beside Python.
SERVER_OF_sqlite :=
SERVER_OF_mariadb := mariadb
SERVER_OF_postgres := postgres

# The stores of the tests sync their files hundreds of times: `make quick` has them in memory where
# there are 4 GB of it. `make test` has them on the disk.
MEMORY := $(shell df --output=avail -B1G /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 >= 4 {print "/dev/shm"}')

# Two at once, each with its output in one piece.
BESIDE := $(MAKE) --no-print-directory --output-sync=target -j 2

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  make demo DB=sqlite|postgres|mariadb DURATION=40   (seconds; default 60)"

.PHONY: setup
setup: ## Create .venv with the package, its extras and the tools; quick the second time
	@scripts/setup.sh

.PHONY: setup-demo
setup-demo:
	@$(if $(filter sqlite mariadb postgres,$(DB)),,echo "make: DB=$(DB) is unknown; choose sqlite, postgres or mariadb" >&2; exit 2;)
	@scripts/setup.sh $(SERVER_OF_$(DB))
	@scripts/compile.sh kernels

.PHONY: setup-test
setup-test:
	@scripts/setup.sh java mariadb postgres zookeeper mysql brokers jars sysbench percona chromium

.PHONY: demo
demo: setup-demo ## Show the whole system at work and compare the results, DB=sqlite by default
	@$(BIN)/databus demo --db $(DB) --duration $(DURATION)

.PHONY: test
test: setup-test ## Run everything: lint, types, contracts, benchmark smoke, the whole suite
	@$(BESIDE) run-compile run-lint run-types run-contracts
	@echo "== tests"
	@$(PYTEST) $(PARALLEL) --durations=25
	@# The storm is bounded by time, and leaves a core to the others.
	@$(BESIDE) run-storm run-matrix-and-bench-smoke

.PHONY: matrix
matrix: setup-test ## Run a lean set of tests on every other server version; downloads them with Maven
	@scripts/matrix.sh

.PHONY: check
check: setup-test ## Lint, types, contracts and all tests but the slow ones
	@$(BESIDE) run-compile run-lint run-types run-contracts
	@$(PYTEST) $(PARALLEL) -m "not slow"

.PHONY: quick
quick: export TMPDIR := $(or $(MEMORY),$(TMPDIR),/tmp)
quick: setup ## Under two minutes: lint, types, contracts and the tests in a process of their own
	@$(MAKE) --no-print-directory run-lint run-types run-contracts
	@$(PYTEST) $(PARALLEL) -q -m "not slow and not spark and not faults and not processes"

.PHONY: lint
lint: setup ## ruff (format and rules), mypy --strict, import contracts
	@$(MAKE) --no-print-directory run-lint run-types run-contracts

.PHONY: graph
graph: ## Print which folder imports which; fail on a cycle
	@python3 scripts/import_graph.py

.PHONY: format
format: setup ## Format the code and fix what ruff can fix
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

.PHONY: bench
bench: setup ## Run the benchmarks in full (minutes) and draw their plots
	@for figure in $(FIGURES); do echo "== $$figure"; $(BIN)/python -m benchmarks.$$figure; done

.PHONY: bench-peers
bench-peers: setup-test ## Measure beside every peer that can be had (an hour), and print the README's table
	-@benchmarks/peers/install.sh
	@$(BIN)/python -m benchmarks.fig_13_relay_throughput --consumers 1,10,40 --workers 1 --intervals 0 --seconds 1
	@$(BIN)/python -m benchmarks.fig_15_latency --consumers 1,40 --rates 2000 --seconds 2
	@for database in mariadb mysql postgres; do \
		$(BIN)/python -m benchmarks.capture_$$database --rows 300000 --rates 1000; done
	@$(BIN)/python -m benchmarks.peer_table

SEED ?= 0
CASES ?= 20000
MINUTES ?= 1
.PHONY: storm
storm: setup-test ## Random statements against a real server, compared: DB=mariadb|mysql|postgres|sqlite SEED=0 MINUTES=1
	@scripts/compile.sh kernels
	@$(BIN)/python -m tests.storm --db $(if $(filter command environment,$(origin DB)),$(DB),mariadb) --seed $(SEED) --minutes $(MINUTES)

.PHONY: storm-files
storm-files: setup-test ## Every file of every store flipped and cut: SEED=0 CASES=20000 (positions of a file, at most)
	@$(BIN)/python -m tests.storm.files --seed $(SEED) --cases $(CASES)

.PHONY: storm-ci
storm-ci: setup-test ## Five minutes of random statements with fresh seeds; tests/storm/ci.py lists the servers
	@scripts/compile.sh kernels
	@$(BIN)/python -m tests.storm.ci

.PHONY: coverage
coverage: setup-test ## The whole suite under branch coverage; report in htmlcov/
	@$(MAKE) --no-print-directory run-compile
	@$(PYTEST) $(PARALLEL) --cov --cov-report=term --cov-report=html

.PHONY: docs
docs: setup ## Build the manual into build/site, strictly
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet
	@echo "the manual is in build/site; its search needs a server:"
	@echo "  $(BIN)/python -m http.server --directory build/site"

.PHONY: build
build: setup ## Build the wheel and the source distribution into dist/
	@$(BIN)/python -m hatchling build

.PHONY: release
release: setup ## Wheel, sdist and image context of the tag that HEAD has, in dist/
	@scripts/release.sh

.PHONY: hooks
hooks: setup ## Install the git hooks of .pre-commit-config.yaml
	@$(BIN)/pre-commit install

.PHONY: freeze
freeze: setup ## Hold the versions of .venv still in scripts/constraints.txt
	@{ head -n 1 scripts/constraints.txt; $(BIN)/python -m pip freeze --exclude-editable; } >scripts/constraints.new
	@mv scripts/constraints.new scripts/constraints.txt

.PHONY: clean
clean: ## Delete what the tools left behind, but neither .venv nor data in var/
	rm -rf dist build htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache .hypothesis spark-warehouse
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The steps without their set-up.
.PHONY: run-compile run-lint run-types run-contracts run-bench-smoke run-storm run-matrix-and-bench-smoke
run-compile:
	@scripts/compile.sh kernels spark-classes
run-lint:
	@echo "== ruff"
	@$(BIN)/ruff format --check $(wildcard $(CODE))
	@$(BIN)/ruff check $(wildcard $(CODE))
run-types:
	@echo "== mypy"
	@$(BIN)/mypy
run-contracts:
	@echo "== import contracts"
	@$(BIN)/lint-imports
run-bench-smoke:
	@echo "== benchmark smoke"
	@$(if $(FIGURES),,echo "make: there is no benchmarks/fig_*.py" >&2; exit 1)
	@# Two at once: a smoke run shows that they work, and measures nothing.
	@printf '%s\n' $(FIGURES) | xargs -P 2 -I {} bash -c \
		'said=$$($(BIN)/python -m benchmarks.{} --smoke 2>&1) && code=0 || code=$$?; \
		printf -- "-- %s\n%s\n" {} "$$said"; exit $$code'
	@$(BIN)/python -m benchmarks.peer_table --smoke
run-storm:
	@echo "== storm"
	@$(BIN)/python -m tests.storm.ci
run-matrix-and-bench-smoke: run-bench-smoke
	@scripts/matrix.sh --short mysql-8.0.15
