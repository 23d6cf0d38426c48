"""Run GPU training cases in the Mosaic GPU interpreter, in a process of their own.

    NPROC=4 python -m tests.pallas_kernels.training.interpreted IMPLEMENTATION CASE...

Cases have at most three tiles of tokens: with a window shorter than a tile, the third tile sees one
in part, one with the border of the window and one beyond it. What has several KV heads has one
sequence, and one KV head has two query heads, or as many as are odd or more than a tile holds.

A case with ":70,90" behind it is computed in pieces of its queries that are cut there, with two
heads: a piece's place is the same for all of them.

The interpreter runs each warpgroup in a thread of XLA's pool and hangs for ever where that has
fewer threads than a program has warpgroups: NPROC sets the pool's size, and it is read once, at the
start. Nothing may hang a test suite, so the caller also sets a time limit.
"""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from pallas_kernels.training import cases, gpu, mma
from pallas_kernels.training.gpu_tiles import TILE
from tests.pallas_kernels.support import interpret_quickly
from tests.pallas_kernels.training.support import check, draw, in_pieces, operands


def both(module, arrays, do, **options):
    """Output and gradients, from kernels in which no race was found."""
    output, lse2 = module.forward(arrays, **options)
    assert not get_races().races_found, "race in the forward kernel"
    gradients = module.backward(arrays, output, lse2, do, **options)
    assert not get_races().races_found, "race in the backward kernels"
    return output, *gradients


def main() -> None:
    wanted = {case.name: case for case in cases.CONTRACT}
    module = {"mosaic_gpu": gpu, "mosaic_mma": mma}[sys.argv[1]]
    for name in sys.argv[2:]:
        name, _, cuts = name.partition(":")
        case = dataclasses.replace(wanted[name], T=min(wanted[name].T, 3 * TILE))
        if cuts:
            case = dataclasses.replace(case, H=2, K=1)
        elif case.K > 1 and case.T > 1:
            case = dataclasses.replace(case, B=1)
        elif case.H == 4:
            case = dataclasses.replace(case, H=2)
        inputs, segments = draw(case)
        arrays, do = operands(inputs, segments), jnp.asarray(inputs["do"])
        options = {"window": case.window, "scale": case.D**-0.5, "interpret": True}

        run = functools.partial(both, module, **options)
        if cuts:
            results = in_pieces(arrays, do, run, tuple(map(int, cuts.split(","))))
        else:
            results = run(arrays, do)
        check(case, results, inputs, segments)
        print(f"{name} ok", flush=True)


if __name__ == "__main__":
    assert jax.default_backend() == "cpu"
    interpret_quickly()
    main()
