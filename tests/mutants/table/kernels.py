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
RECEIVED_VISITS = f"{RECEIVED}::test_the_plan_visits_visible_tiles_and_compares_partial_ones"
RECEIVED_SUMS = f"{RECEIVED}::test_gpu_kernel_in_the_interpreter[['reused', 'ragged']]"
PREFILL = "tests/pallas_kernels/prefill/test_prefill.py"
VISITS = f"{PREFILL}::test_the_plan_visits_exactly_the_visible_tiles"
TILES = "tests/pallas_kernels/training/test_tiles.py"
KERNELS = "tests/pallas_kernels/training/test_kernels.py"
MMA_TRAINING = f"{KERNELS}::test_gpu_kernels_in_the_interpreter[mosaic_mma-['odd_group']]"
WIDE_TRAINING = (
    f"{KERNELS}::test_gpu_kernels_in_the_interpreter[mosaic_gpu-['one_token', 'dim_256']]"
)
MMA_PROMPT = f"{PREFILL}::test_gpu_kernel_in_the_interpreter[mosaic_mma-['small_pages']]"
WRITE = "pallas_kernels/update/"
WRITTEN = "tests/pallas_kernels/update/test_interpreted.py::test_kernel_agrees_with_the_oracle"
SERVING = "tests/pallas_kernels/test_serving.py::test_gpu_implementations"

