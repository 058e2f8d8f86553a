# make demo and make test do everything from a bare clone: environment, install, run.
PYTHON ?= python3
BIN := .venv/bin
EXTRAS := figures,demo,benchmarks,dev
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test test-slow lint types bench figures clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo       train four small language models with full and compressed tables, about two minutes"
	@echo "make test       lint, types and the whole test suite"
	@echo "make test-slow  checks that take minutes"
	@echo "make bench      lookups side by side with other implementations, about twenty minutes, into out/bench"
	@echo "make figures    the figures of the documentation, into out/"
	@echo "make clean      remove the environment and everything made"

# Constraints by environment variable hold for what packages are built with too: torchTT is built with torch.
# The environment is made anew when what it is made from changes; an interrupted install leaves no stamp behind.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("tensorbed needs Python 3.11 or later, this is " + sys.version.split()[0] \
		+ "; say which: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

demo: .venv/.installed
	$(BIN)/python -m demo

test: lint types
	$(PYTEST) -m "not slow"

test-slow: .venv/.installed
	$(PYTEST) -m slow

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed
	$(BIN)/mypy

bench: .venv/.installed
	$(BIN)/python -m benchmarks

figures: .venv/.installed
	$(BIN)/python -m tensorbed.figures init --out out/init.png

clean:
	rm -rf .venv out build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
