# Everything runs in .venv, made here from any Python of at least 3.11; an active environment is neither used nor changed.
#   make demo    set up and train a new rule on the handwritten digits
#   make test    set up and run some of the everyday tests, of every kind
.DEFAULT_GOAL := help
.PHONY: help setup demo test slow whole lint format docs refresh budget long faults shape words prove bench trainers floors newest device-bundle release ci clean
unexport VIRTUAL_ENV PYTHONHOME PYTHONPATH
export NO_MKDOCS_2_WARNING := 1

VENV   := .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input -c constraints.txt
INPUTS := pyproject.toml constraints.txt

help:
	@echo 'make demo    set up and run the demonstration: a new rule, its kernel, a trained model, a plot'
	@echo 'make test    set up and run some everyday tests of every kind (pytest -n $(JOBS); choose with ARGS="-k adam")'
	@echo 'make slow    the tests that take long or need a fresh environment'
	@echo 'make whole   all tests, with every rule in every test of machinery'
	@echo 'make lint    ruff and mypy --strict'
	@echo 'make format  put the code into the house format'
	@echo 'make docs    build the manual into site/'
	@echo 'make refresh write generated files anew: type stubs, tables and outputs of the manual, kept kernels'
	@echo 'make budget  the everyday tests once more, where one that takes over a second of processor time fails'
	@echo 'make long    write what tests cost where no kernel is kept; those over a second become slow'
	@echo 'make faults  plant faults in a copy, and say which tests find them (ARGS="jax cpu" chooses)'
	@echo 'make shape   print lines of each folder, how long functions are, circles of imports'
	@echo 'make words   count sentences that point at something unnamed, and names that say nothing'
	@echo 'make prove   look at the machine code of all GPU kernels anew, not only of changed ones (ONLY=new)'
	@echo 'make bench   measure, print ratios to the memory limit'
	@echo 'make trainers  the tests in other packages'\'' trainers, in an environment of these (.venv-trainers)'
	@echo 'make floors  the lowest versions of pyproject.toml in a fresh environment: a step of each adapter (ARGS=--write)'
	@echo 'make newest  the same with the newest versions'
	@echo 'make device-bundle  the wheels for measuring on a GPU without network (ARGS="--python 3.13")'
	@echo 'make release VERSION=x.y.z  try a release; WRITE=1 makes its commit, its tag and dist/'
	@echo 'make ci      everything continuous integration runs'
	@echo 'make clean   remove .venv and everything built'

setup: $(VENV)/.dev
	@:

$(BIN)/python:
	@python=; for name in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'rulec needs Python 3.11 or newer and found none on PATH; install one, or name it: make PYTHON=/path/to/python3.12' >&2; \
	  exit 1; \
	fi; \
	echo "making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The demonstration needs no framework, so that a first look is quick; everything else is one environment.
$(VENV)/.demo: $(INPUTS) | $(BIN)/python
	@echo 'installing rulec (half a minute the first time)'
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(INPUTS) | $(BIN)/python
	@echo 'installing rulec and its development tools (some minutes the first time)'
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	@$(BIN)/rulec demo

test: setup
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m 'not later and not gpu' $(ARGS)

slow: setup
	@$(BIN)/python -m pytest -n $(JOBS) -m 'slow and not whole and not gpu' $(ARGS)

whole: setup
	@$(BIN)/python -m pytest -n $(JOBS) -m 'not gpu' $(ARGS)

lint: setup
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo 'not in the house format: run make format'; exit 1; }
	@$(BIN)/mypy

format: setup
	@$(BIN)/ruff check --fix --quiet --select I
	@$(BIN)/ruff format --quiet

refresh: setup
	@$(BIN)/python -m tests.torch.stubs
	@$(BIN)/python -m tests.jax.stubs
	@$(BIN)/python -m tests.docs.peers
	@$(BIN)/python -m tests.docs.refresh
	@$(BIN)/python -m pytest tests/golden --refresh-golden
	@$(BIN)/python -m tests.docs.versions

budget: setup
	@$(BIN)/python -m pytest -n $(JOBS) --budget $(ARGS)

# From a run of all tests that are not marked slow, in which nothing is kept from before.
long: setup
	@$(BIN)/python -m pytest -n $(JOBS) --cache-clear --write-long

faults: setup
	@$(BIN)/python -m tests.faults $(ARGS)

shape: setup
	@$(BIN)/python -m tests.shape

words: setup
	@$(BIN)/python -m tests.words

# The tests whose proofs tests/ledger.py keeps; the ledger is written at the end. ONLY=new adds proofs that it lacks;
# otherwise all are made anew, and those of texts that are no more are dropped.
prove: setup
ifneq ($(ONLY),new)
	@rm -rf .pytest_cache/d/proved tests/golden/proved.txt
endif
	@$(BIN)/python -m pytest -n $(JOBS) --prove=$(or $(ONLY),all) -m 'proof and not gpu' -o faulthandler_timeout=0 \
	  tests/backends $(ARGS)

docs: setup
	@$(BIN)/mkdocs build --strict --quiet

bench: setup
	@$(BIN)/rulec bench $(ARGS)

# Other packages' trainers, at fixed versions, some of them without their dependencies: these would bring CUDA builds,
# or what no test calls. torchvision lies beside the environment, for its compiled library wants CUDA.
TRAINERS := .venv-trainers

$(TRAINERS)/.ready: pyproject.toml constraints.txt tests/trainers/constraints.txt | $(BIN)/python
	@echo 'installing the trainers (some minutes the first time)'
	@$(BIN)/python -m venv $(TRAINERS)
	@pip="$(TRAINERS)/bin/python -m pip install -qq --disable-pip-version-check --no-input -c tests/trainers/constraints.txt"; \
	$$pip -e '.[torch]' accelerate transformers lightning 'jsonargparse[signatures]' trl peft skorch pytorch-ignite \
	  hydra-core datasets einops fastcore fastdownload fastprogress fasttransform matplotlib pillow plum-dispatch \
	  requests scikit-learn spmd_types tabulate tensorboard torchdata tyro hypothesis pytest && \
	$$pip --no-deps fastai timm torchtitan && \
	$$pip --no-deps --upgrade --target $(TRAINERS)/vision torchvision
	@touch $@

trainers: $(TRAINERS)/.ready
	@$(TRAINERS)/bin/python -m tests.trainers.report $(ARGS)

# The lowest and the newest versions, in an environment that is removed afterwards. The lowest torch brings CUDA on Linux.
floors: setup
	@$(BIN)/python -m tests.versions oldest $(ARGS)

newest: setup
	@$(BIN)/python -m tests.versions newest $(ARGS)

device-bundle: setup
	@$(BIN)/python -m benchmarks.gpu.bundle $(ARGS)

release: setup
	@$(BIN)/python -m tests.versions.release '$(VERSION)' $(if $(WRITE),--write)

ci:
	@.ci/run

clean:
	rm -rf $(VENV) .venv-trainers build dist site rulec-demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
