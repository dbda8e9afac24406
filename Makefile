# Everything on a machine that has only Python and pip: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
FRESH := .venv-wheel
DOCS := .venv-docs
# A pinned torch keeps gigabytes of CUDA packages away from machines without a GPU.
TORCH ?= torch==2.13.0
SHARED_TRACES ?= ../shared/traces
# Code is compiled once, not by each of the hundreds of processes that the tests start.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-long lint types imports page tests test-slow test-launchers launchers house lock lock-check fuzz trainers loggers torch-versions format package release docs docs-serve docs-version pages pictures bench bench-guard \
	bench-capture bench-predict bench-tune refit vscode clean

help:
	@echo "make demo    train a small model in two processes, explain it, write a report"
	@echo "make test    lint, types, import contract, the page's scripts, all but the longest tests"
	@echo "make test-all  the same with the longest tests"
	@echo "make test-slow  variants that the ordinary tests leave out"
	@echo "make test-launchers  Slurm, mpirun and other launchers, those that this machine has"
	@echo "make launchers  install accelerate, transformers, lightning, Ray Train and DeepSpeed"
	@echo "make fuzz    100,000 damaged inputs of every kind (CASES=N, SEED=N): hours"
	@echo "make trainers  install accelerate, transformers, lightning; test capture with them"
	@echo "make loggers  install TensorBoard, MLflow and Weights & Biases; test logging with them"
	@echo "make torch-versions  older versions of torch, each in its own environment: compiled trainings under capture"
	@echo "make docs    build the site of the docs; broken links are errors (docs-serve shows it)"
	@echo "make pages   write the reference pages that are made from the code"
	@echo "make pictures  draw the README's pictures again"
	@echo "make package  build wheel and sdist, check both, try the wheel in a new environment"
	@echo "make release VERSION=1.2.3  check everything and tag it"
	@echo "make bench   speed and memory against traceinsight, the next HolisticTraceAnalysis"
	@echo "make bench-guard  fail if a usual command needs 10% more processor time than in the last release"
	@echo "make bench-capture   what capture costs: paired runs with and without it"
	@echo "make bench-predict   predictions against what was measured on an H200"
	@echo "make bench-tune      tune on small CPU scripts: what is kept, seconds a remedy costs to try"
	@echo "make refit           fit predict/data again, as far as its measurements are recorded here"
	@echo "make vscode  check, test and package the VS Code extension (needs node 20 and npm)"
	@echo "make format  format the code"
	@echo "make clean   remove the virtual environments and caches"

demo: $(VENV)/installed
	$(BIN)/stepscope demo

test: $(VENV)/installed lint types imports page tests

# `make test`, and then the files of tests/long_tests.py.
test-all: test test-long

lint: $(VENV)/installed
	$(BIN)/ruff check src tests benchmarks docs/learn/scripts docs/generate docs/pictures.py
	$(BIN)/ruff format --check src tests benchmarks docs/learn/scripts docs/generate docs/pictures.py

types: $(VENV)/installed
	$(BIN)/mypy

imports: $(VENV)/installed
	$(BIN)/lint-imports

# The report's scripts. Node is for their development only: nothing here needs it to run.
page:
	@if ! command -v npm > /dev/null; then \
		echo "page: skipped, the report's scripts are checked with node and npm: not found here"; \
	elif ! npm install --silent --no-package-lock --no-audit --no-fund --fetch-retries=1; then \
		echo "page: skipped, npm could not install what package.json names"; \
	else npm run --silent types && npm run --silent lint && npm run --silent test; fi

# Some tests measure real trainings, and neighbours take their cores: what failed beside others is
# run once more, alone. What fails alone is wrong.
ORDINARY = not slow and not launchers
tests: SELECTED = $(ORDINARY) and not long
test-long: SELECTED = $(ORDINARY) and long
tests test-long: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist worksteal -m "$(SELECTED)" || \
		{ echo "tests: those that failed, once more, alone"; \
		$(BIN)/pytest --last-failed --last-failed-no-failures none -m "$(SELECTED)"; }

