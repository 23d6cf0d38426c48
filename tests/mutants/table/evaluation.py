"""Mistakes in `dms_jax/evaluation`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/evaluation/"
STATISTICS = "tests/evaluation/test_statistics.py"
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
        "tasks[index % len(tasks)].problem(split, start + index // len(tasks))",
        "tasks[index % len(tasks)].problem(split, start + index)",
        (f"{EVALUATING}::test_problems_of_several_tasks_are_the_first_of_each",),
    ),
]
