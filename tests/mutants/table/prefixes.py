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
        "allocator.give(lane, counts, np.where(changing, allocator.no_page, pages))",
        "allocator.give(lane, counts, pages)",
        (RANDOM,),
    ),
    Mutant(
        "prefixes: a copy is not of what the lane holds",
        FOLDER + "prefixes.py",
        "            self._runner.copy_pages(pages[changing], own)\n",
        "",
        (f"{PREFIXES}::test_questions_prefill_shared_document_once",),
    ),
    Mutant(
        "prefixes: the slots of the last tokens are frozen",
        "dms_jax/policies/delayed_eviction.py",
        "return jnp.minimum(first, lengths)",
        "return lengths",
        ("tests/policies/test_delayed_eviction.py", LAW),
    ),
    Mutant(
        "prefixes: slots of steps that were taken back are frozen",
        FOLDER + "checked_steps.py",
        "np.where((kept < each.size)[:, None], 0, part.frozen)",
        "part.frozen",
        ("tests/generation/test_grammar.py::test_steps_taken_back_freeze_no_slots",),
    ),
    Mutant(
        "prefixes: pages that a prefix holds already are reclaimed for it",
        "dms_jax/cache/pages.py",
        "idle = self._lists_of(besides[self._rows[0, besides] == 0])",
        "idle = self._lists_of(besides[self._prefixes[0, besides] == 1])",
        ("tests/cache/test_pages.py",),
    ),
    Mutant(
        "prefixes: the turn of a session stops in its prompt",
        FOLDER + "prefixes.py",
        "if self._runner.appends or not continues or request.sampling.stop:",
        "if True:",
        (f"{PREFIXES}::test_turn_of_session_does_not_stop_in_its_prompt",),
    ),
    Mutant(
        "copies: a page is read before an earlier copy writes it",
        FOLDER + "copies.py",
        "if self._written[sources].any() or self._written[targets].any():",
        "if self._written[targets].any():",
        ("tests/generation/test_copies.py",),
    ),
]
