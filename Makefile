# `make demo` and `make test` do all set-up on a machine with Python 3.11, make and gcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --constraint $(VENV)/constraints.txt
TEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal -q
CODE := src tests scripts benchmarks
FUZZ ?= 300

.DEFAULT_GOAL := help
.PHONY: help setup demo check test all-tests fuzz lint docs zoo clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# A torch that $(PYTHON) already has is used as it is: it is the largest download by far.
$(VENV)/constraints.txt: constraints.txt
	if $(PYTHON) scripts/has_torch.py; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	  grep -vE '^(torch|torchvision|triton)==' constraints.txt > $@; \
	else \
	  $(PYTHON) -m venv $(VENV); \
	  cp constraints.txt $@; \
	fi

$(VENV)/.ready: pyproject.toml $(VENV)/constraints.txt
	$(PIP) --editable .
	touch $@

# Of what only development needs, Python compiles the modules that are imported, when they are.
$(VENV)/.ready-dev: $(VENV)/.ready
	$(PIP) --no-compile --editable '.[dev]'
	$(PIP) --no-compile --no-deps torchattacks imagecorruptions-imaug
	touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) --editable '.[docs]'
	touch $@

setup: $(VENV)/.ready-dev ## make the virtual environment with what development needs

demo: $(VENV)/.ready ## audit two shipped models, one standard and one adversarially trained, and compare them
	$(BIN)/vitadel audit zoo:shapes-standard --limit 80
	$(BIN)/vitadel audit zoo:shapes-robust --limit 80
	$(BIN)/vitadel report $$(ls -dt runs/audit-zoo-shapes-* | head -2 | tac) --out runs/demo.html

lint: setup
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

check: lint ## lint, type-check and run the fast tests
	$(TEST) -m "not slow and not browser" --durations=5 --durations-min=2

test: lint all-tests ## lint, type-check and run all tests (-j 2: at the same time)

all-tests: setup
	VITADEL_SCREENSHOTS=$(CURDIR)/runs/screenshots $(TEST) --durations=40 --durations-min=2

fuzz: setup ## try new hostile inputs, 300 of each kind (FUZZ=1000 for more), and disturb runs of all kinds
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python tests/fuzz/campaign.py $(FUZZ)
	OMP_NUM_THREADS=1 VITADEL_FAULTS=3 $(BIN)/python -m pytest -q tests/fuzz/test_injected_faults.py

docs: $(VENV)/.ready-docs ## build the documentation site into build/site
	$(BIN)/mkdocs build --strict --quiet

zoo: setup ## train the shipped models again (hours; CIFAR-10 below data/)
	for name in shapes-ordinary shapes-pgd-at shapes-trades shapes-trades-awp shapes-mart shapes-tora cifar10-standard cifar10-fast-at cifar10-trades cifar10-aas-at cifar10-robust; do $(BIN)/python scripts/make_zoo.py $$name || exit 1; done

clean: ## remove the environment and caches, keep runs/
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache site
