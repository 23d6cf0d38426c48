"""Mistakes in the prefix cache: exactness, sharing and dropping."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
PREFIXES = "tests/generation/test_prefixes.py"
RANDOM = f"{PREFIXES}::test_random_prompt_trees_in_small_pools"
LAW = "tests/laws/test_prefixes.py"
PAGES = "tests/cache/test_pages.py"
HOST = "tests/cache/test_host_pages.py"

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
    Mutant(
        "prefixes: pages of prefixes make requests wait",
        "dms_jax/cache/pages.py",
        "need <= len(free) or need <= len(free) + self._reclaimable(number)",
        "need <= len(free)",
        (f"{PAGES}::test_pages_only_prefixes_hold_are_reclaimed",),
    ),
    Mutant(
        "prefixes: a page that changed counts as copied to the host",
        "dms_jax/cache/host_pages.py",
        "        self._host_of[pages] = NO_PAGE\n",
        "",
        (f"{HOST}::test_changed_device_page_is_copied_again",),
    ),
]
