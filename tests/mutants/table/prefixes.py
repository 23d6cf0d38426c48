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
        "prefixes: an answer that was read in another way is exact",
        "dms_jax/policies/base.py",
        'if self.parallel != "prompts" or seen < prompt:',
        "if not self.shrinks or seen < prompt:",
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
        "prefixes: the policy's state is not put back",
        FOLDER + "programs.py",
        "row_state=jax.tree.map(lambda x, new: x.at[:, lane].set(new), cache.row_state, rows),",
        "row_state=cache.row_state,",
        (f"{PREFIXES}::test_questions_prefill_shared_document_once",),
    ),
    Mutant(
        "prefixes: a prompt whose copies draw from its hidden state reads nothing",
        FOLDER + "prefixes.py",
        "if len(request.generated) > 1 and",
        "if request.generated and",
        (RANDOM,),
    ),
    Mutant(
        "prefixes: nobody waits for a prefix that is read",
        FOLDER + "prefixes.py",
        "return coming >= (found[1] if found else 0) + self._runner.page_size",
        "return False",
        (f"{PREFIXES}::test_requests_overtake_those_that_wait_for_prefix",),
    ),
    Mutant(
        "prefixes: what is used stays the least recently used",
        FOLDER + "prefixes.py",
        "        self._on_device.move_to_end(state)\n",
        "        pass\n",
        (f"{PREFIXES}::test_least_recently_used_prefix_is_dropped_first",),
    ),
    Mutant(
        "prefixes: pages of prefixes make requests wait",
        "dms_jax/cache/pages.py",
        "need <= len(free) or need <= len(free) + self._reclaimable(number)",
        "need <= len(free)",
        (f"{PAGES}::test_pages_only_prefixes_hold_are_reclaimed",),
    ),
    Mutant(
        "prefixes: a page that another sequence shares is freed with the first",
        "dms_jax/cache/pages.py",
        "        self._rows[0, pages.ravel()] += 1\n",
        "        self._rows[0, pages.ravel()] = 1\n",
        (f"{PAGES}::test_page_is_free_without_rows_and_prefixes",),
    ),
    Mutant(
        "prefixes: a page that changed counts as copied to the host",
        "dms_jax/cache/host_pages.py",
        "        self._host_of[pages] = NO_PAGE\n",
        "",
        (f"{HOST}::test_changed_device_page_is_copied_again",),
    ),
    Mutant(
        "prefixes: the host has no bound",
        FOLDER + "prefixes.py",
        "num_pages = self._host_bytes // self._runner.page_bytes",
        "num_pages = 2 * self._host_bytes // self._runner.page_bytes",
        (f"{PREFIXES}::test_host_memory_is_bounded",),
    ),
    Mutant(
        "prefixes: a longest length is not part of the key",
        FOLDER + "prefixes.py",
        "key = request.adapter, request.max_length if by_length else None",
        "key = request.adapter, None",
        (f"{PREFIXES}::test_prefixes_depend_on_longest_length_if_budget_does",),
    ),
    Mutant(
        "prefixes: superseded states are copied to the host",
        FOLDER + "prefixes.py",
        "                if state.superseded:",
        "                if False:",
        (f"{PREFIXES}::test_session_holds_only_its_last_state",),
    ),
    Mutant(
        "prefixes: a session holds all of its states",
        FOLDER + "prefixes.py",
        "if not start or (state.ended and not behind_answer):",
        "if start:",
        (f"{PREFIXES}::test_session_holds_only_its_last_state",),
    ),
    Mutant(
        "prefixes: the end of an answer replaces that of a prompt whatever the next one continues",
        FOLDER + "prefixes.py",
        "if not start or (state.ended and not behind_answer):",
        "if not start:",
        (f"{PREFIXES}::test_session_holds_only_its_last_state",),
    ),
]
