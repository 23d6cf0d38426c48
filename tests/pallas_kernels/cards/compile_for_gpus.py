"""Compile the kernels for absent GPUs; print the number in each program as JSON.

`test_compiles_for_gpus.py` runs it in one process per kind of GPU, with the compiler for GPUs on
its path (`make gpu-compiler`). If the compiler refuses a kernel, the process ends.
"""

import functools
import gc
import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import core, utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import (
    dispatch,
    grouped_product,
    prefill_attention,
    received_attention,
    select_largest,
)
from pallas_kernels.decode import cases
from pallas_kernels.prefill import cases as prefill_cases
from pallas_kernels.received import cases as received_cases
from pallas_kernels.training import cases as training_cases
from pallas_kernels.update import cases as write_cases
from tests.pallas_kernels.prefill.support import ORDER
from tests.pallas_kernels.prefill.support import structs as prefill_structs
from tests.pallas_kernels.received.support import structs as received_structs
from tests.pallas_kernels.support import by_name, structs, with_all_results
from tests.pallas_kernels.training.support import both
from tests.pallas_kernels.training.support import structs as training_structs
from tests.pallas_kernels.update.support import operation, write_structs
from tests.support import gpu_compiler
from tests.support.ahead import compile_ahead

# One case of each form on a card; the interpreter and real cards test the others. L4 has the
# kernels of A100; as its shared memory is the smallest, its cases take the most, including the
# gradients of the widest heads. On B200 the same kernels run packed documents.
KERNELS = {
    "a100": (
        *("decode base", "decode head_dim96", "decode group16_head_dim512", "select bfloat16"),
        "training dim_96",
    ),
    "l4": (
        *("decode group16_head_dim256", "decode float8_page16", "write float8"),
        "training dim_256",
    ),
    "h200": (
        *("decode base", "decode head_dim96", "decode group12", "decode float8", "prefill dim_96"),
        *("decode head_dim512", "decode group16_head_dim512"),
        *("prefill float16", "write rotated_head_dim64", "write rotated_float32"),
        *("training packed", "training dim_256_packed", "received ragged", "received dim_256"),
        *("grouped 64 32 2880 2880", "grouped 9000 8 2048 1536"),
    ),
    "b200": (
        *("decode base", "decode float8_page16", "write float8", "select bfloat16"),
        *(
            "decode group16_head_dim512",
            "training packed",
            "training dim_96",
            "prefill dim_96",
            "prefill dim_256",
        ),
    ),
}
EVERYWHERE = ("write base", "write rotated", "select float32", "prefill plain")
# Shared memory of a program: more would be refused only at launch.
SHARED_BYTES = {"a100": 163 * 1024, "l4": 99 * 1024, "h200": 227 * 1024, "b200": 227 * 1024}


def call(name: str, case: str) -> tuple:
    """Returns a call of a kernel, and its input shapes by name."""
    if name == "decode":
        return with_all_results(), structs(by_name(cases, case))
    if name == "training":
        case = by_name(training_cases, case)
        return both(case, None), training_structs(case)
    if name == "prefill":
        case = by_name(prefill_cases, case)
        function = functools.partial(prefill_attention, window=case.window, scale=0.1)
        return function, dict(zip(ORDER, prefill_structs(case), strict=True))
    if name == "received":
        function = functools.partial(received_attention, scale=0.1)
        return function, received_structs(by_name(received_cases, case))
    if name == "select":
        scores = jax.ShapeDtypeStruct((4, 1024), jnp.dtype(case))
        return functools.partial(select_largest, count=64), {"scores": scores}
    if name == "grouped":
        rows, experts, inputs, outputs = map(int, case.split())
        return grouped_gradient, {
            "x": jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16),
            "matrices": jax.ShapeDtypeStruct((experts, inputs, outputs), jnp.bfloat16),
            "counts": jax.ShapeDtypeStruct((experts,), jnp.int32),
        }
    case = by_name(write_cases, case)
    return operation(case), write_structs(case)


def grouped_gradient(x, matrices, counts):
    """Returns the products and the gradient of the rows, one kernel each."""
    y, backward = jax.vjp(lambda x: grouped_product(x, matrices, counts), x)
    return y, backward(y)


def compile_on(kind: str) -> dict[str, int]:
    """Returns the number of kernels in each case's program on a kind of GPU."""
    card = gpu_compiler.CARDS[kind]
    mesh = Mesh(np.array(gpu_compiler.devices(kind, 1, a_host=1)), ("x",))
    place = NamedSharding(mesh, PartitionSpec())
    gpu = dispatch.GPU(card.name, card.cores, card.capability)
    counts = {}
    # Kernels are written for the present GPU, or for Hopper if there is none.
    with (
        mock.patch.object(dispatch, "_local_gpu", return_value=gpu),
        mock.patch.object(utils, "_infer_arch", return_value=card.capability),
        core.artificial_shared_memory_limit(SHARED_BYTES[kind]),
    ):
        jax.clear_caches()
        for each in (*KERNELS[kind], *EVERYWHERE):
            function, shapes = call(*each.split(maxsplit=1))
            placed = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes
            )
            lowered = jax.jit(lambda given, function=function: function(**given)).lower(placed)
            text = compile_ahead(lowered, card.name).text
            counts[each] = text.count('custom_call_target="mosaic_gpu')
    return counts


def main(kind: str) -> None:
    """Compiles for a kind of GPU; within a process the compiler keeps the first kind."""
    jax.config.update("jax_platforms", "cpu")
    gc.set_threshold(20_000)  # as for tests
    print(json.dumps(compile_on(kind)))


if __name__ == "__main__":
    main(sys.argv[1])
