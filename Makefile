# `make demo`, `make dist` and `make test` do everything from a fresh clone; the rest is for who works on the code.
PYTHON ?= python3
TORCH ?= newest # that of pyproject.toml's group `torch`; or oldest, its lower bound for users
VENV := .venv$(if $(filter oldest,$(TORCH)),-oldest)
BIN := $(VENV)/bin
# A process for each core: at least two, because some tests wait, and at most 16, because each one holds 2 GB.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(16, max(2, os.cpu_count() or 2)))')
XDIST = -n $(JOBS) --dist worksteal
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(XDIST)
FUZZ_SECONDS ?= 600 # of each fuzzer

torch_newest := --group torch
torch_oldest = 'torch==$(shell sed -n 's/^ *"torch>=\([^"]*\)".*/\1/p' pyproject.toml)'

.PHONY: help demo test items pages wheel rounding slow zoo lowest browser fuzz audits examples bench bench-check bench-peers bench-accuracy \
	lint docs docs-version dist windows ci data advisories lock sbom release clean

help:
	@echo "make demo     install into .venv, train privately on real data, write report/index.html"
	@echo "make dist     the wheel -> dist/, in seconds and without .venv"
	@echo "make test     install into .venv, run the tests; TORCH=oldest: with the oldest torch, in .venv-oldest; JOBS=4: in four processes"
	@echo "make pages    the commands of all pages, as they stand there"
	@echo "make lint     format, style, types, layers, prose"
	@echo "make docs     the documentation as a site -> site/index.html"
	@echo "make browser  the site and a report in a browser: every page and link"
	@echo "make wheel    the wheel in an empty environment does what the pages say"
	@echo "make rounding the bound of a sum under several instruction sets, with one and two threads"
	@echo "make windows  the import is refused there, with the remedy; runs everywhere"
	@echo "make ci       all of these tests and checks: what CI runs for each change, on this system"
	@echo "make data     the data sets that tests use if they are here"
	@echo
	@echo "each night:"
	@echo "make items    a few steps of every item of the papers"
	@echo "make slow     the tests that take minutes"
	@echo "make zoo      the tests of 99 architectures"
	@echo "make lowest   the tests with the lowest versions that pyproject.toml allows: with few extras, then with all"
	@echo "make fuzz     damaged files, then models and large batches that break the bound: ten minutes each; FUZZ_SECONDS=60: one"
	@echo "make audits   lower bounds on epsilon, by attacks; fails if one is above its claim"
	@echo "make examples the tests of examples/, those that take minutes too"
	@echo "make bench-check time, memory and counts of the methods with a threshold, held to benchmarks/thresholds.toml"
	@echo "make advisories  known holes in the packages of requirements-dev.txt and in torch"
	@echo
	@echo "make bench    time and memory of a private step over an ordinary one -> results/bench/"
	@echo "make bench-peers  the same next to other libraries, in an environment in .peers/ -> docs/peers.md"
	@echo "make bench-accuracy  accuracy of other libraries at equal epsilon; takes hours, and continues -> docs/peers.md"
	@echo "make lock     newest versions of the packages for development -> requirements-dev.txt"
	@echo "make docs-version VERSION=0.1  the documentation of a version -> branch gh-pages, not pushed"
	@echo "make sbom     wheel and source distribution -> dist/, and what the wheel brings with it -> privgrad.cdx.json"
	@echo "make release TAG=v1.2.3  what release.yml builds"

