# One command each: `make demo`, `make test`, `make check`. The first of them to run makes the
# virtual environment; it is made again only when pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -q
WORKERS := -n auto --maxprocesses 4
MAKEFLAGS += --no-print-directory

.PHONY: demo test slow check format lint types laws core docs readme golden clean
.DELETE_ON_ERROR:

demo: $(READY)
	@$(BIN)/tpplan suggest examples/llama3_8b.py --topology dgx-h100:8 --global-batch 512 --seq-len 8192

test: $(READY)
	@$(PYTEST) $(WORKERS) -m "not slow"

slow: $(READY)
	@$(PYTEST) -m slow

check: format lint types laws core docs

format: $(READY)
	@$(BIN)/ruff format --check --quiet .

lint: $(READY)
	@$(BIN)/ruff check --quiet .

types: $(READY)
	@$(BIN)/basedpyright --level error

laws: $(READY)
	@$(PYTEST) tests/core/test_laws.py

core: $(READY)
	@$(PYTEST) $(WORKERS) tests/core --ignore tests/core/test_laws.py

# Not --quiet: it would hide warnings from --strict. NO_MKDOCS_2_WARNING silences an advertisement.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

readme: $(READY)
	@$(BIN)/python docs/update_readme.py

golden: $(READY)
	@$(BIN)/python -m tests.core.golden

clean:
	@rm -rf $(VENV) build dist *.egg-info

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV) (once; needs a package index)" >&2
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[hf,report,docs,dev]'
	@touch $@
