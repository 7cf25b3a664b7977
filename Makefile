# `make demo` and `make test` do all set-up in .venv; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu test-mpi test-integrations test-torch test-triton fuzz soak digests lint types imports docs unit clean

help:
	@echo "make demo   set up and run the main job"
	@echo "make test   set up and run every check: lint, types, import direction, docs, tests"
	@echo "make test-slow  set up and run the tests that take more than a few seconds each (about an hour)"
	@echo "make test-gpu   set up and run the tests that need a GPU"
	@echo "make test-mpi   set up and run the tests that start ranks by mpiexec"
	@echo "make test-integrations  set up and run the whole matrix of models with the pinned and the newest Transformers"
	@echo "make test-torch VERSION=2.15.0   run the tests with another torch, in an environment of its own (its CUDA build, several GB)"
	@echo "make test-triton VERSION=3.9.0   run the tests of the Triton kernels with another Triton, in an environment of its own"
	@echo "make fuzz   set up and check CASES (10000) cases at random over 2, 3 and 4 ranks; goes on where it stopped"
	@echo "make soak   set up and run the campaign of faults (hours); SOAK='damage --count 20' for a part of it"
	@echo "make digests  set up and compare programs, machine code and bytes moved with tests/digests.json (half an hour)"
	@echo "make clean  remove the environment and what the checks wrote"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo-ready: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[plots]'
	@touch $@

$(VENV)/.test-ready: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.demo-ready

# two MPIs to start real ranks with: each has an mpiexec of its own
$(VENV)/.mpi-ready: $(VENV)/.test-ready
ifeq ($(shell uname),Linux)
	$(INSTALL) --ignore-installed --prefix $(VENV)/openmpi openmpi mpi4py
	$(INSTALL) --ignore-installed --prefix $(VENV)/mpich mpich mpi4py
endif
	@touch $@

demo: $(VENV)/.demo-ready
	$(BIN)/meshflash demo

# fuzz-seed$(SEED).json is the record, from which a second run goes on
CASES ?= 10000
SEED ?= 0
fuzz: $(VENV)/.demo-ready
	$(BIN)/meshflash check --fuzz $(CASES) --seed $(SEED)

test: lint types imports docs unit

soak: $(VENV)/.test-ready
	PYTHONPATH=src:tests $(BIN)/python -m soak $(SOAK)

digests: $(VENV)/.test-ready
	PYTHONPATH=src:tests $(BIN)/python -m digests $(DIGESTS)

lint: $(VENV)/.test-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-ready
	$(BIN)/mypy --num-workers 2

imports: $(VENV)/.test-ready
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.test-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# kept bytecode saves each worker the rewriting of assertions, from the second run on; tests that start processes spend
# part of their time waiting, so three workers finish sooner than two on two cores
unit: $(VENV)/.test-ready $(VENV)/.mpi-ready
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test-slow: $(VENV)/.test-ready $(VENV)/.mpi-ready
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow

test-gpu: $(VENV)/.test-ready
	$(BIN)/pytest -m gpu

test-mpi: $(VENV)/.test-ready $(VENV)/.mpi-ready
	$(BIN)/pytest -m 'not gpu' tests/runtime/test_jobs.py tests/runtime/test_slow_jobs.py

# the pinned Transformers in .venv, the newest one with the libraries around it in .venv-integrations
INTEGRATIONS := .venv-integrations
$(INTEGRATIONS)/.ready: pyproject.toml constraints.txt constraints-integrations.txt
	$(PYTHON) -m venv $(INTEGRATIONS)
	grep -v '^transformers==' constraints.txt > $(INTEGRATIONS)/constraints.txt
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
		-c $(INTEGRATIONS)/constraints.txt -c constraints-integrations.txt -e '.[dev,integrations]'
	@touch $@

test-integrations: $(VENV)/.test-ready $(INTEGRATIONS)/.ready
	$(BIN)/pytest -n 2 -m 'integrations or not slow and not gpu' tests/integrations/transformers
	$(INTEGRATIONS)/bin/pytest -n 2 -m 'integrations or not slow and not gpu' tests/integrations

# another torch or Triton, in .venv-torch-VERSION or .venv-triton-VERSION: the pins of all other packages hold, but for
# numpy where the interpreter of an old Triton needs an old one: NUMPY=2.3.5 for Triton 3.6, and so for torch 2.11
NUMPY ?=
OTHER = .venv-$(1)-$(VERSION)
needs-version = $(if $(VERSION),,$(error give a version, such as make $@ VERSION=$(1)))
define make-other
	$(PYTHON) -m venv $(OTHER)
	grep -v -E '^($(2)$(if $(NUMPY),|numpy))==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
		-c $(OTHER)/constraints.txt -e '.[dev]' $(1)==$(VERSION) $(addprefix numpy==,$(NUMPY))
endef

test-torch:
	$(call needs-version,2.15.0)
	$(call make-other,torch,(torch|triton))
	$(call OTHER,torch)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder

MARK ?= not slow and not gpu
test-triton:
	$(call needs-version,3.9.0)
	$(call make-other,triton,triton)
	$(call OTHER,triton)/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder -m '$(MARK)' \
		tests/kernels tests/gemm tests/comm/test_device.py

clean:
	rm -rf $(VENV) $(INTEGRATIONS) .venv-torch-* .venv-triton-* site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
