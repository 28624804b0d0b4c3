# make demo    train the example under three policies          make test     run the tests
# make bench   time per step and memory, ours beside others     make hlo      tests on programs compiled for an H100
# make lint / types / format                                    make clean    remove the environments
#
# PYTHON=python3.13  the interpreter (3.11 or newer)            EXTRA=cuda12  jax for a GPU (or cuda13, tpu)
# VENV=.venv         where the environment lies                 ARGS=...      passed on to the program that runs

PYTHON ?= python3
VENV ?= .venv
HLO_VENV ?= .venv-hlo
EXTRA ?=
ARGS ?=
WORKERS ?= 2

BIN := $(VENV)/bin
HLO_BIN := $(HLO_VENV)/bin
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
# A stamp is the name of what was installed; it is older than pyproject.toml when that has changed since.
KEY := $(VERSION)$(EXTRA:%=-%)
DEV := $(VENV)/.installed-dev-$(KEY)
EXAMPLES := $(VENV)/.installed-examples-$(KEY)
HLO := $(HLO_VENV)/.installed-hlo-$(VERSION)

.PHONY: demo test hlo bench bench-compiled lint format types clean
.DELETE_ON_ERROR:

demo: $(EXAMPLES)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(DEV)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

hlo: $(HLO)
	JAX_PLATFORMS=cpu $(HLO_BIN)/python -m pytest -m hlo -n 2 --dist loadgroup $(ARGS) tests/test_hlo*.py

bench: $(DEV)
	@if $(BIN)/python -m benchmarks.run --has-gpu; \
	then $(BIN)/python -m benchmarks.run --timed $(ARGS); \
	else $(MAKE) --no-print-directory bench-compiled; fi

bench-compiled: $(HLO)
	JAX_PLATFORMS=cpu $(HLO_BIN)/python -m benchmarks.run --compiled $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEV)
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) $(HLO_VENV) .cache

# $(call environment,FOLDER): a virtual environment of $(PYTHON); an older one of another Python is replaced.
define environment
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "amp_jax needs Python 3.11 or newer; PYTHON=$(PYTHON) is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Name another one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@test "$$($(1)/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$(VERSION)" \
	  || $(PYTHON) -m venv --clear $(1)
endef

$(DEV) $(EXAMPLES): $(VENV)/.installed-%-$(KEY): pyproject.toml
	$(call environment,$(VENV))
	$(BIN)/python -m pip install --quiet --editable ".[$*$(EXTRA:%=,%)]"
	@touch $@

# The compiler for an H100 without CUDA itself: the plugin's two wheels, and nothing they depend on but cuDNN, which jax
# asks for its version before it traces a fused attention. They come out after jax, so theirs is the version of all.
$(HLO): pyproject.toml
	$(call environment,$(HLO_VENV))
	$(HLO_BIN)/python -m pip install --quiet --no-deps jax-cuda12-plugin nvidia-cudnn-cu12
	version=$$($(HLO_BIN)/python -c 'from importlib.metadata import version; print(version("jax-cuda12-plugin"))') && \
	  $(HLO_BIN)/python -m pip install --quiet --editable ".[dev]" "jax==$$version" "jaxlib==$$version" \
	    "jax-cuda12-pjrt==$$version"
	@touch $@
