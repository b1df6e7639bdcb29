# `make demo` and `make test` do everything from a fresh clone; the rest is for who works on the code.
PYTHON ?= python3
BIN := .venv/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.PHONY: help demo test pages slow zoo browser bench lint docs docs-version dist clean

help:
	@echo "make demo   install into .venv, train privately on real data, write report/index.html"
	@echo "make test   install into .venv, run the tests"
	@echo "make pages  the commands of all pages, as they stand there"
	@echo "make slow   the tests that take minutes"
	@echo "make zoo    the tests of 99 architectures, which run each night"
	@echo "make browser  the site and a report in a browser, every page and link"
	@echo "make bench  time and memory of a private step over an ordinary one -> results/bench/"
	@echo "make lint   format, style, types, layers, prose"
	@echo "make docs   the documentation as a site -> site/index.html"
	@echo "make docs-version VERSION=0.1  the documentation of a version -> branch gh-pages, not pushed"
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

browser: .venv/installed
	$(BIN)/python -m pip install --quiet --group browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/test_site.py tests/test_report_browser.py

bench: .venv/installed
	$(BIN)/python -m benchmarks.run --all --out results/bench/$$(date +%F).jsonl

lint: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_prose.py

docs: .venv/installed
	$(BIN)/mkdocs build --strict

docs-version: .venv/installed
	$(if $(VERSION),,$(error say which: make docs-version VERSION=0.1))
	$(BIN)/mike deploy --update-aliases $(VERSION) latest
	$(BIN)/mike set-default latest

dist: .venv/installed
	rm -rf dist
	$(BIN)/python -m build

clean:
	rm -rf .venv dist report runs site
