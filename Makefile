# Two commands: `make demo` and `make test`. Both do all set-up on a machine with Python 3.11, make and gcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint zoo clean

help: ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY) ## make the virtual environment (again only when what it is made of has changed)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps torchattacks imagecorruptions-imaug
	touch $(READY)

demo: setup ## audit two shipped models, one standard and one adversarially trained, and compare them
	$(BIN)/vitadel audit zoo:shapes-standard --limit 400 --attacks fgsm,pgd-20,pgd-50
	$(BIN)/vitadel audit zoo:shapes-robust --limit 400 --attacks fgsm,pgd-20,pgd-50
	$(BIN)/vitadel report $$(ls -dt runs/audit-zoo-shapes-* | head -2 | tac) --out runs/demo.html

lint: setup
	$(BIN)/ruff check src tests scripts benchmarks
	$(BIN)/ruff format --check src tests scripts benchmarks
	$(BIN)/mypy

test: lint ## lint, type-check and run all tests
	OMP_NUM_THREADS=1 VITADEL_SCREENSHOTS=$(CURDIR)/runs/screenshots $(BIN)/python -m pytest -n 2 --dist worksteal -q --durations=40 --durations-min=2

zoo: setup ## train the shipped models again (hours; CIFAR-10 below data/)
	for name in shapes-ordinary shapes-pgd-at shapes-trades shapes-trades-awp shapes-mart shapes-aas-at shapes-tora cifar10-standard cifar10-fast-at cifar10-trades cifar10-aas-at; do $(BIN)/python scripts/make_zoo.py $$name || exit 1; done

clean: ## remove the environment and caches, keep runs/
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
