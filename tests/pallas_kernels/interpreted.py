"""Run cases of a kernel in its interpreter and check them; print a line for each right one.

    NPROC=4 python -m tests.pallas_kernels.interpreted OPERATION IMPLEMENTATION CASE[:DETAIL]...

Tests use `support.interpret`: the interpreters start threads and can hang, so they run in a process
that can be killed; races are found in their output. Mosaic GPU's interpreter runs each warpgroup in
a thread of XLA's pool and hangs if the pool has fewer threads than a program has warpgroups. NPROC
sets the pool's size and is read once, at the start.
"""

import dataclasses
import functools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import cases as decode_cases
from pallas_kernels.decode import gpu as decode_gpu
from pallas_kernels.decode import tpu as decode_tpu
from pallas_kernels.decode.plan import make_plan
from pallas_kernels.fetch.gpu import fetch_rows_mosaic
from pallas_kernels.prefill import cases as prefill_cases
from pallas_kernels.prefill import gpu as prefill_gpu
from pallas_kernels.prefill import mma as prefill_mma
from pallas_kernels.received import cases as received_cases
from pallas_kernels.received.gpu import received_attention_mosaic
from pallas_kernels.select import cases as select_cases
from pallas_kernels.select.gpu import select_largest_mosaic
from pallas_kernels.training import cases as training_cases
from pallas_kernels.training import gpu as training_gpu
from pallas_kernels.training import mma as training_mma
from pallas_kernels.training.gpu_tiles import TILE
from pallas_kernels.update import cases as update_cases
from pallas_kernels.update import gpu as update_gpu
from pallas_kernels.update import tpu as update_tpu
from pallas_kernels.update.reference import write_pages_xla
from tests.pallas_kernels import support
from tests.pallas_kernels.prefill import support as prefill_support
from tests.pallas_kernels.received import support as received_support
from tests.pallas_kernels.select_largest import support as select_support
from tests.pallas_kernels.training import support as training_support
from tests.pallas_kernels.update import support as update_support

GPU = plgpu.InterpretGPUParams(detect_races=True)
# Programs of decode: few enough for the interpreter, enough to split rows; a single row is split so
# often that its partial results are distributed.
PROGRAMS, PROGRAMS_OF_ONE_ROW = 5, 22


def decode(implementation, name, tile):
    """The detail is the least number of slots per tile, 64 by default."""
    case, scale = support.by_name(decode_cases, name), 0.1
    inputs = support.decode_inputs(case)
    q, rows = support.split_rows(support.as_arrays(inputs))
    wanted = {"scale": scale, "return_lse": True, "return_scores": True}
    if implementation == "mosaic_tpu":
        kernel = functools.partial(decode_tpu.decode_attention_tpu, q, rows, **wanted)
        got, same = each_tpu_interpreter(kernel)
        chex.assert_trees_all_equal(got, same)
    else:
        programs = PROGRAMS_OF_ONE_ROW if len(rows.lengths) == 1 else PROGRAMS
        # A plan may be made before a step knows whether its rows grow; its last tile is then empty.
        planned = rows.lengths + jnp.arange(len(rows.lengths), dtype=jnp.int32) % 2
        plan = make_plan(planned, tile=max(int(tile or 64), case.page_size), programs=programs)
        # Plans may be longer than necessary.
        plan = jax.tree.map(lambda x: jnp.pad(x, (0, 3), constant_values=1 << 20), plan)
        kernel, options = decode_gpu.mma, {}
        if implementation == "mosaic_gpu":
            # With the widest heads no second tile fits.
            stages = decode_gpu.settings_of("mosaic_gpu", decode_gpu._shape(q, rows))["stages"]
            settings = {"programs_per_core": 1, "stages": min(2, stages)}
            kernel, options = decode_gpu.mosaic, {"settings": settings}
        got = kernel(q, rows, plan, **wanted, **options, interpret=GPU)
    want = support.decode_oracle(inputs, scale)
    errors = [support.relative_error(*pair) for pair in zip(got, want, strict=True)]
    # The form with Ampere's products rounds scaled float8 keys to bfloat16.
    exact = case.pages_dtype is None or implementation != "mosaic_mma"
    assert errors[0] <= support.TOLERANCE[case.dtype], f"{name}: {errors}"
    assert max(errors[1:]) <= (1e-5 if exact else 1e-2), f"{name}: {errors}"


