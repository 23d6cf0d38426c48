"""Mistakes in `dms_jax/serving`, and in arrivals during a call."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/serving/"
LOAD = "tests/serving/test_load.py"
ACCESS = "tests/serving/test_access.py"
STRANGERS = "tests/serving/test_strangers.py"
WARM = "tests/serving/test_warm.py::test_warm_server_compiles_nothing"
ARRIVALS = "tests/generation/test_arrivals.py"
GRAMMAR = "tests/generation/test_grammar.py"
APIS = "tests/serving/test_apis.py"

MUTANTS = [
    Mutant(
        "serving: results stay behind all calls of a message of harmony",
        FOLDER + "chats.py",
        "if result is not None:",
        "if False:",
        (f"{APIS}::test_harmony_answer",),
    ),
    Mutant(
        "serving: requests that come are drawn as the call is",
        "dms_jax/generation/engine.py",
        "self._filter.of({lane: each.sampling for lane, each in running.items()})",
        "next(iter(running.values())).sampling.filter",
        (f"{ARRIVALS}::test_requests_join_running_call",),
    ),
    Mutant(
        "serving: a client that leaves a stream has its answer written to the end",
        FOLDER + "app.py",
        "        waiting.cancel()\n        cancel()\n",
        "        waiting.cancel()\n",
        (f"{LOAD}::test_disconnect_frees_pages",),
    ),
    Mutant(
        "serving: an error ends those that wait, too",
        FOLDER + "service.py",
        "if each.index in ran]",
        "if True]",
        (f"{LOAD}::test_error_ends_only_running_requests",),
    ),
    Mutant(
        "serving: a warm server, and no page table but the narrowest",
        "dms_jax/generation/reservation.py",
        "return sorted({self.table_width(each, steps=steps) for each in slots})",
        "return [self.table_width(1, steps=steps)]",
        (WARM,),
    ),
    Mutant(
        "serving: a name that begins as an allowed one is allowed",
        FOLDER + "access.py",
        "name.endswith(pattern[1:])",
        "name.endswith(pattern[2:])",
        (f"{ACCESS}::test_other_hosts_are_refused",),
    ),
    Mutant(
        "serving: what is no Exception ends the engine without a word",
        FOLDER + "service.py",
        "        except BaseException as error:  # else clients",
        "        except Exception as error:  # else clients",
        (f"{STRANGERS}::test_engine_failure_ends_all_requests",),
    ),
    Mutant(
        "grammar: a greedy lane among others takes what its grammar does not allow",
        "dms_jax/generation/sampling.py",
        "tokens = jnp.where(rule.greedy, jnp.argmax(allowed, -1), tokens)",
        "tokens = jnp.where(rule.greedy, jnp.argmax(logits, -1), tokens)",
        (f"{GRAMMAR}::test_only_allowed_tokens_are_drawn",),
    ),
    Mutant(
        "grammar: steps after a refused token stand",
        "dms_jax/generation/checked_steps.py",
        "program.kept = np.where(refused, own, program.kept)",
        "pass",
        (GRAMMAR,),
    ),
    Mutant(
        "grammar: the token after which a grammar has failed is part of the answer",
        "dms_jax/generation/checked_steps.py",
        "own = places + ~failed",
        "own = places + 1",
        (GRAMMAR,),
    ),
    Mutant(
        "grammar: slots that steps overwrote are not put back",
        "dms_jax/generation/programs.py",
        "    if trail.overwritten is not None:\n",
        "    if False:\n",
        (f"{GRAMMAR}::test_steps_taken_back_change_no_answer",),
    ),
    Mutant(
        "grammar: slots of the second program are not put back",
        "dms_jax/generation/programs.py",
        "(later, jnp.broadcast_to(followed[:, None], back.shape))",
        "(later, jnp.zeros_like(back))",
        (f"{GRAMMAR}::test_steps_taken_back_change_no_answer",),
    ),
    Mutant(
        "grammar: two answers follow one matcher",
        "dms_jax/generation/grammar.py",
        "return self._first.deep_copy()",
        "return self._first",
        (f"{GRAMMAR}::test_greedy_answer_takes_likeliest_allowed_token",),
    ),
    Mutant(
        "lists: a shared prefix that does not fit comes back before answers end",
        "dms_jax/generation/scheduler.py",
        "        self.held_back = False  # answers",
        "        pass  # answers",
        (
            "tests/generation/test_shared_prompts.py::"
            "test_answers_go_on_while_a_shared_prefix_does_not_fit",
        ),
    ),
]
