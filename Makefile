# RoseLLM. `make help` lists what can be made.
PYTHON ?= python3
# An activated conda environment of one's own is used as it is; else .venv.
CONDA := $(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX))
VENV := $(or $(CONDA),.venv)
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
UV := $(PY) -m uv pip install --quiet --python $(PY)
TORCH = $(shell sed -n 's/^ *"\(torch[<>=][^"]*\)".*/\1/p' pyproject.toml)
WORKERS ?= 2
TIMEOUT ?= 300
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
export NB P CLUSTER
export TORCH_CPP_LOG_LEVEL ?= ERROR
unexport PYTHONDONTWRITEBYTECODE # containers set it: each process would compile the package again

.DEFAULT_GOAL := help
.PHONY: help setup notebooks test test-all test-browser soak lint lab new-notebook measure campaign refresh clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make .venv, or take the active conda environment, and install the project, once (CPU=1: torch without CUDA)

$(STAMP): pyproject.toml
	$(eval BEGAN := $(shell date +%s))
	@$(if $(CONDA),$(PY),$(PYTHON)) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("RoseLLM needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) uv $(if $(CPU),,'$(TORCH)')
	$(if $(CPU),$(UV) --torch-backend cpu '$(TORCH)')
	@$(UV) -e '.[cluster,notebooks,serve,test]' || { echo "uv could not install it (it does not read pip's configuration): pip tries"; $(PIP) -e '.[cluster,notebooks,serve,test]'; }
	@touch $@
	@echo "$(VENV) is ready, after $$(($$(date +%s) - $(BEGAN))) s"

$(STAMP)-browser: $(STAMP)
	$(PIP) -e '.[browser]'
	@touch $@

notebooks: $(STAMP) ## execute the notebooks into build/ (NB="03 05" selects, P="batch=64" sets parameters, CLUSTER=auto spreads them over Ray)
	@exec $(PY) -m rosellm.lab.running.run_notebooks --select "$$NB" --parameters "$$P" --workers $(WORKERS) --timeout $(TIMEOUT) \
		$(if $(CLUSTER),--cluster "$$CLUSTER")

NBVAL := --nbval --nbval-current-env --nbval-cell-timeout 120 --nbval-sanitize-with notebooks/nbval_sanitize.cfg

test test-all: export OMP_NUM_THREADS := 1
test: $(STAMP) ## run the tests and every notebook as a test, in five minutes on two cores; T="tests/test_atomic.py" runs that alone
	$(PY) -m pytest $(or $(T),tests notebooks) $(SHARED) $(NBVAL)

test-all: $(STAMP) ## run the slow cases as well, in about twenty minutes
	$(PY) -m pytest $(or $(T),tests notebooks) $(SHARED) $(NBVAL) -m "not browser"

test-browser: $(STAMP)-browser ## open notebooks in JupyterLab and headless Chromium, run them, move controls (NB selects)
	$(PY) -m pytest tests/browser -m browser

soak: export OMP_NUM_THREADS := 1
soak: SEED ?= $(shell date +%s)
soak: $(STAMP) ## run 1,000,000 random operations on the engine's parts (SEED=1 draws those of an earlier run)
	$(PY) -m pytest tests/soak -k in_a_soak -m "not browser" -q -n 2 --maxschedchunk 1 --soak 1000000 --hypothesis-seed $(SEED)

lint: $(STAMP) ## check the style of the Python files (ruff) and the package's types (mypy)
	$(PY) -m ruff check rosellm tests notebooks/exhibits conftest.py
	$(PY) -m ruff format --check rosellm tests notebooks/exhibits conftest.py
	$(PY) -m mypy rosellm

lab: $(STAMP) ## open a working copy of the notebooks in JupyterLab, on 127.0.0.1 with its token (LAB="--port 9000" adds options)
	@exec $(PY) -P rosellm/lab/running/open_lab.py $(LAB)

new-notebook: $(STAMP) ## write a notebook that works (NAME=50_my_idea)
	@exec $(PY) -m rosellm.lab.running.new_notebook $(NAME)

measure: $(STAMP) ## record this machine in ten minutes, to be shown beside the H200; again: what is missing (MINUTES=30)
	@exec $(PY) -m rosellm.lab.records.quick --minutes $(or $(MINUTES),10)

campaign: $(STAMP) ## make all committed records of one GPU anew, at one commit, ten minutes a call (MINUTES=20, BLOCK=ladder)
	@exec $(PY) -m rosellm.bench campaign --minutes $(or $(MINUTES),10) $(if $(BLOCK),--block $(BLOCK))

refresh: $(STAMP) ## execute the notebooks in place, add PNGs and normalise them (NB selects)
	@exec $(PY) -m rosellm.lab.running.refresh_notebooks --select "$$NB"

clean: ## remove what was built, but neither .venv nor your notebooks in build/lab
	find build -mindepth 1 -maxdepth 1 ! -name lab -exec rm -rf {} + 2>/dev/null || true
	rm -rf dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find rosellm tests -name __pycache__ -type d -prune -exec rm -rf {} +
