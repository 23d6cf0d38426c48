"""A step's communication per device does not grow with the number of devices."""

import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import for_gpus
from tests.support.ahead import GPU_COMPILER
from tests.training import collectives as compiling

ROOT = Path(__file__).resolve().parents[2]
OF_ROOT = os.environ | {"PYTHONPATH": str(ROOT)}
WIDTH, VOCABULARY = compiling.CONFIG.hidden_size, compiling.CONFIG.vocab_size
MATRIX = {f"[{VOCABULARY},{WIDTH}]", f"[{WIDTH},{VOCABULARY}]"}


def check(found, *, times_known):
    """`found`: (kind, arrays, times) of the collectives of a step."""
    gathered = [(arrays, times) for kind, arrays, times in found if kind == "all-gather"]
    gathered = [times for arrays, times in gathered for _ in range(heads_in(arrays))]
    # The student's and the teacher's, at most once a pass, never in the loop over chunks.
    most = compiling.PASSES if times_known else 1
    assert 2 <= sum(gathered) <= 2 * most
    # Reductions are in float32, and no matrix is reduced as a whole.
    for kind, arrays, _ in found:
        if kind in ("reduce-scatter", "all-reduce"):
            assert "bf16" not in arrays
    kinds = collections.Counter(kind for kind, _, _ in found)
    assert kinds["reduce-scatter"] >= 4


def heads_in(arrays):
    """The number of output matrices among these arrays."""
    return sum(arrays.count(shape) for shape in MATRIX)


def compiled(target, *shards, environment):
    """Returns the collectives of a step for each number of shards."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.collectives", target, *map(str, shards)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {each: [tuple(row[1:]) for row in rows if row[0] == str(each)] for each in shards}


@pytest.fixture(scope="module")
def on_cpu():
    environment = OF_ROOT | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    return compiled("cpu", 2, 8, "2x4", "4x1x2", environment=environment)


@pytest.mark.nightly
def test_output_matrix_is_gathered_once_a_pass(on_cpu):
    for shards in (2, 8, "2x4"):
        check(on_cpu[shards], times_known=True)


def gathered_rows(found):
    """The shapes of gathered arrays over all tokens of a row, without token ids: (B, rest)."""
    shapes = [
        tuple(map(int, shape.split(",")))
        for kind, arrays, _ in found
        if kind == "all-gather"
        for shape in re.findall(r"(?:bf16|f32)\[([\d,]+)\]", arrays)
    ]
    return {tuple(sorted(shape)) for shape in shapes if compiling.LENGTH in shape}


@pytest.mark.nightly
def test_split_rows_gather_keys_values_and_decisions(on_cpu):
    """Activations of the model's width are never gathered."""
    config, found = compiling.CONFIG, on_cpu["2x4"]
    rows = (compiling.SEQUENCES, compiling.LENGTH)
    keys = tuple(sorted((*rows, config.num_kv_heads, config.head_dim)))
    decisions = tuple(sorted((*rows, config.num_kv_heads)))
    assert gathered_rows(found) == {keys, decisions}


def check_growth(by_shards):
    """At equal tokens per device; arrays count as a whole, without the factor (N - 1) / N.

    All-reduced arrays count twice. Only the tokens themselves grow, because `look_up` needs those
    of all devices.
    """

    def total(data):
        each = by_shards[data]
        sent = lambda kind: 2 if kind == "all-reduce" else 1  # noqa: E731
        return sum(
            sent(kind) * compiling.moved_bytes(kind, arrays, data) * n for kind, arrays, n in each
        )

    few, many = (total(data) for data in sorted(by_shards))
    assert many == pytest.approx(few, rel=0.01)


@pytest.mark.nightly
def test_each_device_of_model_gathers_its_own_part(on_cpu):
    """Matrices that `model` splits are gathered and reduced over `data` alone, half of each."""

    def moved(shards, data):
        found = collections.Counter()
        for kind, arrays, times in on_cpu[shards]:
            found[kind] += compiling.moved_bytes(kind, arrays, data) * times
        return found

    whole, halves = moved(8, 8), moved("4x1x2", 4)
    # And over `model` the gradients of the decisions, in float32.
    numbers = compiling.SEQUENCES * compiling.LENGTH * compiling.CONFIG.num_kv_heads
    halves["all-gather"] -= 4 * numbers * compiling.PASSES * compiling.LAYERS
    for kind in ("all-gather", "reduce-scatter"):
        assert 2 * halves[kind] == whole[kind] > 0, kind


@pytest.mark.nightly
def test_model_sums_hidden_states_twice_a_layer_and_pass(on_cpu):
    """The teacher, the student, and its backward pass, which computes one sum again."""
    hidden = f"f32[{compiling.SEQUENCES},{compiling.LENGTH},{WIDTH}]"
    sums = collections.Counter()
    for kind, arrays, times in on_cpu["4x1x2"]:
        sums[times] += arrays.count(hidden) * (kind == "all-reduce")
    assert sums[compiling.PASSES * compiling.LAYERS] == 7


@pytest.mark.nightly
def test_communication_per_device_does_not_grow(on_cpu):
    check_growth({data: on_cpu[data] for data in (2, 8)})


@pytest.mark.nightly
@pytest.mark.skipif(
    not (GPU_COMPILER / "jax_plugins").exists(),
    reason="the compiler for GPUs is not installed (make gpu-compiler, 142 MB)",
)
def test_communication_on_gpus():
    """Programs for 2 and 8 H200s, compiled ahead of time by the GPU compiler."""
    on_gpus = compiled("gpu", 2, 8, environment=for_gpus.environment())
    for found in on_gpus.values():
        check(found, times_known=True)
        matrices = [arrays for kind, arrays, _ in found if kind == "all-gather"]
        assert not any("f32" in arrays for arrays in matrices)
    check_growth(on_gpus)


@pytest.mark.nightly
def test_communication_on_tpus():
    """Programs for 4 and 8 v5e chips; matrices are gathered in bfloat16."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    on_tpus = compiled("v5e", 4, 8, environment=OF_ROOT)
    for found in on_tpus.values():
        check(found, times_known=False)
        matrices = [arrays for kind, arrays, _ in found if kind == "all-gather"]
        assert all(arrays.startswith("bf16") for arrays in matrices if "s32" not in arrays)
    check_growth(on_tpus)