def fetch(_, count, block):
    """A case is a number of blocks, and its detail the rows of each; some blocks are empty."""
    count, block = int(count), int(block)
    store = np.random.default_rng(0).normal(size=(240, 128)).astype(np.float32)
    index = np.random.default_rng(count).integers(0, 240 // block, count).astype(np.int32)
    index[1::3] = -1 if block > 1 else 0
    rows = fetch_rows_mosaic(*map(jnp.asarray, (store, index)), block=block, interpret=GPU)
    found, blocks = np.asarray(rows).reshape(count, block, 128), store.reshape(-1, block, 128)
    chex.assert_trees_all_equal(found[index >= 0], blocks[index][index >= 0])


def prefill(implementation, name, _):
    case = support.by_name(prefill_cases, name)
    module = {"mosaic_gpu": prefill_gpu, "mosaic_mma": prefill_mma}[implementation]
    arguments, scale = prefill_support.draw(case), case.D**-0.5
    operands = prefill_support.split_keys([*map(jnp.asarray, arguments)])
    output = module.prefill(*operands, window=case.window, scale=scale, interpret=True)
    want = prefill_support.oracle(arguments, case.window, scale)
    error = support.relative_error(output, want)
    assert error <= support.TOLERANCE[case.dtype], f"{name}: {error}"


def received(_, name, __):
    case = support.by_name(received_cases, name)
    arguments, scale = received_support.draw(case), case.D**-0.5
    sums = received_attention_mosaic(*map(jnp.asarray, arguments), scale=scale, interpret=True)
    error = support.relative_error(sums, received_support.oracle(arguments, scale))
    # Products of bfloat16 are exact in float32, and sums are in float32.
    assert error <= 1e-5, f"{name}: {error}"


def select(_, name, __):
    case = support.by_name(select_cases, name)
    kinds = select_support.KINDS
    scores = np.concatenate([select_support.draw(case, kind)[:1] for kind in kinds])
    got = select_largest_mosaic(scores, count=case.count, interpret=GPU)
    chex.assert_trees_all_equal(np.asarray(got), select_support.oracle(scores, case.count))


def training(implementation, name, cuts):
    """The detail, "70,90", splits the queries into pieces that are computed one by one.

    Cases have at most three tiles of tokens: with a window shorter than a tile, the third tile sees
    one tile partially, one with the border of the window and one beyond it. Cases with several KV
    heads have one sequence, and one KV head has two query heads, or an odd number, or more than a
    tile holds. Pieces have two heads, because the place of a piece is the same for all heads.
    """
    case = support.by_name(training_cases, name)
    case = dataclasses.replace(case, T=min(case.T, 3 * TILE))
    if cuts:
        case = dataclasses.replace(case, H=2, K=1)
    elif case.K > 1 and case.T > 1:
        case = dataclasses.replace(case, B=1)
    elif case.H == 4:
        case = dataclasses.replace(case, H=2)
    module = {"mosaic_gpu": training_gpu, "mosaic_mma": training_mma}[implementation]
    options = {"window": case.window, "scale": case.D**-0.5, "interpret": True}

    def run(arrays, do):
        output, lse2 = module.forward(arrays, **options)
        return output, *module.backward(arrays, output, lse2, do, **options)

    inputs, segments = training_support.draw(case)
    arrays, do = training_support.operands(inputs, segments), jnp.asarray(inputs["do"])
    if cuts:
        results = training_support.in_pieces(arrays, do, run, tuple(map(int, cuts.split(","))))
    else:
        results = run(arrays, do)
    training_support.check(case, results, inputs, segments)


def update(implementation, name, _):
    case = support.by_name(update_cases, name)
    inputs = update_support.write_inputs(case)
    operands = update_support.operands(support.as_arrays(inputs))
    if implementation == "mosaic_tpu":
        # Several blocks of rows, the last one partial.
        update_tpu._VMEM_BYTES = 1 << 16
        kernel = functools.partial(update_tpu.write_pages_tpu, *operands, zeroed=case.zeroed)
        got, same = each_tpu_interpreter(kernel)
        update_support.assert_same_bits(same, got)
    else:
        got = update_gpu.mosaic(*operands, zeroed=case.zeroed, interpret=GPU)
    update_support.assert_agrees(case, inputs, got)
    # Also a rotation, which the oracle does not round to float32.
    want = write_pages_xla(*operands, zeroed=case.zeroed)
    update_support.assert_rounded_alike(got, want)


def each_tpu_interpreter(kernel):
    """Results of a kernel in each interpreter of `tpu_interpreters`."""
    return [jax.block_until_ready(kernel(interpret=form)) for form in support.tpu_interpreters()]


def main(operation, implementation, *names):
    """Runs the cases and prints each right one."""
    operations = (decode, fetch, prefill, received, select, training, update)
    check = {each.__name__: each for each in operations}[operation]
    for name in names:
        check(implementation, *name.partition(":")[::2])
        print(f"{name} ok", flush=True)


if __name__ == "__main__":
    support.interpret_quickly()
    main(*sys.argv[1:])
