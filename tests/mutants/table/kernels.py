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
PREFILL = "tests/pallas_kernels/prefill/test_prefill.py"
TILES = "tests/pallas_kernels/training/test_tiles.py"
KERNELS = "tests/pallas_kernels/training/test_kernels.py"
MMA_TRAINING = f"{KERNELS}::test_gpu_kernels_in_the_interpreter[mosaic_mma-['odd_group']]"
MMA_PROMPT = f"{PREFILL}::test_gpu_kernel_in_the_interpreter[mosaic_mma-['small_pages']]"
WRITE = "pallas_kernels/update/"
WRITTEN = "tests/pallas_kernels/update/test_interpreted.py::test_kernel_agrees_with_the_oracle"
SERVING = "tests/pallas_kernels/test_serving.py::test_gpu_implementations"

LOWERED = "tests/pallas_kernels/cards/test_compiles_for_gpus.py::test_kernels_lower"
DISPATCH = "tests/pallas_kernels/decode/test_dispatch.py"
SHARED = "tests/pallas_kernels/decode/test_shared_memory.py"

MUTANTS = [
    Mutant(
        "kernels: Ampere's form of decoding refuses groups that it has served",
        DECODE + "gpu.py",
        "if q.shape[1] > 16:",
        "if q.shape[1] > 8:",
        (f"{DISPATCH}::test_each_kernel_serves_its_listed_cases",),
    ),
    Mutant(
        "kernels: programs share a core that it has no memory for",
        DECODE + "gpu.py",
        '"programs_per_core": max(1, min(wanted, fit))',
        '"programs_per_core": wanted',
        (f"{SHARED}::test_programs_per_core_fill_shared_memory",),
    ),
    Mutant(
        "kernels: what sums over threads take is not counted",
        DECODE + "spec.py",
        "in operands) + REDUCTION_BYTES",
        "in operands)",
        (f"{SHARED}::test_amperes_kernel_takes_the_counted_bytes",),
    ),
    Mutant(
        "kernels: a key is rotated by the angles of another sequence",
        WRITE + "gpu.py",
        "sequence = lax.div(row, rows // angles[0].shape[0])",
        "sequence = lax.rem(row, rows // angles[0].shape[0])",
        (f"{WRITTEN}[mosaic_gpu]",),
    ),
    Mutant(
        "kernels: what is zero comes back with the rotation",
        WRITE + "reference.py",
        "return jnp.concatenate([cleared(turned.astype(heads.dtype)), value], axis=1)",
        "return jnp.concatenate([turned.astype(heads.dtype), value], axis=1)",
        ("tests/pallas_kernels/update/test_write.py::test_xla_agrees_with_the_oracle",),
    ),
    Mutant(
        "kernels: an empty row has no tile to write its result",
        DECODE + "plan.py",
        "tiles = jnp.maximum(1, (lengths + (tile - 1)) // tile)",
        "tiles = (lengths + (tile - 1)) // tile",
        (f"{PLAN}::test_programs_share_tiles_evenly",),
    ),
    Mutant(
        "kernels: groups of 9 to 15 heads are no whole tiles of the copy engine",
        DECODE + "gpu.py",
        "q = pad_axis(q, 1, 8)",
        "pass",
        (f"{LOWERED}[h200-decode group12]",),
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
        "kernels: Ampere's forward forgets to shrink what it has summed",
        TRAINING + "mma_forward.py",
        "accumulator = accumulator * tiles.rows_of(shrink, accumulator.shape)",
        "accumulator = accumulator * 1.0",
        (MMA_TRAINING,),
    ),
    Mutant(
        "kernels: queries are near one tile too long",
        TRAINING + "gpu_key_gradient.py",
        "k0 + window + 1, 0",
        "k0 + window + 2, 0",
        (f"{TILES}::test_query_zones_match_token_distances",),
    ),
    Mutant(
        "kernels: Ampere's products of 96 take 64 twice",
        TRAINING + "mma_tiles.py",
        "columns = pl.ds(start, min(PART, problem.D - start))",
        "columns = pl.ds(start, min(PART, problem.D))",
        (f"{LOWERED}[b200-prefill dim_96]",),
    ),
    Mutant(
        "kernels: Ampere's prompts put every piece of a tile in its first place",
        "pallas_kernels/prefill/mma.py",
        "target[pl.ds(index * piece, piece)] = values",
        "target[pl.ds(0 * index, piece)] = values",
        (MMA_PROMPT,),
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
        "kernels: pieces of a block are looked for among whole blocks",
        "pallas_kernels/fetch/gpu.py",
        "source = store_ref.at[pl.ds(chosen * piece, piece)]",
        "source = store_ref.at[pl.ds(chosen * block, piece)]",
        ("tests/pallas_kernels/fetch/test_fetch.py::test_gpu_kernel_in_the_interpreter",),
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
    Mutant(
        "kernels: the gradient of a sink has the other sign",
        "pallas_kernels/training/api.py",
        "of_sinks = -jnp.sum(share * mean, axis=(0, 2)).astype(sinks.dtype)",
        "of_sinks = jnp.sum(share * mean, axis=(0, 2)).astype(sinks.dtype)",
        (
            "tests/pallas_kernels/training/test_reference.py"
            "::test_sinks_and_soft_caps_agree_with_the_oracle",
        ),
    ),
    Mutant(
        "kernels: the log-sum-exp of a step leaves its sinks out",
        "pallas_kernels/decode/api.py",
        "results = (out, *[jnp.logaddexp(lse, sinks)] * return_lse, *scores)",
        "results = (out, *[lse] * return_lse, *scores)",
        (
            "tests/pallas_kernels/decode/test_reference.py"
            "::test_sinks_and_soft_caps_agree_with_the_oracle",
        ),
    ),
]
