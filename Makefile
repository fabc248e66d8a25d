# Every target sets up what it needs; `make help` lists them.
PYTHON ?= python3
ARGS ?=
ONLY ?=
V := .venv/bin
export OMP_NUM_THREADS := 1
# Without compiled files each process spends seconds on compiling torch and vLLM again (10 s measured).
unexport PYTHONDONTWRITEBYTECODE
PACKAGES := rollstream environments sandboxes producers rollouts processors trainer trajectories evaluation

.DEFAULT_GOAL := help
.PHONY: help setup setup-test demo test test-train test-demo test-soak faults sim test-gpu lint format type bench protos proto-check lock hooks up down doctor clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## Virtual environment with all that the demo needs (pinned, with hashes)
	@$(PYTHON) tools/setup.py demo

setup-test: ## The same with the tools for tests
	@$(PYTHON) tools/setup.py test

demo: setup ## Train a tiny model by RL on this machine, end to end (ARGS="--seed 1 --engine light")
	@$(V)/rollstream demo $(ARGS)

test: setup-test lint type proto-check ## All checks and tests but the long ones
	@$(V)/python -m pytest -m "not train and not demo and not gpu and not soak" $(ARGS)

test-train: setup-test ## Long training tests
	@$(V)/python -m pytest -m train $(ARGS)

test-demo: setup-test ## The demo, for three seeds: reward rises, books balance
	@$(V)/python -m pytest -m demo $(ARGS)

faults: setup-test ## Kills of every part, over 100, and the books after each run (ARGS="--only trainer --kills 10")
	@$(V)/python -m tests.faults $(ARGS)

test-soak: setup-test ## Ten thousand sandbox sessions, and what is left of them
	@$(V)/python -m pytest -m soak $(ARGS)

sim: setup-test ## Simulate the pipeline under faults (SEEDS=200), or one seed step by step (SEED=n)
	@$(V)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),200))

test-gpu: setup-test ## Tests that need an NVIDIA GPU
	@$(V)/python -m pytest -m gpu $(ARGS)

lint: setup-test ## ruff, import layers, spelling
	@$(V)/ruff check -q . && $(V)/ruff format -q --check .
	@$(V)/lint-imports --no-cache >/dev/null || $(V)/lint-imports --no-cache
	@$(V)/typos -q

format: setup-test ## Format the code
	@$(V)/ruff check -q --fix . ; $(V)/ruff format -q .

type: setup-test ## mypy, strict
	@$(V)/mypy

lock: setup-test ## Pin requirements/*.in again, with hashes
	@$(V)/python tools/lock.py

hooks: setup-test ## Quick checks on each git commit (pre-commit)
	@$(V)/pre-commit install

protos: setup-test ## Generate the code of protos/
	@$(V)/python -m grpc_tools.protoc -Iprotos --python_out=. --pyi_out=. protos/rollstream/v1/*.proto
	@$(V)/python -m grpc_tools.protoc -Iprotos --grpc_python_out=. protos/rollstream/v1/sandbox.proto

proto-check: setup-test ## Generated code is up to date; buf lint; buf breaking against the version before
	@$(V)/python tools/proto_check.py

bench: setup-test ## Benchmarks (ONLY=prefix runs a part); writes bench/results.json
	@$(V)/python -m bench $(if $(ONLY),--only $(ONLY))

up: setup ## Start the embedded broker and store in the background
	@$(V)/rollstream up $(ARGS)

down: ## Stop them
	@$(V)/rollstream down

doctor: setup ## What this machine can do
	@$(V)/rollstream doctor

clean: ## Remove runs, caches and the virtual environment
	rm -rf runs .rollstream .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .setup.lock dist build
