"""Sets up jax for every test: platform, fake devices, compilation cache, determinism.

jax reads these environment variables on its first import, so they are set before any test module is
collected. Subprocesses of tests inherit them.

- CPU with 8 fake devices, unless `--gpu` asks for the card (then the tests marked `gpu` run too).
- libtpu gets its path, so that tests can compile for TPU on a machine without one.
- Compiled functions are kept in `.jax_cache` of the checkout and shared by all workers.
- XLA skips most optimizations; a test that runs longer than it compiles, or that checks compiled
  code, uses the fixture `optimized`.

Variables that are already set are kept.
"""

import functools
import gc
import os
import sys
import warnings
from pathlib import Path

import hypothesis
import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
FAKE_DEVICES = 8
# Most of the suite's time is XLA on the CPU compiling functions that then run for milliseconds: its
# older emitter of loops takes a quarter of the time of the newer one. Cutting a program into 32
# parts, which other cores could compile, takes a quarter more than one part and three times as many
# memory maps; here the other cores have tests of their own.
OLD_EMITTER = (
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters=true"
    " --xla_cpu_parallel_codegen_split_count=1"
)
# Where a test runs for longer than it compiles (`optimized`), LLVM's first level makes its programs
# as quick as the third does, in half of the time; without that fixture no level is asked for.
QUICK_FLAGS = f"{OLD_EMITTER} --xla_backend_optimization_level=1"
# Every compiled program holds some memory maps. Linux grants a process 65,530, and jax crashes
# beyond them. Released programs come back from the compilation cache.
MOST_MEMORY_MAPS = 20_000
MEMORY_MAPS = Path("/proc/self/maps")
# Counting 20,000 memory maps takes longer than most tests.
TESTS_BETWEEN_COUNTS = 10
TESTS_DONE = pytest.StashKey[int]()

hypothesis.settings.register_profile(
    "house", derandomize=True, deadline=None, database=None, print_blob=False
)
hypothesis.settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run on the NVIDIA GPU of this machine")


def pytest_configure(config: pytest.Config) -> None:
    # Containers often disable Python's bytecode cache: then every test process compiles all sources
    # again.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    prepare_jax(config.getoption("--gpu"))


@functools.cache
def prepare_jax(gpu: bool = False) -> None:
    """Sets the environment variables that jax reads on import."""
    if "jax" in sys.modules:
        raise pytest.UsageError("jax was imported before tests/conftest.py could set it up")
    if gpu:
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        # Several processes share the card, so none may take all of its memory at the start.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = str(FAKE_DEVICES)
        os.environ.setdefault("XLA_FLAGS", QUICK_FLAGS)
        os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(CHECKOUT / ".jax_cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
        # Executables are keyed by the source, and tests replace parts of the source while they run.
        "DMS_JAX_COMPILATION_CACHE": "off",
        # Python line numbers are stored with each operation, and not needed here.
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
        # Ahead-of-time compilation for TPU with no TPU at hand.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # NumPy's threads would compete with the other workers for the cores.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    for name, value in environment.items():
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]):
    if not config.getoption("--gpu"):
        needs_gpu = pytest.mark.skip(reason="needs an NVIDIA GPU: pass --gpu on a machine with one")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(needs_gpu)


def pytest_collection_finish() -> None:
    # Imported modules stay, so freeze them for the garbage collector. Tracing makes many small
    # objects; a collection after every 700 of them takes a tenth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture
def optimized():
    """XLA optimizes as for users, LLVM as far as pays for a short run."""
    import jax  # after tests/conftest.py has set up jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def stories():
    """The small model that ships."""
    import dms_jax

    return dms_jax.load(dms_jax.assets.path("stories260k"))


@pytest.fixture
def bare_notebook(monkeypatch):
    """A notebook without ipywidgets that fails on warnings: rich would warn at every refresh."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as ipykernel does
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        yield
    assert not warned


@pytest.fixture
def fakes():
    """Replaces programs by fakes, where requests, counts, files and reports are tested."""
    from tests.support.fake_programs import faked

    with faked():
        yield


@pytest.fixture
def queues(monkeypatch):
    """The number of requests in each queue of the engine."""
    from dms_jax.generation.engine import Engine

    sizes, serve = [], Engine.serve

    def counted(self, source):
        sizes.append(len(source.requests))
        return serve(self, source)

    monkeypatch.setattr(Engine, "serve", counted)
    return sizes


@pytest.fixture(autouse=True)
def few_memory_maps(pytestconfig):
    yield
    done = pytestconfig.stash[TESTS_DONE] = pytestconfig.stash.get(TESTS_DONE, 0) + 1
    if done % TESTS_BETWEEN_COUNTS or not MEMORY_MAPS.exists() or "jax" not in sys.modules:
        return
    with MEMORY_MAPS.open("rb") as maps:
        count = sum(1 for _ in maps)
    if count > MOST_MEMORY_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()
