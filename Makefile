# Every target sets up .venv by itself; `make help` lists them.
PYTHON ?= python3
READY := .venv/.ready
# Processes that share the tests; auto is one a core, as far as memory goes (tests/conftest.py).
WORKERS ?= auto
# The benchmarks that need no GPU.
BENCHMARKS := benchmarks/import_time.py benchmarks/gate_overhead.py

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## train, narrow and check a small network
	.venv/bin/narrowgate demo

test: $(READY) ## run the tests, a process a core
	.venv/bin/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: $(READY) ## check style, format and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

docs: $(READY) ## build the documentation into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

bench: $(READY) ## run the benchmarks that need no GPU
	@set -e; for script in $(BENCHMARKS); do echo ".venv/bin/python $$script"; .venv/bin/python $$script; done

clean: ## remove .venv, caches and build outputs
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("narrowgate needs Python 3.10 or newer, $(PYTHON) is %d.%d: try make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@echo "setting up .venv (once, about two minutes)"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --disable-pip-version-check -qq --use-pep517 -e '.[dev]' -c constraints.txt
	@touch $@
