"""Mistakes in `dms_jax/cache`."""

from tests.laws.rows import layer_law
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
        "cache: a row that has more pages than it asks for loses count of them",
        FOLDER + "pages.py",
        "target = np.maximum(self.pages_for(slots), self.reserved).astype(np.int32)",
        "target = self.pages_for(slots).astype(np.int32)",
        (PAGES,),
    ),
    Mutant(
        "cache: free pages are those of the emptiest shard",
        FOLDER + "pages.py",
        "return min(len(free) for free in self._free)",
        "return max(len(free) for free in self._free)",
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
        "cache: a number of exactly 448 takes a scale of two",
        FOLDER + "quantization.py",
        "exponent = exponent - 9 + (mantissa > _LARGEST / 2**9)",
        "exponent = exponent - 9 + (mantissa >= _LARGEST / 2**9)",
        ("tests/cache/test_quantization.py::test_numbers_by_hand",),
    ),
    Mutant(
        "cache: 65504 in 8 bits is rounded to what float16 does not have",
        FOLDER + "quantization.py",
        "jnp.clip(wide, -largest, largest)",
        "wide",
        (
            "tests/cache/test_quantization.py::test_the_largest_numbers_in_8_bits_stay_within_their_type",
        ),
    ),
    Mutant(
        "cache: queries of float16 in the frame of 4 bits are of float16",
        FOLDER + "int4.py",
        "return turned if x.dtype == jnp.float16 else turned.astype(x.dtype)",
        "return turned.astype(x.dtype)",
        ("tests/cache/test_quantization.py::test_steps_and_prompts_of_the_largest_numbers",),
    ),
    Mutant(
        "cache: the sign of a 4-bit scale is lost",
        FOLDER + "int4.py",
        "extreme / -8,",
        "jnp.abs(extreme) / 8,",
        ("tests/cache/test_int4.py::test_numbers_by_hand",),
    ),
    Mutant(
        "cache: a group of 4 bits is the vector of a head, whatever was asked for",
        FOLDER + "int4.py",
        "size = head_dim if self.group is None else math.gcd(self.group, head_dim)",
        "size = head_dim",
        ("tests/cache/test_int4.py",),
    ),
    Mutant(
        "cache: a step does not rotate its queries into the frame of the cache",
        "dms_jax/model/cached_attention.py",
        "cache.pool.rotate(q).reshape(lengths.size, -1, q.shape[-1]),",
        "q.reshape(lengths.size, -1, q.shape[-1]),",
        (layer_law("DMS-window=4-source=adapter-"),),
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
    Mutant(
        "cache: pages on the host are counted from the first page of all",
        "dms_jax/cache/host_values.py",
        "own = page - self.first_page\n        own = jnp.where",
        "own = page\n        own = jnp.where",
        (HOST,),
    ),
]
