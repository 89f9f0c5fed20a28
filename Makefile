# Everything runs in .venv; `make quickstart` and `make test` need nothing but Python 3.10 or newer with pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STEPS ?= 150
# Processes that run tests at the same time; a test has up to four ranks of its own, and many of them wait. Each takes some 2.5 GB.
WORKERS ?= 3

FLOOR := .venv-sdk-floor
SDK3 := .venv-sdk-3

# Tests start some thousand processes; where Python is told to keep no bytecode, each compiles the runtime anew.
export PYTHONDONTWRITEBYTECODE :=

# Compiled is what is imported, at the first time: of the packages that is a tenth, and pip would compile all of them on one processor.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# What most processes import, before many do so at once.
IMPORTED := -c "import logging, os; os.environ['SAGEMAKER_SUPPRESS_V2_WARNING'] = '1'; logging.disable(); \
	import torch._dynamo, sagemaker.pytorch, matplotlib.pyplot, moto.server"

# A file's tests stay together, for what its fixtures have made; tests/conftest.py puts the files in order.
SHARED_OUT := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Of `make test-torch`: another PyTorch than the pinned one, for the runtime's tests.
TORCH ?= 2.8.0
OTHER := .venv-torch-$(TORCH)

# Empty: CPU, on a Debian base built here. With one: its Python, torch, Open MPI and EFA are kept.
BASE_IMAGE ?=
IMAGE ?= smp-estimator:cpu
LOCAL_BASE := smp-estimator-base:bookworm

# tests/runner/environments.py has the tests of each environment; each target runs it with the environment's own Python.
RUNNER := python tests/runner
# A table to which the short targets append, such as `make test`: `make test-all` with the same table leaves out what passed in them.
RECORD ?=
SHORT := $(RUNNER) pytest $(addprefix --record ,$(RECORD))

# Of `make test-all`: SLICE=3/9, LIMIT=900 (seconds), BUILD=no (only environments that are there); TABLE, of `make test-report` too.
SLICE ?=
LIMIT ?= 0
BUILD ?= yes
TABLE ?= test-table.jsonl

DOCS := .venv-docs
TRACKERS := .venv-trackers

.PHONY: bench bench-quick dist docs docs-serve gpu-check-dry gpu-wheels image push test-docker quickstart test test-gpu test-newest test-sdk-floor test-crossings test-damage test-mutants test-trackers test-v3 test-full test-all test-report test-torch test-clients test-clients-full test-matrix lint type format clean help

help:
	@echo "make quickstart   train a small GPT with SMPEstimator.fit(): two processes, no cloud account"
	@echo "make test         the tests (big matrices as a sample), with the newest SDK"
	@echo "make test-sdk-floor  the notebook side with the oldest SDK"
	@echo "make test-near    the tests that are near a change, in about two minutes: BASE=HEAD LIMIT=120"
	@echo "make test-full    the tests, with the big matrices whole"
	@echo "make test-all     all tests in all environments, in slices, into test-table.jsonl: SLICE=3/9, LIMIT=900, BUILD=no; test-report says what is missing"
	@echo "make test-crossings  drawn combinations of features beside one process: SEED=1 COUNT=3000, or CASE='{…}'"
	@echo "make test-mutants mistakes in the runtime, each against the same drawn cases; ONLY=\"…\": some of tests/crossings/mutants.json"
	@echo "make test-damage  checkpoints with flipped bits and other damage, and jobs that are killed while they save"
	@echo "make test-torch   the runtime's tests with another PyTorch, what it keeps private first: TORCH=2.8.0"
	@echo "make test-v3      ModelTrainer of SDK v3: the notebook side, and jobs as processes of this machine"
	@echo "make test-trackers TensorBoard, MLflow and wandb: what their own readers find of a job"
	@echo "make test-clients client libraries with Transformers 4 and 5, as a sample; test-clients-full: all, for docs/compatibility.md"
	@echo "make test-matrix  Python 3.10 to 3.13 and PyTorch from the floor to the newest, for docs/compatibility.md; MATRIX=\"3.12 2.4.0\": some"
	@echo "make image        the training image; BASE_IMAGE=… for the cloud; make push prints how to publish it"
	@echo "make test-docker  SageMaker local mode with that image, one and two hosts"
	@echo "make bench        the figures of docs/how-it-works/performance.md, peers in turns, into benchmarks/results.json; bench-quick: under five minutes"
	@echo "make gpu-check-dry  the checks for a machine with a GPU (benchmarks/gpu_check), tiny and on the CPU; gpu-wheels fetches into .gpu what they need there"
	@echo "make test-gpu     on a machine with a GPU: each path of the runtime with code of its own for CUDA, against the CPU; GPU_PYTHON=python3"
	@echo "make docs         the documentation as a site in site/; make docs-serve shows it while it is written"
	@echo "make dist         wheel and sdist into dist/"
	@echo "make lint type    ruff and mypy"
	@echo "make clean        remove the environment and what was produced"

