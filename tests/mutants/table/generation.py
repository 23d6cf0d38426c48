"""Mistakes in `dms_jax/generation`.

Left out, because they change nothing: min-p's floor before top-k and top-p, which never remove the
most likely token; a nucleus that continues where the mass is reached exactly, which softmax
rounding decides; and a row's slots bounded by its limit when it holds more, because asking for less
never takes back a reservation.
"""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
SAMPLING = "tests/generation/test_sampling.py"
MEMORY = "tests/generation/test_memory.py"
GENERATE = "tests/generation/test_generate.py"
SHARED = "tests/generation/test_shared_prompts.py"
CANCEL = "tests/generation/test_cancel.py"
AT_RANDOM = "tests/generation/test_arrivals_at_random.py"
READING = "tests/generation/test_prefill_queue.py"
FAIRNESS = "tests/generation/test_fairness.py"
TALK = "tests/generation/test_conversation.py"
WARMING = "tests/generation/test_precompile.py"
TEXT = "tests/generation/test_text.py"

MUTANTS = [
    Mutant(
        "generation: blocks of tokens that no device has whole are gathered with all others",
        FOLDER + "sampling.py",
        "together = _BLOCK * sharding.axis_size(sharding.MODEL)",
        "together = _BLOCK",
        ("tests/generation/test_split_vocabulary.py::test_logits_are_not_gathered",),
    ),
    Mutant(
        "generation: a device attends by the plan of another one's rows",
        "dms_jax/model/cached_attention.py",
        'plan=cache_spec(("pages",), data, model)',
        'plan=cache_spec(("pages",), None, None)',
        ("tests/generation/test_split_steps.py::test_each_device_plans_its_own_rows",),
    ),
    Mutant(
        "generation: every position draws the same number",
        FOLDER + "sampling.py",
        "keys = jax.vmap(jax.random.fold_in)(keys, positions)",
        "pass",
        (f"{SAMPLING}::test_draws_follow_the_filtered_distribution",),
    ),
    Mutant(
        "generation: the nucleus leaves out the token that reaches the mass",
        "dms_jax/ranking.py",
        "reached.sum(-1, keepdims=True, dtype=unsigned)",
        "(reached.sum(-1, keepdims=True, dtype=unsigned) + (shift == 0))",
        (f"{SAMPLING}::test_filters_equal_the_oracle",),
    ),
    Mutant(
        "generation: booleans are read from the words of what lies before them",
        FOLDER + "programs.py",
        "            start = end\n",
        "            start = end - (leaf.dtype == bool)\n",
        ("tests/generation/test_programs.py::test_packed_results_round_trip",),
    ),
    Mutant(
        "generation: a request goes on after a first token that ends it",
        FOLDER + "programs.py",
        "    remaining = jnp.where(_ends(tokens, end_tokens) & ~endless, 0, remaining)\n",
        "",
        (f"{GENERATE}::test_first_token_ends_request",),
    ),
    Mutant(
        "generation: a cancelled prompt is read for nobody",
        FOLDER + "prefill.py",
        "return found & cancelled",
        "return {each.request.index for each in self.items.values()} & cancelled",
        (f"{CANCEL}::test_cancel_stops_prefill",),
    ),
    Mutant(
        "generation: a cancelled prompt is dropped that another request shares",
        FOLDER + "prefill.py",
        "return found & cancelled",
        "return set()",
        (f"{READING}::test_sharers_spare_cancelled_prompt",),
    ),
    Mutant(
        "generation: answers wait while the prompt of another request is read",
        FOLDER + "engine.py",
        "takes_turns=is_open",
        "takes_turns=False",
        (f"{FAIRNESS}::test_pauses_are_bounded_by_prefill_tokens",),
    ),
    Mutant(
        "generation: a request that its first token has ended is reported while it reads again",
        FOLDER + "scheduler.py",
        "elif request.state is State.PREFILL or not request.has_new_tokens",
        "elif not request.has_new_tokens",
        ("tests/generation/test_overlap.py::test_ended_request_is_recomputed_after_error",),
    ),
    Mutant(
        "generation: nothing is read on after a preemption, until others were let in",
        FOLDER + "engine.py",
        "continue  # with the requests that are left, before others are admitted",
        "return",
        ("tests/generation/test_arrivals.py::test_prefill_continues_in_turn_of_preemption",),
    ),
    Mutant(
        "generation: short prompts wait for the end of long ones",
        FOLDER + "prefill.py",
        "self._shortest_next = not self._shortest_next",
        "pass",
        (f"{READING}::test_short_prompt_alternates_with_the_oldest",),
    ),
    Mutant(
        "generation: a long prompt waits for the end of all shorter ones",
        FOLDER + "prefill.py",
        "item.rest if self._shortest_next else 0",
        "item.rest",
        (f"{READING}::test_long_prompt_is_not_starved",),
    ),
    Mutant(
        "generation: the oldest request of the lowest priority is preempted",
        FOLDER + "scheduler.py",
        "max(reversed(self.running), key=",
        "max(self.running, key=",
        (f"{FAIRNESS}::test_least_urgent_youngest_is_preempted",),
    ),
    Mutant(
        "generation: an answer takes the position after the last",
        FOLDER + "requests.py",
        "max_new_tokens = min(sampling.max_new_tokens, room)",
        "max_new_tokens = min(sampling.max_new_tokens, room + 1)",
        (f"{GENERATE}::test_ends_at_the_last_position",),
    ),
    Mutant(
        "generation: the reads of selection leave out the pages' bounds",
        "dms_jax/policies/quest.py",
        "reads = budget * readers + held.expected / page_size",
        "reads = budget * readers",
        (f"{MEMORY}::test_estimates_of_other_policies",),
    ),
    Mutant(
        "generation: tied embeddings are not read",
        FOLDER + "memory.py",
        "embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size",
        "embedding = config.vocab_size * config.hidden_size",
        (f"{MEMORY}::test_tied_embeddings_are_read_in_full",),
    ),
    Mutant(
        "generation: the pool of a policy that cuts has no room for a prompt",
        FOLDER + "memory.py",
        "slots = max_tokens if policy.shrinks and not windowed else min(limit, max_tokens)",
        "slots = min(limit, max_tokens)",
        ("tests/generation/test_budgets.py::test_cut_prompt_frees_pages",),
    ),
    Mutant(
        "generation: steps behind a stop string count",
        FOLDER + "requests.py",
        "np.concatenate(self.steps, axis=1)[:, : len(self.generated) - 1]",
        "np.concatenate(self.steps, axis=1)",
        (f"{TEXT}::test_stop_string_does_not_depend_on_chunks",),
    ),
    Mutant(
        "generation: who has left a lane still reads a prompt for those that come",
        FOLDER + "prefill.py",
        "        self._first = {}\n        for",
        "        for",
        (f"{SHARED}", f"{READING}", f"{AT_RANDOM}"),
    ),
    Mutant(
        "generation: prompts are shared whatever share of their length is kept",
        FOLDER + "prefill.py",
        "limited = policy.for_length(1) is not policy",
        "limited = False",
        (f"{SHARED}::test_other_max_lengths_share_no_prompt",),
    ),
    Mutant(
        "generation: something is put back while an answer of one token fills the pool",
        FOLDER + "engine.py",
        "if self.in_flight.drawn or self.in_flight.programs:",
        "if self.in_flight.programs:",
        (AT_RANDOM,),
    ),
    Mutant(
        "generation: in a conversation steps are launched before a stop string is looked for",
        FOLDER + "engine.py",
        "(by_step or is_heard)",
        "is_heard",
        (f"{TALK}::test_stop_string_ends_turn",),
    ),
    Mutant(
        "generation: an interrupt waits for every program that is to be compiled",
        FOLDER + "precompile.py",
        "pool.shutdown(wait=False, cancel_futures=True)",
        "pass",
        (f"{WARMING}::test_interrupt_cancels_pending_compilations",),
    ),
    Mutant(
        "generation: a question is answered in the conversation itself",
        FOLDER + "conversation.py",
        "past = Past(history.before, history.seen, base=0)",
        "past = Past(history.before, history.seen)",
        (f"{TALK}::test_questions_prefill_their_context_once[keeps]",),
    ),
    Mutant(
        "generation: a lane that had no steps has ended with the last answer in it",
        FOLDER + "runner.py",
        "np.isin(steps.tokens[-1], program.end_tokens) & (program.most > 0)",
        "np.isin(steps.tokens[-1], program.end_tokens)",
        (
            "tests/generation/test_pages_in_flight.py::test_reused_idle_lane_keeps_its_steps_in_flight",
        ),
    ),
]
