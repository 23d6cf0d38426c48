"""Inputs and NumPy oracles of the kernel tests, and the ways to run a kernel without its device."""

import functools
import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import chex
import ml_dtypes
import numpy as np
import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

# Permitted norm-wise relative errors of a kernel, by dtype of the queries.
TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 2e-5, "float64": 1e-12}


def by_name(cases, name):
    """Returns the case of this name in a kernel's module of cases."""
    groups = (getattr(cases, group, ()) for group in ("CONTRACT", "XLA_ONLY", "BENCHMARK"))
    return {case.name: case for group in groups for case in group}[name]


def decode_inputs(case, seed=0):
    """Draws a decode case: keyword arguments of `decode_attention`, as NumPy arrays.

    Rows own pages of the pool in random order. In a poisoned case unread slots and unowned pages
    hold NaN, and dead table entries point outside the pool.
    """
    rng = np.random.default_rng(seed)
    page, size = case.pages, case.page_size
    owners = rng.permutation(page)
    table = np.full((case.rows, case.columns), page + 7, np.int32)
    if case.poison:
        table[:, 1::2] = -5
    else:
        table[:] = 0
    read = np.zeros((page, size), bool)
    taken = 0
    for row, length in enumerate(case.lengths):
        count = -(-length // size)
        table[row, :count] = owners[taken : taken + count]
        for i, owner in enumerate(owners[taken : taken + count]):
            read[owner, : max(0, min(size, length - i * size))] = True
        taken += count

    pages_dtype = np.dtype(case.pages_dtype or case.dtype)
    shape = (page, size, case.head_dim)
    inputs = {
        "q": rng.standard_normal((case.rows, case.group, case.head_dim)).astype(case.dtype),
        "page_table": table,
        "lengths": np.array(case.lengths, np.int32),
    }
    for name in ("k", "v"):
        values = rng.standard_normal(shape).astype(np.float32)
        if case.pages_dtype:
            scales = rng.uniform(0.5, 2.0, (page, size)).astype(np.float32)
            if name == "v":
                scales *= case.value_scale
            if case.poison:
                scales[~read] = np.nan
            inputs[f"{name}_scales"] = scales
        if case.dtype == "float64":
            values = rng.standard_normal(shape)
        if case.poison:
            values[~read] = np.nan
        inputs[f"{name}_pages"] = values.astype(pages_dtype)
    return inputs


def decode_oracle(inputs, scale, *, sinks=None, soft_cap=None):
    """Paged attention in float64, one row and one head at a time: (o, lse, scores)."""
    q = inputs["q"].astype(np.float64)
    rows, group, head_dim = q.shape
    size = inputs["k_pages"].shape[1]
    slots = inputs["page_table"].shape[1] * size
    out = np.zeros((rows, group, head_dim))
    sinks = np.full((rows, group), -np.inf) if sinks is None else sinks.astype(np.float64)
    lse = sinks.copy()
    scores = np.full((rows, group, slots), -np.inf)
    for row, length in enumerate(inputs["lengths"]):
        if length == 0:
            continue
        where = [(inputs["page_table"][row, j // size], j % size) for j in range(length)]
        index = tuple(np.array(where).T)
        read = {}
        for name in ("k", "v"):
            read[name] = inputs[f"{name}_pages"][index].astype(np.float64)
            if f"{name}_scales" in inputs:
                read[name] *= inputs[f"{name}_scales"][index].astype(np.float64)[:, None]
        for head in range(group):
            s = scale * (read["k"] @ q[row, head])
            if soft_cap is not None:
                s = soft_cap * np.tanh(s / soft_cap)
            peak = s.max()
            weights = np.exp(s - peak)
            total = weights.sum() + np.exp(sinks[row, head] - peak)
            lse[row, head] = peak + np.log(total)
            out[row, head] = weights @ read["v"] / total
            scores[row, head, :length] = s
    return out, lse, scores


def sinks_of(case):
    """The sinks of a case's query heads; None for none."""
    return np.linspace(-2.0, 3.0, case.H).astype("float32") if case.sinks else None


def float8_score_bound(inputs, scale):
    """Error bound of Hopper's float8 adder for each score, [R, G, slots].

    Queries are split into numbers of 3 significant bits. For each, products with a key are added to
    the sum 32 at a time, all truncated to 13 bits below their largest exponent.
    """
    q, scales = inputs["q"].astype(np.float64), inputs["k_scales"].astype(np.float64)
    size, slots = scales.shape[1], inputs["page_table"].shape[1] * scales.shape[1]
    bound = np.zeros((*q.shape[:2], slots))
    for row, length in enumerate(inputs["lengths"]):
        where = [(inputs["page_table"][row, j // size], j % size) for j in range(length)]
        if not where:
            continue
        index = tuple(np.array(where).T)
        keys = inputs["k_pages"][index].astype(np.float64)
        rest, loss = q[row], 0.0
        for part in range(3):
            factor = 8.0**part
            operand = (rest * factor).astype(ml_dtypes.float8_e5m2).astype(np.float64) / factor
            rest = rest - operand
            products = operand[:, None] * keys
            blocks = products.reshape(*products.shape[:2], -1, 32)
            largest = np.abs(blocks).max(-1)
            before = np.abs(np.cumsum(blocks.sum(-1), -1)[..., :-1])
            largest[..., 1:] = np.maximum(largest[..., 1:], before)
            loss = loss + 33 * 2.0**-13 * largest.sum(-1)
        bound[row, :, :length] = scale * np.abs(scales[index]) * loss
    return bound


def relative_error(got, want):
    """Norm of the difference over the norm of the expected; NaN or a wrong -inf is an error."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    chex.assert_equal_shape([got, want])
    chex.assert_trees_all_equal(np.isneginf(got), np.isneginf(want))
    finite = np.isfinite(want)
    chex.assert_tree_all_finite(got[finite])
    norm = np.linalg.norm(want[finite])
    return np.linalg.norm(got[finite] - want[finite]) / (norm if norm else 1.0)


def as_arrays(inputs):
    """Turn NumPy inputs to jax arrays."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(jnp.asarray, inputs)


def split_rows(inputs):
    """The queries of a decode case, and the rows that they attend to."""
    from pallas_kernels.decode.rows import Rows

    return inputs["q"], Rows(**{name: x for name, x in inputs.items() if name != "q"})


def structs(case):
    """Shapes and dtypes of a decode case's inputs."""
    import jax

    def struct(shape, dtype):
        return jax.ShapeDtypeStruct(shape, np.dtype(dtype))

    pool = (case.pages, case.page_size, case.head_dim)
    pages = struct(pool, case.pages_dtype or case.dtype)
    shapes = {
        "q": struct((case.rows, case.group, case.head_dim), case.dtype),
        "k_pages": pages,
        "v_pages": pages,
        "page_table": struct((case.rows, case.columns), np.int32),
        "lengths": struct((case.rows,), np.int32),
    }
    if case.pages_dtype:
        shapes["k_scales"] = shapes["v_scales"] = struct(pool[:2], np.float32)
    return shapes


def with_all_results(implementation=None):
    """Returns `decode_attention` as a function of its arrays, with all results."""
    from pallas_kernels import decode_attention

    return functools.partial(
        decode_attention,
        scale=0.1,
        return_lse=True,
        return_scores=True,
        implementation=implementation,
    )


def on_the_card(contract):
    """All (case, GPU kernel) pairs that are served, as test parameters."""
    served = {"mosaic_gpu": ("bfloat16",), "mosaic_mma": ("bfloat16", "float16")}
    return [
        pytest.param(implementation, case, id=f"{implementation}-{case.name}")
        for implementation, dtypes in served.items()
        for case in contract
        if case.dtype in dtypes and case.D <= 256  # wider ones are XLA's
    ]


def poison_free_memory():
    """Leave NaN in the device memory that the next outputs will use."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.full((64 << 20,), jnp.nan, jnp.float32))


def lower_for_cuda(function, **shapes):
    """Lower a function for an absent H200; return the program's text."""
    import jax
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(lambda inputs: function(**inputs)).trace(shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Pallas's Triton backend will be removed: no test program may use it.
    assert "__gpu$xla.gpu.triton" not in text
    return text


def launched_with(card, function, **shapes) -> list[int]:
    """Returns the bytes of shared memory of each kernel launch of a function on a card.

    Mosaic allocates them when it lowers the kernel, independently of plans, and before it infers
    register layouts, which take nine tenths of the time and are skipped.
    """
    from unittest import mock

    import jax
    from jax.experimental.mosaic.gpu import core, utils

    from pallas_kernels import dispatch

    sizes, launch = [], core._gpu_ops_gen.LaunchOp

    def note(*arguments, dynamicSharedMemorySize, **options):
        constant = dynamicSharedMemorySize.owner.attributes["value"]
        sizes.append(core.ir.IntegerAttr(constant).value)
        return launch(*arguments, dynamicSharedMemorySize=dynamicSharedMemorySize, **options)

    told = mock.patch.object(core._gpu_ops_gen, "LaunchOp", note)
    there = mock.patch.object(dispatch, "_local_gpu", return_value=card)
    written_for = mock.patch.object(utils, "_infer_arch", return_value=card.capability)
    unfinished = mock.patch.object(core, "lower_mgpu_module", return_value=None)
    with told, there, written_for, unfinished:
        jax.clear_caches()
        lower_for_cuda(function, **shapes)
    return sizes


def run_apart(script, *arguments, **environment):
    """Runs a script in a separate process, which must succeed; returns its output lines."""
    finished = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT), **environment},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return finished.stdout.splitlines()


def tpu_interpreters():
    """Returns two modes of the TPU interpreter, which find different mistakes.

    If copies run when they are awaited, reads without a wait see missing data; if they run when
    they start, early overwrites corrupt data.
    """
    from jax.experimental.pallas import tpu as pltpu

    modes = ("on_wait", "eager")
    options = {"detect_races": True, "uninitialized_memory": "nan"}
    return [pltpu.InterpretParams(dma_execution_mode=mode, **options) for mode in modes]


def answer_with_numpy(*operands, result_avals, callback, sharding, ordered):
    """Replaces jax's `io_callback_impl`, which answers the interpreter's callbacks.

    jax would convert every operand to a jax array, which interpreters convert back to NumPy: more
    than half of their time. They get copies, because they may keep them.
    """
    import jax

    return jax.tree.map(np.asarray, callback(*map(np.array, operands)))


def interpret_quickly():
    """Gives the interpreters of this script process NumPy operands."""
    from jax._src import callback
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    # This one accepts integers for warpgroup places, and otherwise only jax arrays.
    place = shared_memory._to_int
    shared_memory._to_int = lambda x: x.item() if isinstance(x, np.ndarray) else place(x)
    callback.io_callback_impl = answer_with_numpy
    gc.set_threshold(20_000)  # as for tests


def interpret(operation, implementation, names):
    """Runs `interpreted.py`; every case must be right, without races.

    The interpreters record races only of the last kernel, but print every race.
    """
    # With fewer threads than warpgroups of a program Mosaic GPU's interpreter hangs.
    settings = {"JAX_PLATFORMS": "cpu", "NPROC": "4", "JAX_NUM_CPU_DEVICES": "1"}
    script = Path(__file__).with_name("interpreted.py")
    lines = run_apart(script, operation, implementation, *names, **settings)
    races = [i for i, line in enumerate(lines) if "RACE DETECTED" in line]
    assert not races, "\n".join(lines[races[0] : races[0] + 7])
    assert [line for line in lines if line.endswith(" ok")] == [f"{name} ok" for name in names]


def compile_for_tpu(script, kind, *arguments):
    """Runs a script that compiles for a TPU ahead of time."""
    return run_apart(
        script,
        *arguments,
        JAX_PLATFORMS="cpu",
        JAX_DISABLE_MOST_OPTIMIZATIONS="0",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TPU_ACCELERATOR_TYPE=kind,
        TPU_WORKER_HOSTNAMES="localhost",
    )


def for_each_tpu(test):
    """Parametrises a test over every supported kind of TPU."""
    kinds = [("v5litepod-4", "v5e:2x2"), ("v5p-8", "v5p:2x2x1"), ("v6e-4", "v6e:2x2")]
    test = pytest.mark.parametrize(("kind", "topology"), kinds)(test)
    missing = importlib.util.find_spec("libtpu") is None
    return pytest.mark.nightly(pytest.mark.skipif(missing, reason="libtpu is not installed")(test))