# One environment for all targets; made again when its requirements change.
$(VENV)/.installed: setup.cfg setup.py pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10) and 'smp-estimator needs Python 3.10 or newer, found ' + sys.version.split()[0])"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -c constraints/cpu.txt -e ".[local,test,lint]"
	$(BIN)/python $(IMPORTED)
	@touch $@

quickstart: $(VENV)/.installed
	$(BIN)/python examples/quickstart.py --steps $(STEPS)

# ONLY="pipeline starting": some suites. `python benchmarks/bench.py list` names them.
bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py run $(addprefix --only ,$(ONLY))
	$(BIN)/python benchmarks/bench.py write

bench-quick: $(VENV)/.installed
	$(BIN)/python benchmarks/bench.py run --quick $(addprefix --only ,$(ONLY))

# Where a machine with a GPU has no network: packages that its Python lacks, for that Python, and an NCCL that lets ranks share a GPU.
GPU_FILES ?= .gpu
GPU_WHEELS := pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.7.0 typing-extensions==4.16.0 typing-inspection==0.4.5
gpu-wheels: $(VENV)/.installed
	$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
		--platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 -d $(GPU_FILES)/whl $(GPU_WHEELS)
	$(BIN)/python benchmarks/gpu_check/slim_nccl.py $(GPU_FILES)/nccl

# Whether the checks run, before a machine with a GPU is at hand. Results in build/gpu-check.
gpu-check-dry: $(VENV)/.installed
	rm -rf build/gpu-check
	RES_OPTIONS=attempts:0 $(BIN)/python benchmarks/gpu_check drive --tiny --beside 2 --budget 1800 --patience 4 --out build/gpu-check

# With a Python that has PyTorch for that GPU; .venv has the one for CPUs. The first check fails where there is no GPU.
GPU_PYTHON ?= python3
test-gpu:
	SMPCHECK_PYTHON=$(GPU_PYTHON) bash benchmarks/gpu_check/gpu_check.sh --only env,paths --budget 300

test: test-newest

test-newest: $(VENV)/.installed
	$(BIN)/$(SHORT) newest --sample -- $(SHARED_OUT) --durations=25 --durations-min=3 --budget

# While a change is being made: its room first, then by the imports that lead to it. BASE=origin/main counts from there.
BASE ?= HEAD
test-near: LIMIT := $(if $(filter command%,$(origin LIMIT)),$(LIMIT),120)
test-near: $(VENV)/.installed
	$(BIN)/$(RUNNER) near --base $(BASE) --limit $(LIMIT) -- $(SHARED_OUT)

# The notebook side with the oldest SDK that is supported. It wants an older protobuf, and imports pytz unasked.
$(FLOOR)/.installed: setup.cfg setup.py constraints/cpu.txt
	$(PYTHON) -m venv $(FLOOR)
	grep -v '^sagemaker==\|^sagemaker-core==\|^protobuf==' constraints/cpu.txt > $(FLOOR)/constraints.txt
	$(FLOOR)/bin/python $(INSTALL) -c $(FLOOR)/constraints.txt -e ".[sagemaker]" \
		sagemaker==2.254.0 pytz pytest pytest-timeout pytest-xdist hypothesis "moto[server]" cloudpickle matplotlib
	@touch $@