test-slow: $(VENV)/installed
	$(BIN)/pytest -n 2 --dist worksteal -m slow

# Slurm and mpirun: apt install slurmctld slurmd slurm-client munge openmpi-bin; Slurm needs root.
test-launchers: $(VENV)/installed
	$(BIN)/pytest -n 3 --dist loadfile -m launchers tests/launchers -rs --durations=10

# What test-launchers can use beside Slurm and MPI; DeepSpeed over ssh needs: apt install pdsh openssh-server
launchers: $(VENV)/installed
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" -e ".[test,trainers,launchers]"
	$(BIN)/pip install -q --disable-pip-version-check setuptools wheel ninja psutil py-cpuinfo hjson einops pydantic tqdm
	DS_BUILD_OPS=0 $(BIN)/pip install -q --disable-pip-version-check --no-build-isolation --no-deps deepspeed

# How the code is cut, in numbers; tests/test_house.py keeps them from growing.
house: $(VENV)/installed
	$(BIN)/python tests/house.py

# Every answer about the corpus of tests/lock, recorded before code moves and compared after it.
lock: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m lock record
lock-check: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m lock check

CASES ?= 100000
SEED ?= 0
fuzz: $(VENV)/installed
	PYTHONPATH=tests $(BIN)/python -m fuzz --cases $(CASES) --seed $(SEED)

loggers: $(VENV)/installed
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" -e ".[test,trainers,loggers]"
	$(BIN)/pytest -m "slow or not slow" tests/ui/test_loggers.py tests/ui/test_logged_trainings.py

# Accelerate, transformers and lightning take minutes to install: their tests skip without them.
trainers: $(VENV)/installed
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" -e ".[test,trainers]"
	$(BIN)/pytest -m "slow or not slow" tests/measure/test_trainers.py \
		tests/whole_run/test_planted_trainers.py

# The same bits, graphs and cache hits with and without capture; an older torch keeps less of what it compiled.
# From 2.11 on, Linux wheels bring gigabytes of CUDA packages with them.
TORCH_VERSIONS ?= 2.4.1 2.6.0 2.11.0
torch-versions:
	for version in $(TORCH_VERSIONS); do \
		$(PYTHON) -m venv .venv-torch-$$version && \
		.venv-torch-$$version/bin/pip install -q --disable-pip-version-check torch==$$version setuptools -e . && \
		.venv-torch-$$version/bin/python benchmarks/compile_overhead.py --model mlp --rounds 1 --steps 30 --explain \
		|| exit 1; done

format: $(VENV)/installed
	$(BIN)/ruff check --fix src tests benchmarks docs/learn/scripts docs/generate docs/pictures.py
	$(BIN)/ruff format src tests benchmarks docs/learn/scripts docs/generate docs/pictures.py

