# `make help` lists the targets. Each makes .venv first, once, with the first suitable Python on the
# PATH or the one named: `PYTHON=python3.10 make demo`.
#
#   ARGS       more arguments for the command of `demo`, `test` or `bench-check`:  make test ARGS="-k plan"
#   PROCESSES  how many processes share the tests; each has virtual devices of its own

# TensorFlow shows its errors, not its start-up notes.
export TF_CPP_MIN_LOG_LEVEL ?= 2

PROCESSES ?= 2

python = .venv/bin/python

.DEFAULT_GOAL := help
.PHONY: help venv demo test check bench-check docs wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile

demo: venv ## train a small model on every device and on one, and compare
	$(python) -m keras_gpufeed demo $(ARGS)

test: venv ## run all tests
	$(python) -m pytest --numprocesses $(PROCESSES) --dist worksteal $(ARGS)

check: venv ## lint, format, types and documentation, without changing a file
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(python) -m mypy
	$(python) -m mkdocs build --strict

bench-check: venv ## measure for some minutes whether feeding is as fast as it should be
	$(python) -m keras_gpufeed bench --check $(ARGS)

docs: venv ## build the documentation into site/
	$(python) -m mkdocs build --strict

wheel: venv ## build the source archive and the wheel into dist/
	rm -rf dist
	$(python) -m build --no-isolation

venv: ## make .venv, or bring it up to date; the other targets do it themselves
	@PYTHON='$(PYTHON)' sh scripts/make_venv.sh

clean: ## remove everything that make built, except .venv
	rm -rf build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