# Drawn combinations of features beside one process. A fault is shrunk; with the same REPORT it goes on where it ended.
SEED ?= 1
COUNT ?= 1000
REPORT ?= crossings.jsonl
test-crossings: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m crossings.fuzz $(if $(CASE),case '$(CASE)',run --seed $(SEED) --count $(COUNT) $(addprefix --only ,$(ONLY)) --out $(REPORT))

# What drawn combinations would find: the runtime with one mistake each, until a case shows it. It goes on where the report ends.
MUTANTS ?= mutants.jsonl
test-mutants: $(VENV)/.installed
	PYTHONPATH=tests $(BIN)/python -m crossings.mutants run $(addprefix --only ,$(ONLY)) --out $(MUTANTS)

# Of checkpoints: 2,000 flipped bits in each hash, 600 other damages, 200 jobs that are killed while they save.
test-damage: $(VENV)/.installed
	$(BIN)/python -m pytest -q -m full tests/checkpoints/test_damage.py tests/checkpoints/test_kills.py -s

test-sdk-floor: $(FLOOR)/.installed
	$(FLOOR)/bin/$(SHORT) sdk-floor --sample -- $(SHARED_OUT)

# The notebook side with SDK v3, and whole jobs of it; the SDK wants packages that v2 has in other versions, or not at all.
$(SDK3)/.installed: setup.cfg setup.py constraints/cpu.txt constraints/sdk-3.txt
	$(PYTHON) -m venv $(SDK3)
	awk -F== 'NR == FNR { own[$$1] } NR == FNR || !($$1 in own)' constraints/sdk-3.txt constraints/cpu.txt > $(SDK3)/constraints.txt
	$(SDK3)/bin/python $(INSTALL) -c $(SDK3)/constraints.txt -e ".[local3]" \
		pytest pytest-timeout pytest-xdist nbformat "moto[server]"
	$(SDK3)/bin/python -c "import torch._dynamo, sagemaker.train, moto.server"
	@touch $@

# With environments of version 2 that are there already, losses are compared.
test-v3: $(SDK3)/.installed
	$(SDK3)/bin/$(SHORT) sdk-3 --sample -- $(SHARED_OUT)

# Trackers, which want packages that nothing else here needs.
$(TRACKERS)/.installed: setup.cfg setup.py constraints/cpu.txt constraints/trackers.txt
	$(PYTHON) -m venv $(TRACKERS)
	$(TRACKERS)/bin/python $(INSTALL) -c constraints/cpu.txt -c constraints/trackers.txt -e ".[local,test,trackers]"
	@touch $@

test-trackers: $(TRACKERS)/.installed
	$(TRACKERS)/bin/$(SHORT) trackers

# The index has no CPU build of other versions: several GB are fetched the first time. Some PyTorchs want their own sympy.
$(OTHER)/.installed: setup.cfg setup.py constraints/cpu.txt
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==\|^sympy==' constraints/cpu.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python $(INSTALL) -c $(OTHER)/constraints.txt -e ".[local,test]" torch==$(TORCH)
	@touch $@

test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest tests/runtime/test_torch_private*.py tests/runtime/test_torch_in_place.py tests/runtime/test_torch_lacking.py
	$(OTHER)/bin/python -m pytest tests -m "not full" $(SHARED_OUT) --ignore=tests/estimator --ignore=tests/planning \
		--ignore=tests/docker --ignore=tests/launch

# Client libraries with both versions of Transformers: constraints/clients-*.txt holds where that differs from constraints/cpu.txt.
.venv-clients-%/.installed: setup.cfg setup.py constraints/cpu.txt constraints/clients-%.txt
	$(PYTHON) -m venv .venv-clients-$*
	awk -F== 'NR == FNR { own[$$1] } NR == FNR || !($$1 in own)' constraints/clients-$*.txt constraints/cpu.txt > .venv-clients-$*/constraints.txt
	.venv-clients-$*/bin/python $(INSTALL) -c .venv-clients-$*/constraints.txt -e ".[local,test,clients]"
	.venv-clients-$*/bin/python $(IMPORTED)
	.venv-clients-$*/bin/python -c "import transformers.modeling_utils, transformers.trainer, peft, trl"
	@touch $@

