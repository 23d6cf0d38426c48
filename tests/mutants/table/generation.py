"""Mistakes in `dms_jax/generation`.

Left out, because they change nothing: min-p's floor before top-k and top-p, which never remove the
most likely token; a nucleus that continues where the mass is reached exactly, which softmax
rounding decides; and a row's slots bounded by its limit when it holds more, because asking for less
never takes back a reservation.
"""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
SAMPLING = "tests/generation/test_sampling.py"
SHARED = "tests/generation/test_shared_prompts.py"
CANCEL = "tests/generation/test_cancel.py"
AT_RANDOM = "tests/generation/test_arrivals_at_random.py"
READING = "tests/generation/test_prefill_queue.py"
FAIRNESS = "tests/generation/test_fairness.py"

MUTANTS = [
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
        "generation: booleans are read from the words of what lies before them",
        FOLDER + "programs.py",
        "            start = end\n",
        "            start = end - (leaf.dtype == bool)\n",
        ("tests/generation/test_programs.py::test_packed_results_round_trip",),
    ),
    Mutant(
        "generation: a cancelled prompt is read for nobody",
        FOLDER + "prefill.py",
        "return found & cancelled",
        "return {each.request.index for each in self.items.values()} & cancelled",
        (f"{CANCEL}::test_cancel_stops_prefill",),
    ),
    Mutant(
        "generation: answers wait while the prompt of another request is read",
        FOLDER + "engine.py",
        "takes_turns=self._is_open",
        "takes_turns=False",
        (f"{FAIRNESS}::test_short_prompt_overtakes_a_long_one",),
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
        "generation: the oldest request of the lowest priority is preempted",
        FOLDER + "scheduler.py",
        "max(reversed(self.running), key=",
        "max(self.running, key=",
        (f"{FAIRNESS}::test_least_urgent_youngest_is_preempted",),
    ),
    Mutant(
        "generation: the pool of a policy that cuts has no room for a prompt",
        FOLDER + "memory.py",
        "slots = max_tokens if policy.shrinks and not windowed else min(limit, max_tokens)",
        "slots = min(limit, max_tokens)",
        ("tests/generation/test_budgets.py::test_cut_prompt_frees_pages",),
    ),
    Mutant(
        "generation: who has left a lane still reads a prompt for those that come",
        FOLDER + "prefill.py",
        "        self._first = {}\n        for",
        "        for",
        (f"{SHARED}", f"{READING}", f"{AT_RANDOM}"),
    ),
    Mutant(
        "generation: a lane that had no steps has ended with the last answer in it",
        FOLDER + "runner.py",
        "np.isin(steps.tokens[-1], self.end_tokens) & (self.most > 0)",
        "np.isin(steps.tokens[-1], self.end_tokens)",
        (
            "tests/generation/test_pages_in_flight.py::test_reused_idle_lane_keeps_its_steps_in_flight",
        ),
    ),
]
