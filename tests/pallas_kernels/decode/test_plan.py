"""The split of the work against an explicit list of tiles."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode.mosaic_plan import make_plan_on_gpu
from pallas_kernels.decode.plan import make_plan, owner, stretch_start
from tests.support.instances import further


def line_of(lengths, tile):
    """The row of each tile in the list."""
    return np.repeat(np.arange(len(lengths)), np.maximum(1, -(-np.asarray(lengths) // tile)))


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3, 4, 5)])
def test_programs_share_tiles_evenly(seed):
    rng = np.random.default_rng(seed)
    rows, programs = int(rng.integers(1, 20)), int(rng.integers(1, 40))
    lengths = rng.integers(0, 400, rows) * (rng.random(rows) < 0.8)
    plan = make_plan(jnp.asarray(lengths), tile=64, programs=programs)
    line = line_of(lengths, 64)
    starts = np.asarray(stretch_start(len(line), np.arange(programs + 1), programs))
    assert starts[0] == 0
    assert starts[-1] == len(line)
    assert set(np.diff(starts)) <= {len(line) // programs, len(line) // programs + 1}
    chex.assert_trees_all_equal(plan.tile_starts, np.searchsorted(line, np.arange(rows + 1)))
    owners = np.searchsorted(starts, np.arange(len(line)), side="right") - 1
    chex.assert_trees_all_equal(owner(len(line), np.arange(len(line)), programs), owners)
    for program in range(programs):
        mine = line[starts[program] : starts[program + 1]]
        first, last = plan.edge_rows[program], plan.edge_rows[programs + program]
        if len(mine):
            assert (first, last) == (mine[0], mine[-1])
        else:
            assert last < first
    # Row + program is unique for every pair that occurs.
    pairs = {(int(row), int(program)) for row, program in zip(line, owners, strict=True)}
    assert len({row + program for row, program in pairs}) == len(pairs)


def test_long_lines_do_not_overflow():
    """Programs times tiles exceeds 2^31 here."""
    total, programs = 2_000_000_000, 264
    starts = [int(stretch_start(np.int32(total), np.int32(c), programs)) for c in range(265)]
    assert starts[-1] == total
    assert starts == sorted(starts)
    assert [int(owner(np.int32(total), np.int32(s), programs)) for s in starts[:-1]] == list(
        range(264)
    )


def test_plan_of_layers_equals_single_plans():
    lengths = jnp.asarray(np.random.default_rng(1).integers(0, 3000, (3, 5)))
    together = make_plan(jnp.asarray(lengths), tile=64, programs=11)
    for layer in range(3):
        alone = make_plan(lengths[layer], tile=64, programs=11)
        of_layer = jax.tree.map(lambda x, layer=layer: x[layer], together)
        chex.assert_trees_all_equal(of_layer, alone)


def draw_lengths(rows):
    rng = np.random.default_rng(rows)
    return jnp.asarray(rng.integers(0, 3000, rows) * (rng.random(rows) < 0.8), jnp.int32)


def same_plan(rows, programs, interpret=None):
    """Compares a plan of the kernel with XLA's, up to the end of the plan."""
    lengths = draw_lengths(rows)
    want = make_plan(lengths, tile=64, programs=programs)
    got = make_plan_on_gpu(lengths, tile=64, programs=programs, interpret=interpret)
    starts, edges = got.tile_starts[: rows + 1], got.edge_rows[: 2 * programs]
    got = dataclasses.replace(got, tile_starts=starts, edge_rows=edges)
    chex.assert_trees_all_equal(got, want)  # with the same tile and programs


@pytest.mark.parametrize(("rows", "programs"), [(5, 7), (64, 40), (130, 33)])
def test_kernel_plan_equals_xla_plan_in_the_interpreter(rows, programs):
    same_plan(rows, programs, plgpu.InterpretGPUParams(detect_races=True))
    assert not interpret_pallas_call.get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 63, 64, 256, 1500, 16384])
def test_kernel_plan_equals_xla_plan_on_a_gpu(rows):
    same_plan(rows, 264)
