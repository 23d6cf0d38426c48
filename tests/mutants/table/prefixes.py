"""Mistakes in the prefix cache: exactness, sharing and dropping."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
PREFIXES = "tests/generation/test_prefixes.py"
RANDOM = f"{PREFIXES}::test_random_prompt_trees_in_small_pools"
LAW = "tests/laws/test_prefixes.py"

MUTANTS = [
    Mutant(
        "prefixes: what was cut at the end of a prompt is exact",
        "dms_jax/policies/base.py",
        "return (seen == prompt and not self.shrinks) or",
        "return seen == prompt or",
        (f"{LAW}::test_exact_prefixes",),
    ),
    Mutant(
        "prefixes: a sequence that overwrites has the pages of its prefix",
        FOLDER + "prefixes.py",
        "self._runner.copy_pages(state.pages, allocator.pages_of(lane, state.lengths))",
        "allocator.table[:, lane] = allocator.no_page, allocator.give(lane, counts, state.pages)",
        (RANDOM,),
    ),
    Mutant(
        "prefixes: a copy is not of what the lane holds",
        FOLDER + "prefixes.py",
        "            self._runner.copy_pages(pages, own)\n",
        "",
        (f"{PREFIXES}::test_questions_prefill_shared_document_once",),
    ),
]