CLIENTS := $(SHARED_OUT) --durations=15 --durations-min=5
test-clients: SAMPLE := --sample
test-clients test-clients-full: .venv-clients-4/.installed .venv-clients-5/.installed
	rm -f .venv-clients-*/outcomes.jsonl
	SMP_CLIENT_OUTCOMES=.venv-clients-4/outcomes.jsonl .venv-clients-4/bin/$(SHORT) clients-4 $(SAMPLE) -- $(CLIENTS)
	SMP_CLIENT_OUTCOMES=.venv-clients-5/outcomes.jsonl .venv-clients-5/bin/$(SHORT) clients-5 $(SAMPLE) -- $(CLIENTS)
	.venv-clients-5/bin/python tests/support/documents/client_table.py .venv-clients-4/outcomes.jsonl .venv-clients-5/outcomes.jsonl

# One environment at a time, each removed after its tests: several GB are fetched where the index has no CPU build. MATRIX: only
# these Pythons (for the notebook side) and PyTorchs (for the runtime).
MATRIX ?=
test-matrix:
	$(PYTHON) tests/support/documents/version_matrix.py run $(MATRIX)

test-full: $(VENV)/.installed $(FLOOR)/.installed
	$(FLOOR)/bin/$(SHORT) sdk-floor -- $(SHARED_OUT)
	$(BIN)/$(SHORT) newest -- $(SHARED_OUT)

# Everything, in slices of at most 15 minutes; what the table has as passed at this commit is not run again.
test-all: $(VENV)/.installed
	SMP_TEST_IMAGE=$(IMAGE) $(BIN)/$(RUNNER) run --table $(TABLE) --slice "$(SLICE)" --limit $(LIMIT) \
		$(if $(filter no,$(BUILD)),--no-build) -- $(SHARED_OUT)

# What the table has of this commit: fails if a test failed, or passed in no environment.
test-report: $(VENV)/.installed
	$(BIN)/$(RUNNER) report --table $(TABLE)

image: $(VENV)/.installed
ifeq ($(BASE_IMAGE),)
	docker/base.sh $(LOCAL_BASE)
	docker/wheelhouse.sh $(BIN)/python
	docker/build.sh $(IMAGE) $(LOCAL_BASE)
else
	docker/wheelhouse.sh $(BIN)/python only-project
	docker/build.sh $(IMAGE) $(BASE_IMAGE)
endif

# Prints the commands; nothing leaves this machine.
push:
	@docker/push.sh $(IMAGE)

test-docker: image $(SDK3)/.installed
	SMP_TEST_IMAGE=$(IMAGE) $(BIN)/$(SHORT) docker
	SMP_TEST_IMAGE=$(IMAGE) $(SDK3)/bin/$(SHORT) docker-sdk-3

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(VENV)/.installed
	$(BIN)/mypy smp_estimator container/smp_config container/smp_records container/smp_launch container/smp_emulation container/smp_runtime container/smp_tools container/smp_integrations container/smp_version2 container/smdistributed container/smp_transformer_engine container/torch_sagemaker

# What builds the site reads the code without running it, so that the project's own packages are not installed there.
$(DOCS)/.installed: constraints/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python $(INSTALL) -c constraints/docs.txt mkdocs-material "mkdocstrings[python]" build
	@touch $@

# The variable: of the theme's word on a successor of mkdocs, which the pinned version does not concern.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet

docs-serve: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve

# From the sdist, so that this holds all that it needs.
dist: $(DOCS)/.installed
	rm -rf dist
	$(DOCS)/bin/python -m build --outdir dist .

clean:
	rm -rf $(VENV) $(DOCS) $(TRACKERS) site $(FLOOR) $(SDK3) .venv-torch-* .venv-clients-* build dist *.egg-info container/*.egg-info quickstart-data quickstart-output
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
