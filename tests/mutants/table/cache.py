"""Mistakes in `dms_jax/cache`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/cache/"
PAGES = "tests/cache/test_pages.py"
HOST = "tests/cache/test_host_values.py::test_programs_read_values_of_earlier_programs"
IN_8_BITS = "tests/laws/test_prompt_and_steps.py::test_keys_with_biases_in_8_bits"

MUTANTS = [
    Mutant(
        "cache: pages that were given back stay in the table",
        FOLDER + "pages.py",
        "        table[rows, columns] = self.no_page\n",
        "",
        (PAGES,),
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
        "cache: 65504 in 8 bits is rounded to what float16 does not have",
        FOLDER + "quantization.py",
        "jnp.clip(wide, -largest, largest)",
        "wide",
        ("tests/cache/test_quantization.py::test_largest_numbers_stay_finite_in_8_bits",),
    ),
    Mutant(
        "cache: scorers see keys of 8 bits without the mean of their biases",
        "dms_jax/model/cutting.py",
        "(k + center[..., None, :])",
        "(k + 0 * center[..., None, :])",
        (IN_8_BITS,),
    ),
    Mutant(
        "cache: keys of 8 bits are stored with their biases",
        "dms_jax/model/cached_attention.py",
        "(k - chunk.key_center)",
        "(k - 0 * chunk.key_center)",
        (IN_8_BITS,),
    ),
    Mutant(
        "cache: of two values for one slot the older is read",
        FOLDER + "host_values.py",
        "last = jnp.where(slots[..., None] == own[:, :, None], index, 0).max(-1)",
        "last = (slots[..., None] == own[:, :, None]).argmax(-1) + 1",
        (HOST,),
    ),
]
