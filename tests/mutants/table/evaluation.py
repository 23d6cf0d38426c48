"""Mistakes in `dms_jax/evaluation`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/evaluation/"
STATISTICS = "tests/evaluation/test_statistics.py"
ESCAPES = "tests/evaluation/sandbox/test_escapes.py"
SANDBOX = "tests/evaluation/sandbox/test_sandbox.py"
CODE = "tests/evaluation/tasks/test_code.py"
LIKELIHOOD = "tests/evaluation/test_likelihood.py"
EVALUATING = "tests/evaluation/test_evaluating.py"

MUTANTS = [
    Mutant(
        "evaluation: a difference leaves out the right side's seeds",
        FOLDER + "statistics.py",
        "seeds = _seed_variance(left) + _seed_variance(right)",
        "seeds = _seed_variance(left)",
        (f"{STATISTICS}::test_both_sides_seeds_add_to_the_error_of_a_difference",),
    ),
    Mutant(
        "evaluation: chains count as problems in an error",
        FOLDER + "statistics.py",
        "return Measured(float(means.mean()), standard_error(means))",
        "return Measured(float(means.mean()), standard_error(values.ravel()))",
        (f"{STATISTICS}::test_the_error_is_that_of_problems_not_of_chains",),
    ),
    Mutant(
        "evaluation: the spread of seeds is not that of their mean",
        FOLDER + "statistics.py",
        "return standard_error(values.mean(1)) ** 2",
        "return float(values.mean(1).var(ddof=1)) if len(values) > 1 else 0.0",
        (f"{STATISTICS}::test_seeds_add_their_own_error",),
    ),
    Mutant(
        "evaluation: a frontier ends at its best point",
        FOLDER + "pareto.py",
        "            curve.append((largest, curve[-1][1]))\n",
        "            pass\n",
        (STATISTICS,),
    ),
    Mutant(
        "evaluation: interpolation is linear in the budget",
        FOLDER + "pareto.py",
        "share = math.log(budget / low.budget) / span",
        "share = (budget - low.budget) / (high.budget - low.budget)",
        (f"{STATISTICS}::test_interpolation_is_linear_in_the_logarithm_of_the_budget",),
    ),
    Mutant(
        "evaluation: knots of a frontier inside the common interval are left out",
        FOLDER + "pareto.py",
        "knots = knots[(knots >= start) & (knots <= end)]",
        "knots = np.array([start, end])",
        (f"{STATISTICS}::test_the_average_gain_integrates_linear_frontiers",),
    ),
    Mutant(
        "evaluation: all problems share their chains' seeds",
        FOLDER + "evaluating.py",
        "np.random.SeedSequence([seed, problem]).generate_state(chains)",
        "np.random.SeedSequence([seed]).generate_state(chains)",
        (EVALUATING,),
    ),
    Mutant(
        "evaluation: problems of several tasks skip numbers",
        FOLDER + "evaluating.py",
        "for index in range(start, start + (count",
        "for index in range(start + 1, start + 1 + (count",
        (f"{EVALUATING}::test_problems_of_several_tasks_are_the_first_of_each",),
    ),
    Mutant(
        "evaluation: the prompt of a likelihood never ends",
        FOLDER + "likelihood.py",
        "prompt=prompt, ends_prompt=ends)",
        "prompt=prompt, ends_prompt=())",
        (f"{LIKELIHOOD}::test_a_prompt_ends_where_the_context_does",),
    ),
    Mutant(
        "evaluation: answers of other settings are taken over",
        FOLDER + "journal.py",
        "if number == 1 and found != settings:",
        "if number == 1 and found is None:",
        ("tests/evaluation/test_resuming.py::test_answers_of_other_settings_are_not_mixed",),
    ),
    Mutant(
        "evaluation: pass@k draws chains with replacement",
        FOLDER + "statistics.py",
        "(draws - math.comb(below, k)) / draws",
        "1 - (below / chains) ** k",
        (f"{STATISTICS}::test_pass_at_k_is_the_mean_over_every_choice_of_k_chains",),
    ),
    Mutant(
        "sandbox: calls that are not on the list are allowed",
        FOLDER + "sandbox/inside/system_calls.py",
        "steps.append(_return(otherwise))",
        "steps.append(_return(_ALLOW))",
        (f"{ESCAPES}::test_an_escape_is_a_failure_and_nothing_else[mode]",),
    ),
    Mutant(
        "sandbox: every file can be read",
        FOLDER + "sandbox/inside/confining.py",
        "return [*own, *_SHARED_LIBRARIES, *_OTHERS]",
        'return ["/"]',
        (f"{ESCAPES}::test_an_escape_is_a_failure_and_nothing_else[read a secret]",),
    ),
    Mutant(
        "sandbox: threads are not counted",
        FOLDER + "sandbox/supervising.py",
        "(0, _CONTINUE) if self.threads >= 0 else (-_EAGAIN, 0)",
        "(0, _CONTINUE)",
        (f"{ESCAPES}::test_threads_are_counted",),
    ),
    Mutant(
        "sandbox: it outlives the process that judges",
        FOLDER + "sandbox/inside/confining.py",
        "kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)",
        "pass",
        (f"{ESCAPES}::test_it_dies_with_the_process_that_judges",),
    ),
    Mutant(
        "sandbox: it runs with what the system has",
        FOLDER + "sandbox/confined.py",
        "if process.missing and not self.allow_weaker:",
        "if False:",
        (SANDBOX,),
    ),
    Mutant(
        "code: the first block of code is the answer",
        FOLDER + "tasks/code.py",
        "return blocks[-1] if",
        "return blocks[0] if",
        (f"{CODE}::test_chat_answers_to_humaneval",),
    ),
    Mutant(
        "analysis: key projections are read and value projections are not",
        "dms_jax/analysis/latency.py",
        "heads = 2 * config.num_heads + 2 * config.num_kv_heads",
        "heads = 2 * config.num_heads + config.num_kv_heads",
        ("tests/analysis/test_latency.py",),
    ),
]
