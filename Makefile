# `make demo` and `make test` do everything from a fresh clone; the rest is for who works on the code.
PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help demo test pages slow zoo bench bench-peers bench-accuracy lint docs dist clean

help:
	@echo "make demo   install into .venv, train privately on real data, write report/index.html"
	@echo "make test   install into .venv, run the tests"
	@echo "make pages  the commands of all pages, as they stand there"
	@echo "make slow   the tests that take minutes"
	@echo "make zoo    the tests of 99 architectures, which run each night"
	@echo "make bench  time and memory of a private step over an ordinary one -> results/bench/"
	@echo "make bench-peers     the same beside other libraries, in an environment in .peers/ -> docs/peers.md"
	@echo "make bench-accuracy  accuracy of other libraries at equal epsilon; takes hours, and continues -> docs/peers.md"
	@echo "make lint   format, style, types, layers, prose"
	@echo "make docs   the documentation as a site -> site/index.html"
	@echo "make dist   wheel and source distribution -> dist/"

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("privgrad needs Python 3.11 or newer; set PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[docs,experiments,tensorboard]' --group dev
	touch $@

demo: .venv/installed
	$(BIN)/privgrad compare examples/recipes/digits_private.toml --out report --restart

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

pages: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow" -k commands_run tests/test_docs.py

slow: .venv/installed
	$(BIN)/python -m pytest -m slow

zoo: .venv/installed
	$(BIN)/python -m pip install --quiet --group zoo
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "slow or not slow" tests/zoo

bench: .venv/installed
	$(BIN)/python -m benchmarks.run --all --out results/bench/$$(date +%F).jsonl

bench-peers: .venv/installed
	$(BIN)/python -m benchmarks.environments steps
	.peers/steps/bin/python -m benchmarks.run --peers --continue --out results/peers/steps.jsonl
	$(BIN)/python scripts/peers_page.py

# The rows that could be run are in the page, even if others failed.
bench-accuracy: .venv/installed
	$(BIN)/python -m benchmarks.accuracy.run; status=$$?; $(BIN)/python scripts/peers_page.py && exit $$status

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_prose.py

docs: .venv/installed
	$(BIN)/mkdocs build --strict

dist: .venv/installed
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf .venv dist report runs site
