# Everything below needs only Python 3.11+ and `make`; the set-up is skipped when it is up to date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: setup quickstart test lint types clean

setup: $(STAMP)

# torch goes first and alone, pinned: a range would fetch several GB of CUDA libraries.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[compress,parquet,gguf,optimum,genai,test]"
	@touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/sportsllm-compress run recipes/quickstart.toml

# FAST=1 leaves out the tests that take longer than ten seconds.
test: $(STAMP)
	$(BIN)/python -m pytest -n logical --dist loadfile $(if $(FAST),-m "not slow")

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
