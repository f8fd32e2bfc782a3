# One door for all checks: what a developer runs before a commit is `make check`.
PYTHON ?= .venv/bin/python

.PHONY: check format lint types imports test docs mutants wheel

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

# Mutate one module by a library, in place and by hand: the tree must be clean. For example
# make mutants MODULE=mlx_engine/cache/prefix.py TESTS=tests/unit/test_prefix_cache.py
mutants:
	git diff --quiet || { echo "commit or discard your changes first" >&2; exit 1; }
	mkdir -p build && rm -f build/mutants.sqlite
	printf '[cosmic-ray]\nmodule-path = "%s"\ntimeout = 60.0\nexcluded-modules = []\ntest-command = "%s -m pytest -x -q -n 0 %s"\n[cosmic-ray.distributor]\nname = "local"\n' \
		"$(MODULE)" "$(PYTHON)" "$(TESTS)" > build/mutants.toml
	$(dir $(PYTHON))cosmic-ray init build/mutants.toml build/mutants.sqlite
	$(dir $(PYTHON))cosmic-ray exec build/mutants.toml build/mutants.sqlite
	$(dir $(PYTHON))cr-report --show-pending --show-diff --surviving-only build/mutants.sqlite

# A wheel with machine code, in dist: nothing is compiled where it is installed. It is for the processors of this kind of
# machine, or of another: make wheel MACHINE=aarch64
wheel:
	$(PYTHON) -m tools.wheel $(if $(MACHINE),--machine $(MACHINE))

docs:
	$(PYTHON) -m mkdocs build --strict