# Every file is held to its hash, so pip resolves nothing. Only torch is not: each kind of machine has its own build.
$(VENV)/installed: pyproject.toml requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit("privgrad needs Python 3.11 or newer; set PYTHON=python3.x" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --no-deps --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet $(torch_$(strip $(TORCH)))
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
	touch $@

demo: $(VENV)/installed
	$(BIN)/privgrad compare examples/recipes/digits_private.toml --out report --restart

test: $(VENV)/installed
	$(PYTEST)

items: $(VENV)/installed
	$(PYTEST) -m "slow or not slow" -k "starts_with_its_stand_in or share_the_runs" tests/lab/test_reproduce.py

pages: $(VENV)/installed
	$(PYTEST) -m "slow or not slow" -k "commands_run or slow" tests/test_docs.py tests/test_docs_numbers.py

wheel: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/test_packaging.py

# Each setting adds up in another order: of torch's own kernels (ATEN), and of MKL's.
rounding: $(VENV)/installed
	for threads in 1 2; do \
		for setting in "ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE" \
				"ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2"; do \
			echo "$$setting, $$threads threads"; \
			env $$setting OMP_NUM_THREADS=$$threads $(BIN)/python -m pytest -n 2 --dist worksteal -m rounding \
				tests/clip/test_rounding.py tests/mutants || exit 1; \
		done; \
	done

slow: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group ray --group quantized --group nvflare
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest tests/engine/test_adapters.py # some need a quantized base

zoo: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group torch --group zoo
	$(PYTEST) -m "slow or not slow" tests/zoo

# uv chooses the versions, as it does for `make lock`. Flower and TRL need newer versions of others, so they are apart.
# Old packages may use what newer ones call deprecated, so warnings are no errors here.
lowest: $(VENV)/installed
	for extras in "--extra experiments --extra hf --extra tables --extra tensorboard" "--all-extras --group trl"; do \
		$(PYTHON) -m venv --clear .venv-lowest && \
		$(BIN)/uv pip compile --no-config --quiet --resolution lowest-direct --python .venv-lowest \
			--output-file .venv-lowest/versions.txt pyproject.toml $$extras && \
		$(BIN)/uv pip install --no-config --quiet --python .venv-lowest \
			--requirement .venv-lowest/versions.txt --group test --editable . && \
		OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest $(XDIST) -W default || exit 1; \
	done

browser: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --group browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or not slow" tests/test_site.py tests/lab/test_report_browser.py

fuzz: $(VENV)/installed
	for reader in budget checkpoint data ledger spec; do \
		$(BIN)/python -m tests.fuzz $$reader --seconds $(FUZZ_SECONDS) || exit 1; done
	$(BIN)/python -m tests.sensitivity --seconds $(FUZZ_SECONDS)
	$(BIN)/python -m tests.sensitivity --large --seconds $(FUZZ_SECONDS)

audits: $(VENV)/installed
	$(BIN)/privgrad audit

examples: $(VENV)/installed
	$(PYTEST) -m "slow or not slow" tests/test_examples.py

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.run --all --out results/bench/$$(date +%F).jsonl

bench-check: $(VENV)/installed
	$(BIN)/python -m benchmarks.counts --check
	$(BIN)/python -m benchmarks.run --out runs/bench.jsonl \
		--method plain --method preconditioned --method inputs --method inputs-refreshed
	$(BIN)/python -m benchmarks.check runs/bench.jsonl

bench-peers: $(VENV)/installed
	$(BIN)/python -m benchmarks.environments steps
	.peers/steps/bin/python -m benchmarks.run --peers --continue --threads 1 --clock processor --time-limit 60 \
		--out results/peers/steps.jsonl
	$(BIN)/python scripts/peers_page.py

# The rows that could be run are in the page, even if others failed.
bench-accuracy: $(VENV)/installed
	$(BIN)/python -m benchmarks.accuracy.run; status=$$?; $(BIN)/python scripts/peers_page.py && exit $$status

lint: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_prose.py

docs: $(VENV)/installed
	$(BIN)/mkdocs build --strict

windows:
	PYTHONPATH=src $(PYTHON) tests/refusal.py

ci: lint docs test pages wheel rounding browser windows
	@echo "Green here. Other systems, Pythons and the oldest torch run on the public host: .github/workflows/ci.yml"

# A set that cannot be fetched here is left out, and its tests are skipped.
data: $(VENV)/installed
	-$(BIN)/privgrad data fetch adult
	-$(BIN)/privgrad data fetch brown
	-$(BIN)/privgrad data fetch fashion-mnist
	-$(BIN)/privgrad data fetch debian

# One that cannot be looked up fails, too.
advisories: $(VENV)/installed
	sed -n 's/^torch = \["\(torch==[^"]*\)"\].*/\1/p' pyproject.toml > $(VENV)/torch.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement requirements-dev.txt --requirement $(VENV)/torch.txt

lock: $(VENV)/installed
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --group dev --output-file requirements-dev.txt

docs-version: $(VENV)/installed
	$(if $(VERSION),,$(error say which: make docs-version VERSION=0.1))
	$(BIN)/mike deploy --update-aliases $(VERSION) latest
	$(BIN)/mike set-default latest

# pip builds it in an environment of its own, with the two packages of pyproject.toml's [build-system].
dist:
	rm -rf dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

# What is released is built with the locked packages.
sbom: $(VENV)/installed
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --no-isolation
	$(PYTHON) -m venv --without-pip .venv-wheel
	grep -oE '^[^ ]+==[^ ]+' requirements-dev.txt > .venv-wheel/constraints.txt
	$(BIN)/python -m pip --python .venv-wheel install --quiet --constraint .venv-wheel/constraints.txt \
		--group torch dist/*.whl
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-file privgrad.cdx.json .venv-wheel

release: $(VENV)/installed
	$(BIN)/python scripts/check_tag.py "$$TAG"
	$(MAKE) sbom

clean:
	rm -rf .venv .venv-oldest .venv-lowest .venv-wheel dist privgrad.cdx.json report runs site
