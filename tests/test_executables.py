"""Executables on disk run without tracing, and only where nothing has changed."""

import contextlib
import dataclasses
import inspect
import math
import os
import pathlib
import pickle
import subprocess
import sys
import time
import types

import chex
import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec

import dms_jax
from dms_jax import compilation, executables
from dms_jax.generation import Engine, Grammar, precompile, programs
from dms_jax.generation.programs import Program
from dms_jax.generation.sampling import Sampling
from tests.generation.support import model_for
from tests.support.compilations import Compilations
from tests.support.instances import further

FILLED = np.full((1, 3), 7.0, np.float32)
LANES = np.array([1], np.int32)
STORIES = pathlib.Path(dms_jax.__file__).parent / "assets/stories260k"
SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
SHORT = Sampling(temperature=0.7, seed=3, max_new_tokens=9)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """Yields a directory of the test in which executables are stored."""
    monkeypatch.setenv(compilation.SWITCH, "")
    monkeypatch.setattr(executables, "_BEGUN", math.inf)  # whenever the source was changed
    source = executables._source
    source.cache_clear()
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    directory = executables.directory()
    assert directory is not None
    yield directory
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    source.cache_clear()


def function() -> types.FunctionType:
    """Returns a copy of a library function that jax has not traced."""
    known = inspect.unwrap(programs.keep_hidden)
    return types.FunctionType(known.__code__, known.__globals__, known.__name__)


def process() -> Program:
    """Returns a program as in a new process: neither traced nor loaded."""
    return Program(function(), donate_argnums=0)


def zeros() -> jax.Array:
    return jax.device_put(np.zeros((2, 3), np.float32))


def prepare(program: Program, *args) -> tuple[int, int]:
    """Prepares a program; returns how many were compiled and how many loaded."""
    with compilation.watched() as made:
        program.prepare(*args)
    return made.compiled, made.read


def file_in(directory: pathlib.Path) -> pathlib.Path:
    (file,) = directory.iterdir()
    return file


@pytest.fixture
def written(kept):
    """The file of `process()` for `zeros()` and the arguments above, and its directory."""
    assert prepare(process(), zeros(), FILLED, LANES) == (1, 0)
    return file_in(kept)


def test_new_process_loads_earlier_executable(written):
    program, given, compilations = process(), zeros(), Compilations()
    assert compilations.of(lambda: program.prepare(given, FILLED, LANES)) == 0
    results = []
    assert compilations.of(lambda: results.append(program(given, FILLED, LANES))) == 0
    chex.assert_trees_all_equal(
        np.asarray(results[0]), np.array([[0, 0, 0], [7, 7, 7]], np.float32)
    )
    assert given.is_deleted()  # it was donated
    assert written.parent.stat().st_mode & 0o777 == 0o700


def flipped(content: bytes) -> bytes:
    """Flips a bit of the executable."""
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def signed(content: bytes, payload: bytes) -> bytes:
    """Returns another content with its correct digest."""
    key = content[len(executables._FORMAT) :][:64].decode()
    return executables._header(key, payload) + payload


