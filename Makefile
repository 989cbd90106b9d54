SEEDS ?= 1000

.PHONY: help setup base check test test-quick simulate matrix demo bench bench-quick lock clean

help: ## show the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: ## .venv, Java, the Iceberg JVM runtime, the servers of the tests; silent when there is nothing to do
	@scripts/setup.sh

base: # the same without the servers of the tests
	@scripts/setup.sh base

check: base ## formatting, lint, types, layers
	@.venv/bin/ruff format --check --quiet
	@.venv/bin/ruff check --quiet
	@.venv/bin/mypy --no-error-summary
	@.venv/bin/lint-imports --no-logo --no-cache

test: setup check ## everything: checks and all tests
	@.venv/bin/pytest

test-quick: base ## tests that are short and start neither Spark nor a server, under 2 minutes
	@.venv/bin/pytest -m "not servers and not long"

matrix: setup ## run the crash matrix and write its results into docs/guarantees.md
	@LOCKSTEP_WRITE_MATRIX=1 .venv/bin/pytest tests/crash/test_crash_matrix.py

simulate: base ## SEEDS=1000 simulated runs of store, worker and commit; SEED=n shows one of them
	@.venv/bin/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

demo: base ## the main job end to end, with a crash in the middle
	@.venv/bin/lockstep demo

bench: setup ## throughput beside the peers, what the stores cost per task, a commit of 100,000 files, and imports
	@.venv/bin/python bench/run.py
	@.venv/bin/python bench/store.py
	@.venv/bin/python bench/commit.py
	@.venv/bin/python bench/imports.py

bench-quick: base ## the same on little data
	@.venv/bin/python bench/run.py --quick
	@.venv/bin/python bench/store.py --quick
	@.venv/bin/python bench/commit.py --quick
	@.venv/bin/python bench/imports.py --quick

lock: ## write the pinned requirement files anew; OPTIONS=--upgrade raises the versions
	@scripts/lock.sh $(OPTIONS)

clean: ## remove the environment and the caches of the tools; the cache outside the tree stays
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build
