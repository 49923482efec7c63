# Targets for people. Every target can be run again: what is already there is reused.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
CASE ?= smollm2-135m

.DEFAULT_GOAL := help
.PHONY: help setup gpu bundle demo test test-slow test-faults test-upstream check prove verify clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  PYTHON=python3.12 and CASE=qwen3-tiny can be given on the command line"

setup: ## virtual environment, pinned upstreams fetched and patched (figures: README.md)
	@PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh

gpu: ## as setup, for a host with a Hopper GPU: vLLM's compiled extensions from its wheel, torch 2.11
	@GPU=1 PYTHON=$(PYTHON) VENV=$(VENV) scripts/setup.sh

bundle: setup ## pack everything for a GPU host without a network, in parts, into build/bundle
	@$(BIN)/samebits bundle pack

demo: setup ## prove the case smollm2-135m end to end on this CPU
	@$(BIN)/samebits prove $(CASE)

prove: setup ## prove CASE, record its evidence in cases/CASE/evidence, and write README.md from it
	@$(BIN)/samebits prove $(CASE) --record; code=$$?; $(BIN)/python scripts/pages.py; exit $$code

verify: setup ## recompute the verdict of CASE from its recorded evidence
	@$(BIN)/samebits verify $(CASE)

test: setup ## the test suite: first what starts no engine, two files at a time, then the engines
	@$(BIN)/python -m pytest -m "not slow and not gpu and not engine" -n 2 --dist loadfile; units=$$?; \
	$(BIN)/python -m pytest -m "engine and not slow and not gpu" && exit $$units

test-slow: setup ## the tests that take minutes each
	@$(BIN)/python -m pytest -m "slow and not gpu"

test-faults: setup ## planted faults: each turns a gate red and is followed to its region
	@$(BIN)/python -m pytest tests/faults

test-upstream: setup ## upstream's own tests of patched code, unmodified against patched
	@$(BIN)/python scripts/upstream_tests.py

check: setup ## lint, format, types, patch series, contracts, guides, generated pages, wording
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/samebits patch check
	@$(BIN)/samebits contract diff
	@$(BIN)/python scripts/patch_index.py --check
	@$(BIN)/python scripts/pages.py --check
	@$(BIN)/python scripts/skills.py check
	@$(BIN)/python scripts/words.py

clean: ## remove build products (never evidence, never edited upstream trees)
	@rm -rf build/runs .pytest_cache .ruff_cache .mypy_cache
