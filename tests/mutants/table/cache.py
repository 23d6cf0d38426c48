"""Mistakes in `dms_jax/cache`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/cache/"
PAGES = "tests/cache/test_pages.py"
HOST = "tests/cache/test_host_values.py::test_programs_read_values_of_earlier_programs"

MUTANTS = [
    Mutant(
        "cache: pages that were given back stay in the table",
        FOLDER + "pages.py",
        "        table[rows, columns] = self.no_page\n",
        "",
        (PAGES,),
    ),
    Mutant(
        "cache: what lies beyond a row's length is read too",
        FOLDER + "pool.py",
        "live = jnp.arange(rows.shape[2]) < lengths[..., None]\n    return",
        "live = jnp.arange(rows.shape[2]) <= lengths[..., None]\n    return",
        ("tests/cache/test_pool.py",),
    ),
    Mutant(
        "cache: a page of kept slots that is not full stays behind",
        FOLDER + "pool.py",
        "needed = -(-lengths.max(initial=0) // block)",
        "needed = lengths.max(initial=0) // block",
        ("tests/cache/test_pool.py::test_compaction_keeps_order",),
    ),
    Mutant(
        "cache: of equal scores one too few is among the largest",
        "dms_jax/ranking.py",
        "jnp.cumsum(equal, -1, dtype=jnp.int32) <= left",
        "jnp.cumsum(equal, -1, dtype=jnp.int32) < left",
        ("tests/test_ranking.py::test_marks_equal_those_of_a_sort",),
    ),
    Mutant(
        "cache: what is not marked comes behind one slot too few",
        "dms_jax/ranking.py",
        "others = marked[..., -1:] + jnp.cumsum(~marks, -1, dtype=jnp.int32)",
        "others = marked[..., -2:-1] + jnp.cumsum(~marks, -1, dtype=jnp.int32)",
        ("tests/test_ranking.py::test_partition_is_stable",),
    ),
    Mutant(
        "cache: heads fetch as many values as another sequence's",
        "dms_jax/model/fetching.py",
        "counts = jnp.repeat(fetch.counts[:, 0], page_table.shape[1])",
        "counts = jnp.tile(fetch.counts[:, 0], page_table.shape[1])",
        ("tests/generation/test_budgets.py",),
    ),
    Mutant(
        "cache: scales of next to nothing round to zero",
        FOLDER + "quantization.py",
        "scales = jnp.ldexp(jnp.ones((), jnp.float32), jnp.maximum(exponent, _LEAST_EXPONENT))",
        "scales = jnp.ldexp(jnp.ones((), jnp.float32), exponent)",
        ("tests/cache/test_quantization.py::test_numbers_by_hand",),
    ),
    Mutant(
        "cache: 65504 in 8 bits is rounded to what float16 does not have",
        FOLDER + "quantization.py",
        "jnp.clip(wide, -largest, largest)",
        "wide",
        ("tests/cache/test_quantization.py::test_largest_numbers_stay_finite_in_8_bits",),
    ),
    Mutant(
        "cache: the peak is what is live at the end of a chunk",
        FOLDER + "accounting.py",
        "self.peak = max(self.peak, int(max(live)))",
        "self.peak = max(self.peak, int(live[-1]))",
        ("tests/cache/test_accounting.py",),
    ),
    Mutant(
        "cache: the highest bytes are those of the chunks alone",
        FOLDER + "accounting.py",
        "peak_cache_bytes=max(self.peak_bytes, cache_bytes),",
        "peak_cache_bytes=self.peak_bytes,",
        ("tests/cache/test_accounting.py::test_peak_is_at_least_the_final_bytes",),
    ),
    Mutant(
        "cache: of two values for one slot the older is read",
        FOLDER + "host_values.py",
        "last = jnp.where(slots[..., None] == own[:, :, None], index, 0).max(-1)",
        "last = (slots[..., None] == own[:, :, None]).argmax(-1) + 1",
        (HOST,),
    ),
]
