# Every target makes .venv first when it is missing or older than what it was made from.
#   make demo     train on two worker processes from a notebook, and say where the results lie
#   make test     all units, and a test with real processes of each capability and kind of fault
#   make test-all  every test but those that the targets below have for themselves (half an hour on two cores)
#   make test-gpu  the tests that need an NVIDIA GPU, one after the other
#   make test-hosts  every notebook in environments like Kaggle's and Colab's, without internet (minutes)
#   make test-pythons  every notebook and the quick suite on Python 3.10 to 3.13, with old, new and the
#                 hosts' versions of all libraries (an hour and 25 GB)
#   make test-integrations  the tests of other frameworks, where all of them are installed (minutes, 2 GB;
#                 7 GB with a CPU build of torch)
#   make test-cluster  scripts and jobs for several machines, on a Slurm (root) and a Ray of two nodes,
#                 that it starts here (half an hour, 1 GB)
#   make test-browser  a person's sessions with the panel, in JupyterLab and Notebook 7 (minutes)
#   make screenshots   the pictures of docs/panel.md
#   make docs     build the documentation site into build/docs, and check its links and entries
#   make check    lint, format, types, version
#   make notebooks  run every notebook in full, store the outputs that are kept (minutes)
#   make bench    the figures of docs/log.md
#   make clean    remove what the above made (not outputs/)

# Processes of the tests import the same modules hundreds of times; some images have this variable set.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# A test waits for a fifth of its time, so there is one worker more than cores.
WORKERS ?= $(shell echo $$(( $$(nproc) + 1 )))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope

.PHONY: demo test test-all test-rest test-gpu test-hosts test-pythons test-integrations test-cluster test-browser screenshots check docs notebooks bench clean install

demo: $(STAMP)
	@$(BIN)/python tests/demo.py

test: $(STAMP)
	@$(PYTEST) -m "not long and not apart and not hosts and not gpu and not cluster"

test-rest: $(STAMP)
	@$(PYTEST) -m "long and not apart and not hosts and not gpu and not cluster"

test-all: test test-rest

test-gpu: $(STAMP)
	@$(BIN)/python -m pytest -m gpu

test-hosts: $(STAMP)
	@$(BIN)/python -m pytest -m hosts tests/hosts

test-pythons: $(STAMP)
	@$(BIN)/python -m tests.pythons $(ONLY)

test-integrations: $(STAMP)
	@$(BIN)/python -m tests.pythons.integrations

test-cluster: $(STAMP)
	@tests/extras/cluster/install.sh
	@$(BIN)/python -m tests.pythons.cluster

test-browser: $(STAMP)
	@tests/browser/install.sh
	@$(BIN)/python -m pytest -m browser tests/browser

screenshots: $(STAMP)
	@tests/browser/install.sh
	@$(BIN)/python tests/browser/pictures.py docs/images

check: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/python -m nbtoolkit lint notebooks/*.ipynb
	@$(BIN)/python tests/check_version.py

docs: $(STAMP)
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs build/docs
	@$(BIN)/python tests/check_site.py build/docs

notebooks: $(STAMP)
	@$(BIN)/python tests/notebook_outputs.py store

bench: $(STAMP)
	@$(BIN)/python -m tests.bench

install: $(STAMP)

# torch first and by its exact version: a range would let pip weigh builds of several GB.
$(STAMP): pyproject.toml tests/constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "nbtoolkit: installing into $(VENV) (some minutes the first time) ..."
	@$(BIN)/python -m pip install -qq "$$(grep '^torch==' tests/constraints.txt)"
	@$(BIN)/python -m pip install -qq -c tests/constraints.txt -e '.[all,dev]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