# What is missing in the wheel is missing here: nothing of this folder is on the path. The sdist is
# checked by building the wheel from it.
package:
	rm -rf dist $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/pip install -q --disable-pip-version-check build twine
	$(FRESH)/bin/python -m build --outdir dist . > /dev/null
	$(FRESH)/bin/twine check --strict dist/*
	rm -rf $(FRESH)
	$(PYTHON) -m venv $(FRESH)
	$(FRESH)/bin/pip install -q --disable-pip-version-check dist/stepscope-*.whl
	$(FRESH)/bin/python -c "import importlib.util as found; assert not found.find_spec('torch')"
	cd dist && ../$(FRESH)/bin/stepscope --help > /dev/null
	cd dist && ../$(FRESH)/bin/stepscope explain ../tests/golden/h200-resnet18 --no-cache --html report.html
	cd dist && test -s report.html && rm report.html
	cd dist && ../$(FRESH)/bin/stepscope why host-bound | head -3
	cd dist && ../$(FRESH)/bin/stepscope completion bash | grep -q complete
	ls dist

# Everything that a release needs, then its tag: pushing the tag publishes it (.github/workflows/release.yml).
release:
	@test -n "$(VERSION)" || { echo "make release VERSION=1.2.3"; exit 2; }
	@git diff --quiet HEAD || { echo "release: uncommitted changes"; exit 1; }
	@grep -q '^version = "$(VERSION)"$$' pyproject.toml || { echo "release: pyproject.toml has another version"; exit 1; }
	@grep -q '^__version__ = "$(VERSION)"$$' src/stepscope/__init__.py || { echo "release: stepscope.__version__ differs"; exit 1; }
	@grep -q '^version: $(VERSION)$$' CITATION.cff || { echo "release: CITATION.cff has another version"; exit 1; }
	@grep -q '^## $(VERSION)' CHANGELOG.md || { echo "release: CHANGELOG.md has no entry"; exit 1; }
	$(MAKE) test package docs
	git tag -a v$(VERSION) -m "stepscope $(VERSION)"
	@echo "tagged v$(VERSION): git push origin v$(VERSION) publishes it"

# The site. Pages and pictures that are made from code are made first by `make pages`.
docs: $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build --strict --quiet --site-dir build/site
	@echo "build/site/index.html"

docs-serve: $(DOCS)/installed
	$(DOCS)/bin/mkdocs serve

docs-version: $(DOCS)/installed
	@test -n "$(VERSION)" || { echo "make docs-version VERSION=1.2.3"; exit 2; }
	PATH="$(abspath $(DOCS)/bin):$$PATH" mike deploy --push --update-aliases $(VERSION) latest

# Reference pages from the code, then the README's pictures (these need Chromium).
pages: $(VENV)/installed
	$(BIN)/python docs/generate

pictures: $(VENV)/installed
	$(BIN)/python docs/pictures.py

bench: $(VENV)/installed $(PEERS)/installed
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/peers.py --ours $(BIN)/python --peer $(PEERS)/bin/python \
		--traces $(SHARED_TRACES)

# Without a release yet, a commit: `make bench-guard SINCE=main` compares with any other.
SINCE ?= $(or $(shell git describe --tags --abbrev=0 2>/dev/null),904006bc)
bench-guard: $(VENV)/installed
	$(BIN)/python benchmarks/guard.py --since $(SINCE)

bench-capture: $(VENV)/installed
	$(BIN)/python benchmarks/capture.py --slice 0.3 --pin --pairs 16 --wait 500 --ranks 2 \
		$(CAPTURE_OPTIONS) -- benchmarks/workloads/timed_workload.py tabular --steps 1000
	$(BIN)/python benchmarks/short_steps.py

bench-predict: $(VENV)/installed
	$(BIN)/python benchmarks/prediction.py $(SHARED_TRACES)/h200

# The other rows of predict/data need the machines that they were measured on: each names its script.
refit: $(VENV)/installed
	$(BIN)/python benchmarks/fit_convolutions.py --write
	@if [ -d ../shared/gpu_transfer ]; then $(BIN)/python benchmarks/fit_gpu_transfer.py; \
		else echo "refit: other_gpu.json stays, its tables are not here"; fi

bench-tune: $(VENV)/installed
	$(BIN)/python benchmarks/tune_scripts.py $(TUNE_OPTIONS)

vscode:
	cd editors/vscode && npm ci --no-audit --no-fund && npm run types && npm run lint && npm run test && npm run bundle && npm run package

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" -e ".[test]"
	touch $@

$(DOCS)/installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install -q --disable-pip-version-check \
		$$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

$(PEERS)/installed:
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install -q --disable-pip-version-check traceinsight==0.6.1 "pandas<3"
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(FRESH) $(DOCS) build node_modules editors/vscode/node_modules editors/vscode/out editors/vscode/dist dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