DAMAGES = {
    "short": lambda content: content[: len(content) // 2],
    "a bit": flipped,
    "no executable": lambda content: signed(content, pickle.dumps((b"nothing", None))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_counts_as_missing(written, damage):
    content = written.read_bytes()
    written.write_bytes(DAMAGES[damage](content))
    assert written.read_bytes() != content
    program = process()
    assert prepare(program, zeros(), FILLED, LANES)[1] == 0
    chex.assert_trees_all_equal(np.asarray(program(zeros(), FILLED, LANES))[1], FILLED[0])


def test_environment_variable_turns_it_off(kept, monkeypatch):
    monkeypatch.setenv(compilation.SWITCH, "off")
    process().prepare(zeros(), FILLED, LANES)
    assert not [*kept.iterdir()]


def test_jax_cache_skips_only_our_programs(kept):
    """Programs that jax reads from its cache cannot be serialized again."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    process().prepare(zeros(), FILLED, LANES)
    assert [each.name for each in kept.parent.iterdir()] == [kept.name]
    assert jax.config.jax_enable_compilation_cache
    jax.jit(lambda x: x * 3 + 71)(np.float32(1))
    assert len([*kept.parent.iterdir()]) > 1


def test_oldest_files_are_deleted(kept, monkeypatch):
    program, sizes = process(), (2, 3, 4, 5)
    for rows in sizes[:3]:
        program.prepare(np.zeros((rows, 3), np.float32), FILLED, LANES)
    files = sorted(kept.iterdir(), key=lambda each: each.stat().st_mtime_ns)
    size = max(each.stat().st_size for each in files)
    for age, file in enumerate(files):
        os.utime(file, (0, time.time() - 100 + age))
    process().prepare(np.zeros((sizes[0], 3), np.float32), FILLED, LANES)  # it is used
    monkeypatch.setattr(executables, "MOST_BYTES", 3 * size)
    program.prepare(np.zeros((sizes[3], 3), np.float32), FILLED, LANES)
    left = set(kept.iterdir())
    assert len(left) == 3
    assert files[0] in left
    assert files[1] not in left


# -- keys -----------------------------------------------------------------------------------------


def key(*args, program: Program | None = None) -> str | None:
    program = program or process()
    return program._key(program._signature(args))


def test_key_depends_on_compiler_and_versions(kept, monkeypatch):
    del kept
    before = key(zeros(), FILLED, LANES)
    assert before == key(zeros(), FILLED, LANES)
    for change in (
        lambda patch: patch.setattr(executables, "_source", lambda: "another"),
        lambda patch: patch.setattr(executables, "_versions", lambda: {"jax": "0"}),
        lambda patch: patch.setitem(executables._ENVIRONMENT, "XLA_FLAGS", "--another"),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert key(zeros(), FILLED, LANES) != before


def test_key_depends_on_settings_and_shapes(kept):
    del kept
    mesh = dms_jax.make_mesh(data=2)
    placed = [
        jax.device_put(np.zeros((2, 3), np.float32), NamedSharding(mesh, PartitionSpec(*axes)))
        for axes in ((), ("data",))
    ]
    options = Program(function())
    keys = [
        key(zeros(), FILLED, LANES),
        key(np.zeros((2, 4), np.float32), FILLED, LANES),
        key(np.zeros((2, 3), np.float16), FILLED, LANES),
        key(zeros(), 1.0, LANES),
        key(zeros(), 1, LANES),
        key(zeros(), [FILLED], LANES),
        *(key(each, FILLED, LANES) for each in placed),
        key(jax.device_put(zeros(), jax.devices()[1]), FILLED, LANES),
        key(zeros(), FILLED, LANES, program=options),
        key(zeros(), FILLED, LANES, program=Program(inspect.unwrap(programs.set_max_lengths))),
    ]
    with jax.default_matmul_precision("float32"):
        keys.append(key(zeros(), FILLED, LANES))
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(zeros() + 1, FILLED + 1, LANES + 1) == keys[0]
    assert key(np.zeros((2, 3), np.float32), FILLED, LANES) == keys[0]  # where it is by default


def test_programs_of_changed_source_are_not_stored(kept, monkeypatch):
    executables._source.cache_clear()
    monkeypatch.setattr(executables, "_BEGUN", 0.0)
    assert key(zeros(), FILLED, LANES) is None
    process().prepare(zeros(), FILLED, LANES)
    assert not [*kept.iterdir()]


def local(kept, hidden, lanes):
    return kept


def test_programs_of_unknown_source_are_not_stored(kept):
    """Policies of users, and functions of scripts: their source is not part of the key."""

    class Own(dms_jax.TOVA):
        pass

    given = zeros(), FILLED, LANES
    assert key(*given, program=Program(local)) is None
    assert key(zeros(), Own(budget=8), LANES) is None
    assert key(zeros(), dms_jax.TOVA(budget=8), LANES) is not None
    prepare(Program(local), *given)
    assert not [*kept.iterdir()]


def calls_of(engine: Engine):
    """Returns programs of steps and one of prompts, with their arguments."""
    calls = precompile._Calls(engine.runner, Sampling(temperature=0.5, top_k=3).filter)
    shape = next(iter(engine.shapes.one_pass.every(64)))[0]
    checked = calls.checked([4], [8], (2,), {False, True})
    return calls.steps(4, 8, (2,)), *checked, calls.extend(shape, 4)


POLICIES = {
    "vanilla": None,
    "SnapKV": dms_jax.SnapKV(budget=16, window=4, interval=8, kernel=3),
}


def keys_of(name: str) -> list[str | None]:
    engine = Engine(model_for("vanilla"), POLICIES[name], num_lanes=2, max_tokens=64)
    return [key(*given, program=program) for program, given in calls_of(engine)]


@pytest.mark.parametrize("name", POLICIES)
def test_no_program_closes_over_arrays(name):
    """Their values would be part of the executable but not of its key."""
    engine = Engine(model_for("vanilla"), POLICIES[name], num_lanes=2, max_tokens=64)
    for program, given in calls_of(engine):
        traced = program.jitted.trace(*given)
        assert not [each for each in traced.jaxpr.consts if each.size > 64]


ANOTHER = """
import sys
from tests.conftest import prepare_jax
prepare_jax()
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
from tests import test_executables
test_executables.executables._BEGUN = float("inf")
print(*test_executables.keys_of("SnapKV"))
"""


def test_keys_are_equal_in_another_process(kept):
    """No key depends on addresses, or on the order of a set."""
    own = keys_of("SnapKV")
    assert None not in own
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER, str(kept.parent)],
        env=os.environ | {"PYTHONHASHSEED": "17", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == own


@pytest.mark.parametrize("grammar", [None, *further("[a-z ]{1,40}")], ids=["free", "grammar"])
@pytest.mark.parametrize(
    "mesh", [None, pytest.param((2, 2), marks=pytest.mark.nightly)], ids=["device", "mesh"]
)
def test_compiled_and_loaded_programs_answer_alike(kept, monkeypatch, mesh, grammar):
    held = None if grammar is None else Grammar.regex(grammar)
    sampling = dataclasses.replace(SHORT, grammar=held)
    place = None if mesh is None else dms_jax.make_mesh(*mesh)
    model = dms_jax.load(STORIES, mesh=place)
    policy = dms_jax.TOVA(budget=24)
    prompts = [[5, 6, 7], [8, 9], [8, 9], list(range(3, 60))]
    answers, read = [], []
    for _ in range(2):  # processes
        for each in vars(programs).values():
            if isinstance(each, Program):
                monkeypatch.setattr(each, "_ready", {})
        programs.make_cache.cache_clear()
        with compilation.watched() as made:
            engine = Engine(model, policy, num_lanes=6, max_tokens=112, page_size=8)
            completions = engine.generate(prompts, sampling=sampling)
        answers.append([each.tokens for each in completions])
        read.append(made.read)
    assert read[0] == 0
    # On a mesh jax stores some programs itself. With a grammar the programs are new to this
    # process.
    assert read[1] >= len([*kept.iterdir()]) >= (5 if grammar is None else 3)
    assert answers[0] == answers[1]


def test_runtime_is_imported_before_loading(kept, monkeypatch):
    seen = []
    monkeypatch.setattr(executables, "import_runtime", lambda platform: seen.append(platform))
    monkeypatch.setattr(
        executables.serialize_executable,
        "deserialize_and_load",
        lambda *_, **__: seen.append("read"),
    )
    key, payload = "0" * 64, pickle.dumps((b"", None))
    (kept / key).write_bytes(executables._header(key, payload) + payload)
    executables.read(key, None, jax.devices("cpu")[:1])
    assert seen == ["cpu", "read"]


def test_mosaic_kernels_find_their_runtime_without_tracing():
    call = (
        "import os; from dms_jax import executables; "
        "assert 'MOSAIC_GPU_RUNTIME_LIB_PATH' not in os.environ; "
        "executables.import_runtime('cpu'); "
        "assert 'MOSAIC_GPU_RUNTIME_LIB_PATH' not in os.environ; "
        "executables.import_runtime('gpu'); import jax.experimental.mosaic.gpu.core as core; "
        "assert str(core.RUNTIME_PATH or '') == os.environ.get('MOSAIC_GPU_RUNTIME_LIB_PATH', '')"
    )
    environment = {
        name: value for name, value in os.environ.items() if name != "MOSAIC_GPU_RUNTIME_LIB_PATH"
    }
    subprocess.run([sys.executable, "-c", call], check=True, env=environment)


def test_programs_from_jax_cache_are_not_stored(kept, monkeypatch):
    """Its functions would be lost, and the next process could not run it."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    monkeypatch.setattr(compilation, "without_jax_cache", contextlib.nullcontext)
    given = zeros(), FILLED, LANES
    jax.jit(function(), donate_argnums=0, compiler_options=programs.OPTIONS).lower(*given).compile()
    assert prepare(process(), zeros(), FILLED, LANES) == (0, 1)
    assert not [*kept.iterdir()]
