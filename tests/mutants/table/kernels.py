"""Mistakes in `pallas_kernels`: the plans of decode, training, prefill, and the write of a step.

Left out, because they change nothing: Hopper's plan counting starts beyond the last row as passed
by an edge (all equal the number of tiles, which no program edge reaches), and prefill's visits
without checking whether a tile has queries (its last would precede its first).
"""

from tests.mutants.mutant import Mutant

DECODE = "pallas_kernels/decode/"
TRAINING = "pallas_kernels/training/"
PLAN = "tests/pallas_kernels/decode/test_plan.py"
INTERPRETED = "tests/pallas_kernels/decode/test_interpreted.py"
RECEIVED = "tests/pallas_kernels/received/test_received.py"
RECEIVED_VISITS = f"{RECEIVED}::test_plan_visits_visible_tiles"
RECEIVED_SUMS = f"{RECEIVED}::test_gpu_kernel_in_the_interpreter[['reused', 'ragged']]"
TILES = "tests/pallas_kernels/training/test_tiles.py"
SERVING = "tests/pallas_kernels/test_serving.py::test_gpu_implementations"

SHARED = "tests/pallas_kernels/decode/test_shared_memory.py"

MUTANTS = [
    Mutant(
        "kernels: programs share a core that it has no memory for",
        DECODE + "gpu.py",
        '"programs_per_core": max(1, min(wanted, fit))',
        '"programs_per_core": wanted',
        (f"{SHARED}::test_programs_per_core_fill_shared_memory",),
    ),
    Mutant(
        "kernels: an empty row has no tile to write its result",
        DECODE + "plan.py",
        "tiles = jnp.maximum(1, (lengths + (tile - 1)) // tile)",
        "tiles = (lengths + (tile - 1)) // tile",
        (f"{PLAN}::test_programs_share_tiles_evenly",),
    ),
    Mutant(
        "kernels: blocks on a TPU end within lanes of scores",
        DECODE + "tpu.py",
        "return math.lcm(page_size, _LANES)",
        "return max(page_size, _LANES // page_size * page_size)",
        (
            "tests/pallas_kernels/decode/test_dispatch.py"
            "::test_tpu_blocks_are_whole_lanes_of_scores[48]",
        ),
    ),
    Mutant(
        "kernels: program times total overflows",
        DECODE + "plan.py",
        """    share = total // programs
    return program * share + jnp.minimum(program, total - share * programs)""",
        """    share = jnp.int32(program) * jnp.int32(total) // programs
    return share""",
        (f"{PLAN}::test_long_lines_do_not_overflow",),
    ),
    Mutant(
        "kernels: scales of float8 pages are given up before the fence",
        DECODE + "mosaic.py",
        """                plgpu.commit_smem()
                # Threads""",
        "                # Threads",
        (f"{INTERPRETED}::test_kernel_agrees_with_the_oracle[mosaic_gpu-base]",),
    ),
    Mutant(
        "kernels: a far tile holds a distance within the window",
        TRAINING + "gpu_tiles.py",
        "far_end = lax.div(jnp.maximum(q0 - window, 0), jnp.int32(block))",
        "far_end = ceil_div(jnp.maximum(q0 - window, 0), block)",
        (f"{TILES}::test_gpu_zones_match_token_distances",),
    ),
    Mutant(
        "kernels: queries are near one tile too long",
        TRAINING + "gpu_key_gradient.py",
        "k0 + window + 1, 0",
        "k0 + window + 2, 0",
        (f"{TILES}::test_query_zones_match_token_distances",),
    ),
    Mutant(
        "kernels: training off Hopper is left to XLA",
        TRAINING + "api.py",
        """        deferred("mosaic_mma", "cuda", MMA, "forward"),
""",
        "",
        (SERVING,),
    ),
    Mutant(
        "kernels: received attention compares no key that the last query of a tile sees",
        "pallas_kernels/received/gpu.py",
        "jnp.where(queries >= 0, queries, NEVER).min(-1)",
        "queries.max(-1)",
        (RECEIVED_VISITS,),
    ),
    Mutant(
        "kernels: keys receive what queries of padding would give",
        "pallas_kernels/received/gpu.py",
        "return jnp.where(positions >= 0, maximum + jnp.log(total) * LOG2E, NOTHING)",
        "return maximum + jnp.log(total) * LOG2E",
        (RECEIVED_SUMS,),
    ),
]
