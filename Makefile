# One door for all checks: what a developer runs before a commit is `make check`.
PYTHON ?= .venv/bin/python

.PHONY: check format lint types imports test docs

check: format lint types imports test

format:
	$(PYTHON) -m ruff format --check .

lint:
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m mypy

imports:
	$(dir $(PYTHON))lint-imports

test:
	$(PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile

docs:
	$(PYTHON) -m mkdocs build --strict
