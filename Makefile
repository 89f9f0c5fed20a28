# Everything runs in .venv; `make quickstart` and `make test` need nothing but Python 3.10 or newer with pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STEPS ?= 300

.PHONY: quickstart test test-full lint type format clean help

help:
	@echo "make quickstart   train a small GPT with SMPEstimator.fit(): two processes, no cloud account"
	@echo "make test         the tests (big matrices as a sample)"
	@echo "make test-full    the tests, with the big matrices whole"
	@echo "make lint type    ruff and mypy"
	@echo "make clean        remove the environment and what was produced"

# One environment for all targets; made again when its requirements change.
$(VENV)/.installed: setup.cfg setup.py pyproject.toml constraints-cpu.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'smp-estimator needs Python 3.10 or newer, found ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-cpu.txt -e ".[local,test,lint]"
	@touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py --steps $(STEPS)

test: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not full"

test-full: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(VENV)/.installed
	$(BIN)/mypy smp_estimator container/smp_config container/smp_launch container/smp_runtime container/smdistributed

clean:
	rm -rf $(VENV) build dist *.egg-info container/*.egg-info quickstart-data quickstart-output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
