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

.PHONY: help demo docs notebooks check daily test test-all gpu-compiler newest steady lint format lock install clean

help:
	@echo "make demo     retrofit a small model, then watch a larger one reason from a small cache"
	@echo "make check    lint, types and the quickest tests of every room (a minute or so)"
	@echo "make test     every law of tests/laws over every policy: what is not slow (minutes)"
	@echo "make test-all all tests, as continuous integration runs them (25 to 70 minutes)"
	@echo "make gpu-compiler  the compiler for GPUs that are not there, for some of the tests (142 MB)"
	@echo "make newest   lower and compile the GPU kernels with the newest jax that is supported"
	@echo "make steady   all tests under other seeds, compilers and threads (hours)"
	@echo "make lint     formatting, lint and types"
	@echo "make format   rewrite the sources in the house format"
	@echo "make notebooks  write colab/*.ipynb from the scripts beside them"
	@echo "make lock     resolve requirements.lock again (needs uv)"
	@echo "make docs     the documentation, into runs/docs"
	@echo "make install  only make .venv; EXTRAS=cuda adds extras of pyproject.toml"
	@echo "make clean    remove .venv and the caches"

demo: $(STAMP)
	$(RUN) -m dms_jax.command_line demo $(ARGS)

# pyright runs on one core: the tests begin beside it.
check: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 lint daily

daily: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -q -m "not nightly and not release" @tests/daily.txt $(ARGS)

test: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal -m "not nightly and not release" $(ARGS)

test-all: $(STAMP)
	$(RUN) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

gpu-compiler: .gpu_compiler/installed

# Compiles for GPUs that are not there (tests/support/ahead.py): 142 MB, no CUDA needed.
.gpu_compiler/installed: requirements.lock | $(STAMP)
	if command -v uv >/dev/null; then pip="uv pip install --python $(RUN)"; \
	else pip="$(RUN) -m pip install"; fi; \
	$$pip --quiet --no-deps --upgrade --target $(@D) $$($(RUN) -c \
	  'import jax; print(*(f"jax-cuda13-{part}=={jax.__version__}" for part in ("pjrt", "plugin")))')
	touch $@

newest: $(STAMP)
	WORKERS=$(WORKERS) sh .ci/newest

steady: $(STAMP)
	$(RUN) -m tests.steadiness --workers $(WORKERS) $(ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright

format: $(STAMP)
	$(VENV)/bin/ruff check --fix-only --quiet .
	$(VENV)/bin/ruff format .

lock:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.12 \
	  --generate-hashes --no-header --upgrade --output-file requirements.lock

install: $(STAMP)
ifneq ($(EXTRAS),)
	@sh .ci/install $(VENV) $(EXTRAS)
endif

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet --config-file experiments/docs/mkdocs.yml

notebooks: $(STAMP)
	$(RUN) -m jupytext --sync colab/*.py

$(STAMP): requirements.lock pyproject.toml
	@sh .ci/install $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) .venv-newest .gpu_compiler .jax_cache .pytest_cache .ruff_cache .hypothesis