DISPATCH = "tests/pallas_kernels/decode/test_dispatch.py"
TRAINING_MEMORY = "tests/pallas_kernels/training/test_shared_memory.py"
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
        ("tests/pallas_kernels/decode/test_lowering.py::test_lowers_with_all_results[group12]",),
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
        "kernels: Hopper's plan counts rows that are not there",
        DECODE + "mosaic_plan.py",
        "real = column + chunk * _CHUNK < rows",
        "real = column + chunk * _CHUNK <= rows",
        (f"{PLAN}::test_kernel_plan_equals_xla_plan_in_the_interpreter",),
    ),
    Mutant(
        "kernels: a far tile holds a distance within the window",
        TRAINING + "gpu_tiles.py",
        "far_end = lax.div(jnp.maximum(q0 - window, 0), jnp.int32(block))",
        "far_end = ceil_div(jnp.maximum(q0 - window, 0), block)",
        (f"{TILES}::test_gpu_zones_match_token_distances",),
    ),
    Mutant(
        "kernels: the diagonal tile of a key block larger than the queries is left out",
        TRAINING + "gpu_tiles.py",
        "end = ceil_div(q0 + rows, block)",
        "end = lax.div(q0 + rows, jnp.int32(block))",
        (f"{TILES}::test_gpu_zones_match_token_distances",),
    ),
    Mutant(
        "kernels: a ring of tiles counts keys without their values",
        "pallas_kernels/shared_memory.py",
        'for x in scratch.values() if hasattr(x, "shape")]',
        'for name, x in scratch.items() if hasattr(x, "shape") and name != "v_tiles"]',
        (TRAINING_MEMORY,),
    ),
    Mutant(
        "kernels: Ampere's forward forgets to shrink what it has summed",
        TRAINING + "mma_forward.py",
        "accumulator = accumulator * tiles.rows_of(shrink, accumulator.shape)",
        "accumulator = accumulator * 1.0",
        (MMA_TRAINING,),
    ),
    Mutant(
        "kernels: Ampere's key gradient reads the queries of its first head alone",
        TRAINING + "mma_key_gradient.py",
        "head = kv_head * group + index",
        "head = kv_head * group + 0 * index",
        (MMA_TRAINING,),
    ),
    Mutant(
        "kernels: the bias gradient of wide keys counts the window",
        TRAINING + "gpu_wide_gradients.py",
        "dbias = dbias + jnp.where(distance < -problem.window, ds, 0.0).sum(axis=1)",
        "dbias = dbias + ds.sum(axis=1)",
        (WIDE_TRAINING,),
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
        (f"{PREFILL}::test_gpu_kernel_lowers[dim_96-mosaic_mma]",),
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
        "kernels: documents that touch in one block do not meet",
        TRAINING + "gpu_tiles.py",
        "return (low[0] <= high[1]) & (low[1] <= high[0])",
        "return (low[0] < high[1]) & (low[1] < high[0])",
        (f"{TILES}::test_blocks_of_one_document_are_visited",),
    ),
    Mutant(
        "kernels: a far block on TPU holds a distance of the window",
        TRAINING + "tpu_blocks.py",
        "far = below & (q0 - (k0 + problem.keys - 1) > problem.window)",
        "far = below & (q0 - (k0 + problem.keys - 1) >= problem.window)",
        (
            f"{TILES}::test_tpu_zones_match_token_distances",
            f"{TILES}::test_tpu_zones_at_the_window_border",
        ),
    ),
    Mutant(
        "kernels: a key block's last query block on TPU is one too early",
        TRAINING + "tpu_blocks.py",
        "last = meet.shape[1] - 1 - jnp.argmax(meet[:, ::-1], axis=1)",
        "last = jnp.maximum(meet.shape[1] - 2 - jnp.argmax(meet[:, ::-1], axis=1), 0)",
        (f"{TILES}::test_tpu_bounds_reach_every_block_of_a_document",),
    ),
    Mutant(
        "kernels: decoding on TPU looks for the table of a row in one of two places",
        DECODE + "tpu.py",
        "entry = (of_step & (sizes.tables - 1)) * sizes.columns + first",
        "entry = (of_step & 1) * sizes.columns + first",
        (f"{INTERPRETED}::test_kernel_agrees_with_the_oracle[mosaic_tpu-base]",),
    ),
    Mutant(
        "kernels: buffers of prompts on TPU are no power of two, and two tiles have one",
        "pallas_kernels/prefill/tpu.py",
        "BUFFERS = 8",
        "BUFFERS = 6",
        (f"{PREFILL}::test_tpu_kernel_in_the_interpreter[long_past]",),
    ),
    Mutant(
        "kernels: blocks on TPU of more scores than fit",
        TRAINING + "tpu_blocks.py",
        "wide = max(1, D * dtype.itemsize // 256)",
        "wide = 1",
        (f"{TILES}::test_tpu_blocks_stay_within_memory",),
    ),
    Mutant(
        "kernels: an evicted key is hidden one query early",
        "pallas_kernels/prefill/tiles.py",
        "chunk_until = jnp.where(evicted, position + window, ALWAYS)",
        "chunk_until = jnp.where(evicted, position + window - 1, ALWAYS)",
        (VISITS,),
    ),
    Mutant(
        "kernels: a tile is whole for its first query alone",
        "pallas_kernels/prefill/tiles.py",
        "full = (by_tile(until).min(-1) >= real_last) & (by_tile(since).max(-1) <= first)",
        "full = (by_tile(until).min(-1) >= first) & (by_tile(since).max(-1) <= first)",
        (VISITS,),
    ),
    Mutant(
        "kernels: a list by counting puts whole tiles where partial ones belong",
        "pallas_kernels/prefill/tiles.py",
        "before = jnp.where(position < first, count[0] <= position, count[1] <= position - first)",
        "before = jnp.where(position <= first, count[0] <= position, count[1] <= position - first)",
        (VISITS,),
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
        "kernels: received attention compares nothing after the first whole tile of keys",
        "pallas_kernels/received/gpu.py",
        "whole_end = jnp.where(whole, NEVER, key_tile).min(3)",
        "whole_end = jnp.where(whole, key_tile + 1, 0).max(3)",
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
        "kernels: keys receive from the first head of a group alone",
        "pallas_kernels/received/gpu.py",
        "head = kv_head * group + lax.div(step, visits)",
        "head = kv_head * group + 0 * lax.div(step, visits)",
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
